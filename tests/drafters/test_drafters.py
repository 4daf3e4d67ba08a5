"""DFlash and DSpine against a float64 NumPy evaluation, and the invariants of their structure."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from dspine_mlx.checkpoints.open import parameters
from dspine_mlx.convert.reference import Head, Round, dflash_round, dspine_round
from dspine_mlx.drafters import METHODS
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.proposal import Proposal
from dspine_mlx.load import load_drafter
from dspine_mlx.target.model import Target
from tests.support.checkpoints import (
    Checkpoint,
    Shape,
    dflash_zlab,
    dspine_specforge,
    offsets,
    random_features,
    save,
    tiny_target,
)
from tests.support.tiny import tiny_dflash, tiny_dspine
from tests.support.tiny import tiny_target as qwen3_target


def build(checkpoint: Checkpoint, shape: Shape) -> tuple[Drafter, Head]:
    config, weights = checkpoint
    model, head = tiny_target(shape)
    method = METHODS["dspine" if "dspine_config" in config else "dflash"]
    network = method.network(method.config.from_dict(config))
    arrays = parameters(method.exported, {name: mx.array(value) for name, value in weights.items()})
    network.load_weights(list(arrays.items()))
    return network.bind(Target(model)), head


def propose(drafter: Drafter, features: np.ndarray, anchor: int, chunks: list[int]) -> Proposal:
    """Feed the context in chunks, the last one together with the anchor."""
    cache = drafter.make_cache()
    parts = np.split(features, np.cumsum(chunks)[:-1])
    for part in parts[:-1]:
        drafter.extend(mx.array(part)[None], cache)
    proposal = drafter.propose(anchor, mx.array(parts[-1])[None], cache).ranked()
    assert {c.offset for c in cache} == {len(features)}  # the block's rows are gone
    return proposal


def assert_equal(proposal: Proposal, reference: Round, tolerance: float = 1e-5) -> None:
    assert proposal.candidates.tolist() == reference.candidates.tolist()
    for ours, wanted in (
        (proposal.first, reference.first),
        (proposal.transitions, reference.transitions),
    ):
        assert ours.dtype == mx.float32
        error = np.abs(np.array(ours, np.float64) - wanted).max(initial=0)
        assert error <= tolerance * np.abs(reference.base[np.isfinite(reference.base)]).max()


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("make", [dflash_zlab, dspine_specforge])
def test_a_reduced_vocabulary_leaves_out_the_other_tokens_alone(
    make: Any, bits: int | None
) -> None:
    """Its candidates and transitions are those of a drafter that ranks the whole vocabulary, of the
    tokens that it has; also with a packed head."""
    shape = Shape()
    config, weights = make(shape)
    model, _ = tiny_target(shape)
    if bits is not None:
        nn.quantize(model, 32, bits, class_predicate=lambda path, m: path.endswith(OWN_EMBEDDINGS))
    kept = np.sort(np.random.default_rng(1).choice(shape.V, 40, replace=False))
    proposals = []
    for extra, own in (
        ({"top_k": shape.V}, {}),
        ({"top_k": 7, "draft_vocab_size": 40}, {"d2t": offsets(kept)}),
    ):
        method = METHODS["dspine" if "dspine_config" in config else "dflash"]
        nested = {"dspine_config": config.get("dspine_config", {}) | extra}
        network = method.network(method.config.from_dict(config | nested | extra))
        arrays = parameters(method.exported, {n: mx.array(v) for n, v in (weights | own).items()})
        network.load_weights(list(arrays.items()))
        drafter = network.bind(Target(model))
        features = random_features(shape, 6)
        proposals.append(propose(drafter, features, 3, [6]))
    whole, part = proposals
    ranked = np.array(whole.candidates)
    known = np.isin(ranked, kept)
    for t, row in enumerate(part.candidates.tolist()):
        assert row == ranked[t][known[t]][:7].tolist()
    places = [
        [list(ranked[t]).index(v) for v in row] for t, row in enumerate(part.candidates.tolist())
    ]
    np.testing.assert_allclose(np.array(part.first), np.array(whole.first)[places[0]], rtol=1e-5)
    for t, table in enumerate(np.array(part.transitions)):
        wanted = np.array(whole.transitions[t])[np.ix_(places[t], places[t + 1])]
        np.testing.assert_allclose(table, wanted, rtol=1e-4, atol=1e-5)


OWN_EMBEDDINGS = ("embed_tokens", "lm_head")
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "causal by dflash_config": {"dflash_config": {"causal": True}},
    "is_causal wins": {"is_causal": False, "dflash_config": {"causal": True}},
    "sliding layers": SLIDING,
    "sliding, bidirectional": SLIDING | {"is_causal": False},
    "window wider than the context": SLIDING | {"sliding_window": 40},
    "window by dflash_config": {"dflash_config": {"use_swa": True, "swa_window_size": 6}},
    "yarn": {"rope_scaling": YARN},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    "interleaved": {"rope_is_neox_style": False},
    "softcap": {"final_logit_softcapping": 1.5},
    "scales": {"input_embedding_scale": 3.0, "output_multiplier": 0.25},
    "value scale": {"dflash_config": {"attention_value_scale": 0.5}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunks", [[7], [3, 4], [5, 2, 0]])
def test_dflash_equals_numpy(variant: str, chunks: list[int]) -> None:
    shape, changes = Shape(), dict(VARIANTS[variant])
    config, weights = dflash_zlab(shape)
    config["dflash_config"] |= changes.pop("dflash_config", {})
    config |= changes | {"top_k": 6}
    drafter, head = build((config, weights), shape)
    features = random_features(shape, 7)
    reference = dflash_round(weights, config, head, features, 11, k=6)
    assert_equal(propose(drafter, features, 11, chunks), reference)


def test_variants_differ() -> None:
    """The cases above tell the settings apart: no two variants of one kind give one table."""
    shape, features = Shape(), random_features(Shape(), 7)
    tables = []
    for changes in map(dict, VARIANTS.values()):
        config, weights = dflash_zlab(shape)
        config["dflash_config"] |= changes.pop("dflash_config", {})
        drafter, _ = build((config | changes, weights), shape)
        tables.append(np.array(propose(drafter, features, 11, [7]).first))
    causal = [tables[i] for i, name in enumerate(VARIANTS) if name.startswith("causal")]
    np.testing.assert_array_equal(causal[0], causal[1])
    np.testing.assert_array_equal(tables[0], tables[list(VARIANTS).index("is_causal wins")])
    distinct = {t.tobytes() for t in tables}
    assert len(distinct) == len(tables) - 2


SHAPES = st.builds(
    Shape,
    H=st.sampled_from([16, 32, 40]),
    I=st.sampled_from([24, 48]),
    L=st.integers(1, 4),
    heads=st.sampled_from([2, 4]),
    kv=st.sampled_from([1, 2]),
    hd=st.sampled_from([4, 8, 16]),
    taps=st.sampled_from([(0,), (0, 2), (1, 2, 3)]),
    B=st.integers(2, 9),
    r=st.sampled_from([8, 24]),
    a=st.sampled_from([4, 12]),
    reach=st.sampled_from([1, 2]),
    seed=st.integers(0, 50),
)


@settings(deadline=None, max_examples=30)
@given(shape=SHAPES, length=st.integers(1, 12), anchor=st.integers(0, 90))
def test_dspine_equals_numpy(shape: Shape, length: int, anchor: int) -> None:
    checkpoint = dspine_specforge(shape)
    drafter, head = build(checkpoint, shape)
    features = random_features(shape, length)
    config, weights = checkpoint
    reference = dspine_round(weights, config, head, features, anchor, k=6)
    assert_equal(propose(drafter, features, anchor, [length]), reference)


@pytest.mark.parametrize("variant", ["sliding layers", "yarn", "softcap", "scales"])
def test_dspine_variants_equal_numpy(variant: str) -> None:
    shape = Shape()
    config, weights = dspine_specforge(shape)
    config |= VARIANTS[variant]
    drafter, head = build((config, weights), shape)
    features = random_features(shape, 9)
    reference = dspine_round(weights, config, head, features, 5, k=6)
    assert_equal(propose(drafter, features, 5, [6, 3]), reference)


@pytest.mark.parametrize("names", [("lm_head",), ("embed_tokens",), ("embed_tokens", "lm_head")])
def test_a_dflash_checkpoint_may_have_its_own_embeddings(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    shape, rng = Shape(), np.random.default_rng(8)
    config, weights = dflash_zlab(shape)
    for name in names:
        weights[f"{name}.weight"] = rng.normal(size=(shape.V, shape.H)).astype(np.float32)
    model, head = tiny_target(shape)
    drafter = load_drafter(save(tmp_path, config, weights), model)
    features = random_features(shape, 6)
    k = drafter.config.top_k
    assert_equal(
        propose(drafter, features, 5, [6]), dflash_round(weights, config, head, features, 5, k=k)
    )


def test_table_is_serial_last_write_refinement() -> None:
    """One slot and one predecessor at a time, through the module's own layers."""
    drafter = tiny_dspine(qwen3_target())
    network, features = drafter.network, mx.random.normal((1, 6, 64))
    proposal = drafter.propose(4, features, drafter.make_cache()).ranked()
    cache = drafter.make_cache()
    _, u, receiver = network.injected_backbone(mx.array(4), features, cache, drafter.target)
    M, K = proposal.candidates.shape
    for t in range(1, M):
        for i in range(K):
            code = network.injection.from_codes(
                network.transfer_codes(proposal.candidates[t - 1, i])
            )
            gate = mx.sigmoid(receiver[t] + code[: receiver.shape[1]])
            write = network.injection.writes[-1](gate * code[receiver.shape[1] :])
            h = u[t] + mx.sqrt((u[t] ** 2).mean()) * write
            logits = drafter.target.head(network.norm(h))[proposal.candidates[t]]
            assert mx.allclose(logits, proposal.transitions[t - 1, i], rtol=1e-5, atol=1e-4)


def test_zero_writes_make_dspine_a_causal_dflash() -> None:
    model = qwen3_target()
    spine, flash = tiny_dspine(model), tiny_dflash(model, is_causal=True)
    shared = dict(tree_flatten(flash.network.parameters()))
    spine.network.load_weights(list(shared.items()), strict=False)
    for write in spine.network.injection.writes:
        write.weight = mx.zeros_like(write.weight)
    features = mx.random.normal((1, 6, 64))
    a = spine.propose(4, features, spine.make_cache()).ranked()
    b = flash.propose(4, features, flash.make_cache()).ranked()
    assert mx.array_equal(a.candidates, b.candidates)
    assert mx.allclose(a.first, b.first, rtol=1e-5)
    assert mx.allclose(a.transitions, b.transitions, rtol=1e-5, atol=1e-5)


def test_no_later_slot_changes_an_earlier_one() -> None:
    """Proposals of a shorter block are the first ones of a longer block."""
    model = qwen3_target()
    features = mx.random.normal((1, 6, 64))
    long, short = tiny_dspine(model, block_size=9), tiny_dspine(model, block_size=4)
    a = long.propose(4, features, long.make_cache()).ranked()
    b = short.propose(4, features, short.make_cache()).ranked()
    assert mx.array_equal(a.candidates[:3], b.candidates)
    assert mx.allclose(a.transitions[:2], b.transitions, rtol=1e-5, atol=1e-5)
    bidirectional = [tiny_dflash(model, block_size=n) for n in (9, 4)]
    c, d = (x.propose(4, features, x.make_cache()).ranked() for x in bidirectional)
    assert not mx.allclose(c.first, d.first, rtol=1e-3)  # the control: without causality it does


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_stays_close(dtype: mx.Dtype) -> None:
    model = qwen3_target()
    drafter = tiny_dspine(model)
    features = mx.random.normal((1, 6, 64))
    exact = drafter.propose(4, features, drafter.make_cache()).ranked()
    model.set_dtype(dtype)
    drafter.set_dtype(dtype)
    drafter = drafter.network.bind(Target(model))
    half = drafter.propose(4, features.astype(dtype), drafter.make_cache()).ranked()
    assert half.first.dtype == half.transitions.dtype == mx.float32
    scale = mx.abs(exact.transitions).max()
    same = exact.candidates == half.candidates
    assert same.sum().item() > 0.6 * same.size
    rows = mx.all(same, axis=-1)
    both = (rows[:-1] & rows[1:])[:, None, None]
    error = mx.where(both, mx.abs(exact.transitions - half.transitions), 0).max()
    assert error < (0.02 if dtype == mx.float16 else 0.15) * scale

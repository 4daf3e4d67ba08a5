"""Every published layout converts, and its round equals NumPy's on the source's own tensors."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from dspine_mlx.checkpoints.open import open_checkpoint
from dspine_mlx.convert.conversion import convert
from dspine_mlx.convert.plan import Options
from dspine_mlx.convert.reference import Chain, Head, dflash_round, dspark_round, dspine_round
from dspine_mlx.convert.reference_dflash2 import dflash2_round
from dspine_mlx.convert.reference_domino import domino_round
from dspine_mlx.convert.verify import Verification, verify
from dspine_mlx.drafters.chain import ChainProposal
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter
from tests.support.checkpoints import (
    Checkpoint,
    Shape,
    dflash_block7,
    dflash_zlab,
    dspark_deepspec,
    dspark_gemma4,
    dspark_specforge,
    dspine_reference,
    dspine_specforge,
    dspine_tencent,
    offsets,
    random_features,
    save,
    speculators,
    tiny_target,
)
from tests.support.dflash2 import Sizes, dflash2_speculators, dflash2_zlab
from tests.support.domino import domino_specforge

SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 128,
}
YARN_FACTOR = YARN | {"attention_factor": 1.7}
WINDOWED = speculators()[0]["transformer_layer_config"] | SLIDING
Maker = Callable[[Shape], Checkpoint]


def weighted(checkpoint: Checkpoint) -> Checkpoint:
    """As others' converted copies name the codebooks."""
    config, weights = checkpoint
    named = {f"{n}.weight" if n.endswith("codebook") else n: v for n, v in weights.items()}
    return config, named


DFLASH: dict[str, Maker] = {
    "z-lab": dflash_zlab,
    "z-lab, block size nested": partial(dflash_zlab, nested_block=True),
    "z-lab, sliding": partial(dflash_zlab, **SLIDING),
    "z-lab, sliding, not causal": partial(dflash_zlab, is_causal=False, **SLIDING),
    "z-lab, yarn": partial(dflash_zlab, rope_scaling=YARN, max_position_embeddings=4096),
    "z-lab, yarn with a factor": partial(dflash_zlab, rope_parameters=YARN_FACTOR),
    "z-lab, linear rope": partial(dflash_zlab, rope_scaling={"type": "linear", "factor": 4.0}),
    "z-lab, scaled and capped": partial(
        dflash_zlab, input_embedding_scale=3.0, output_multiplier=0.5, final_logit_softcapping=2.0
    ),
    "speculators": partial(speculators, method="dflash"),
    "speculators, sliding": partial(
        speculators, method="dflash", transformer_layer_config=WINDOWED
    ),
    "speculators, sliding, not causal": partial(
        speculators,
        method="dflash",
        transformer_layer_config=WINDOWED,
        sliding_window_non_causal=True,
    ),
    "speculators, reduced": partial(speculators, method="dflash", reduced=True),
}
DSPARK: dict[str, Maker] = {
    "DeepSpec": dspark_deepspec,
    "DeepSpec, gated": partial(dspark_deepspec, kind="gated"),
    "DeepSpec, rnn": partial(dspark_deepspec, kind="rnn"),
    "DeepSpec, Gemma 4": dspark_gemma4,
    "DeepSpec, Gemma 4, own values": partial(dspark_gemma4, k_eq_v=False),
    "DeepSpec, Gemma 4, gated": partial(dspark_gemma4, kind="gated"),
    "dflash_*_block7": dflash_block7,
    "SpecForge": dspark_specforge,
    "SpecForge, gated": partial(dspark_specforge, kind="gated"),
    "SpecForge, nested heads": partial(dspark_specforge, nested=True),
    "SpecForge, interleaved": partial(dspark_specforge, rope_is_neox_style=False),
    "SpecForge, yarn": partial(dspark_specforge, rope_scaling=YARN),
    "speculators": speculators,
    "speculators, reduced": partial(speculators, reduced=True),
    "speculators, mask first": partial(speculators, sample_from_anchor=False),
}
CHANNELS = Sizes(g=1)  # divides any width
DFLASH2: dict[str, Maker] = {
    "z-lab": partial(dflash2_zlab, sizes=CHANNELS),
    "z-lab, sliding and full": partial(dflash2_zlab, **SLIDING),
    "z-lab, sliding, causality unstated": partial(dflash2_zlab, is_causal=None, **SLIDING),
    "z-lab, some tokens": partial(dflash2_zlab, sizes=CHANNELS, selector_vocab_size=40),
    "z-lab, codebooks are weights": lambda shape: weighted(dflash2_zlab(shape, CHANNELS)),
    "speculators": partial(dflash2_speculators, sizes=CHANNELS),
    "speculators, sliding, causal": partial(dflash2_speculators, sliding_window_non_causal=False),
}
DOMINO: dict[str, Maker] = {
    "SpecForge": domino_specforge,
    "SpecForge, not shifted": partial(domino_specforge, shift=False),
    "SpecForge, shift unstated": partial(domino_specforge, shift=None),
    "SpecForge, older names": partial(domino_specforge, older=True),
    "SpecForge, corrected from the first": partial(domino_specforge, prefix=0),
}
DSPINE: dict[str, Maker] = {
    "SpecForge": dspine_specforge,
    "SpecForge, causality unstated": partial(dspine_specforge, is_causal=None),
    "reference": dspine_reference,
    "Tencent": dspine_tencent,
}
LAYOUTS = {f"{method}, {name}": (maker, score) for method, makers, score in (
    ("DFlash", DFLASH, dflash_round),
    ("DSpark", DSPARK, dspark_round),
    ("DSpine", DSPINE, dspine_round),
    ("DFlash2", DFLASH2, dflash2_round),
    ("Domino", DOMINO, domino_round),
) for name, maker in makers.items()}  # fmt: skip


def assert_same_round(
    drafter: Drafter, score: Callable[..., Any], checkpoint: Checkpoint, head: Head, shape: Shape
) -> None:
    """Candidates are the best base logits, and all scores agree within 1e-5; of a chain, those of
    all tokens along its greedy path, which is the published one."""
    config, weights = checkpoint
    features, anchor = random_features(shape), 5
    cache = drafter.make_cache()
    proposal = drafter.propose(anchor, mx.array(features)[None], cache)
    if isinstance(proposal, ChainProposal):
        assert_same_path(proposal, partial(score, weights, config, head, features, anchor))
        return
    proposal = proposal.ranked()
    ids = np.array(proposal.candidates).astype(int)
    wanted = score(weights, config, head, features, anchor, candidates=ids)
    best = -np.sort(-wanted.base, axis=1)[:, : ids.shape[1]]
    tolerance = 1e-5 * max(1, np.abs(wanted.transitions).max(initial=0))
    np.testing.assert_allclose(np.take_along_axis(wanted.base, ids, 1), best, atol=tolerance)
    np.testing.assert_allclose(np.array(proposal.first), wanted.first, atol=tolerance)
    np.testing.assert_allclose(np.array(proposal.transitions), wanted.transitions, atol=tolerance)
    if wanted.confidence is not None:
        assert proposal.confidence is not None
        np.testing.assert_allclose(np.array(proposal.confidence), wanted.confidence, atol=1e-5)


def assert_same_path(proposal: ChainProposal, score: Callable[..., Chain]) -> None:
    ((path, _),) = proposal.paths([mx.zeros(proposal.candidates.shape)], 1.0)
    tokens = proposal.tokens[path].tolist()
    wanted = score(path=tokens)
    scores = np.full(wanted.scores.shape, -np.inf)
    scores[:, np.array(proposal.tokens)] = np.array(proposal.scores_on(path))
    tolerance = 2e-5 * max(1, np.abs(wanted.scores[np.isfinite(wanted.scores)]).max())
    np.testing.assert_allclose(scores, wanted.scores, atol=tolerance)
    best = wanted.scores.max(axis=1) - np.take_along_axis(wanted.scores, np.array([tokens]).T, 1).T
    assert best.max() <= tolerance
    confidence = proposal.confidence_on(path)
    assert (confidence is None) == (wanted.confidence is None)
    if confidence is not None and wanted.confidence is not None:
        np.testing.assert_allclose(np.array(confidence), wanted.confidence, atol=1e-5)


@pytest.mark.parametrize(("maker", "score"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_converts_and_keeps_its_round(
    tmp_path: Path, maker: Maker, score: Callable[..., Any]
) -> None:
    shape = Shape()
    checkpoint = maker(shape)
    model, head = tiny_target(shape)
    source = save(tmp_path / "source", *checkpoint, shards=2)
    assert_same_round(load_drafter(source, model), score, checkpoint, head, shape)
    convert(source, tmp_path / "out")
    assert_same_round(load_drafter(tmp_path / "out", model), score, checkpoint, head, shape)
    found = verify(open_checkpoint(source), tmp_path / "out")
    assert found.passed
    assert found.exact


shapes = st.builds(
    lambda kv, groups, hd, taps, **rest: Shape(
        kv=kv, heads=kv * groups, hd=2 * hd, taps=tuple(sorted(taps)), **rest
    ),
    kv=st.integers(1, 3),
    groups=st.integers(1, 3),
    hd=st.integers(2, 6),
    taps=st.sets(st.integers(0, 5), min_size=1, max_size=4),
    H=st.integers(5, 40),
    I=st.integers(4, 50),
    L=st.integers(1, 3),
    V=st.integers(41, 130),
    B=st.integers(2, 7),
    r=st.integers(2, 30),
    a=st.integers(1, 20),
    rank=st.integers(1, 12),
    seed=st.integers(0, 9),
)
PLAIN = [name for name in LAYOUTS if "sliding" not in name]  # windows name two layers


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shape=shapes, name=st.sampled_from(PLAIN), tied=st.booleans(), shards=st.integers(1, 3))
def test_any_shape_converts(shape: Shape, name: str, tied: bool, shards: int) -> None:
    maker, score = LAYOUTS[name]
    checkpoint = maker(shape)
    model, head = tiny_target(shape, tied)
    with TemporaryDirectory() as folder:
        source = save(Path(folder) / "source", *checkpoint, shards=shards)
        convert(source, Path(folder) / "out")
        drafter = load_drafter(Path(folder) / "out", model)
    assert_same_round(drafter, score, checkpoint, head, shape)


# --- what a wrong reading would give: the comparison above must be able to fail ------------------


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("DFlash, z-lab", {"is_causal": True}),
        ("DFlash, z-lab", {"rope_theta": 1e6}),
        ("DFlash, z-lab", {"rms_norm_eps": 1e-2}),
        ("DFlash, z-lab", {"block_size": 4}),
        ("DSpark, DeepSpec", {"sample_from_anchor": False}),
        ("DSpark, SpecForge", {"rope_is_neox_style": False}),
    ],
)
def test_another_reading_of_the_config_is_noticed(
    tmp_path: Path, name: str, change: dict[str, Any]
) -> None:
    maker, score = LAYOUTS[name]
    config, weights = maker(Shape())
    model, head = tiny_target(Shape())
    drafter = load_drafter(save(tmp_path, config | change, weights), model)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        assert_same_round(drafter, score, (config, weights), head, Shape())


def test_verify_notices_a_changed_tensor(tmp_path: Path) -> None:
    source = save(tmp_path / "source", *dspine_specforge())
    convert(source, tmp_path / "out")
    weights = mx.load(str(tmp_path / "out" / "model.safetensors"))
    gates = weights["injection.gates.weight"]
    weights["injection.gates.weight"] = mx.concatenate([gates[12:24], gates[:12], gates[24:]])
    mx.eval(weights)
    mx.save_safetensors(str(tmp_path / "out" / "model.safetensors"), weights)
    assert not verify(open_checkpoint(source), tmp_path / "out").passed


# --- storage ------------------------------------------------------------------------------------

WIDE = Shape(H=64, I=128, r=64, a=32, hd=16)


@pytest.mark.parametrize(
    ("mode", "bits", "group"),
    [("affine", 4, 64), ("affine", 8, 32), ("mxfp4", None, None), ("mxfp8", None, None)],
)
def test_quantised_folders_hold_what_mlx_quantises(
    tmp_path: Path, mode: str, bits: int | None, group: int | None
) -> None:
    checkpoint = dspine_specforge(WIDE)
    plan = convert(
        save(tmp_path / "source", *checkpoint),
        tmp_path / "out",
        quantize=True,
        q_bits=bits,
        q_group_size=group,
        q_mode=mode,
    )
    weights = mx.load(str(tmp_path / "out" / "model.safetensors"))
    packing = Options(True, group, bits, mode).packing
    wanted = mx.quantize(mx.array(checkpoint[1]["fc.weight"]), **packing)
    names = ("fc.weight", "fc.scales", "fc.biases")[: len(wanted)]
    assert all(mx.array_equal(weights[n], w) for n, w in zip(names, wanted, strict=True))
    exact = [name for name in weights if f"{name.removesuffix('.weight')}.scales" not in weights]
    floats = {name for name in exact if not name.endswith((".scales", ".biases"))}
    assert {"injection.gates.weight", "injection.readouts.0.weight", "norm.weight"} <= floats
    assert "transfer_codes.scales" in weights  # 8 bits with -q
    assert sum(w.nbytes for w in weights.values()) == plan.nbytes
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] | packing == config["quantization"]
    assert config["quantization"].get("transfer_codes", packing)["bits"] == 8
    drafter = load_drafter(tmp_path / "out", tiny_target(WIDE)[0])
    loaded = dict(tree_flatten(drafter.network.parameters()))
    assert all(mx.array_equal(loaded[n], w) for n, w in zip(names, wanted, strict=True))


def test_small_heads_stay_exact(tmp_path: Path) -> None:
    checkpoint = dspark_deepspec(Shape(H=64, I=64, hd=16, rank=64))
    convert(save(tmp_path / "source", *checkpoint), tmp_path / "out", quantize=True)
    weights = mx.load(str(tmp_path / "out" / "model.safetensors"))
    for name in ("markov_head.markov_w1.weight", "confidence_head.proj.weight", "norm.weight"):
        np.testing.assert_array_equal(np.array(weights[name]), checkpoint[1][name])
    assert "lm_head.scales" in weights
    assert "embed_tokens.scales" in weights


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_alone_in_few_bits(tmp_path: Path, bits: int) -> None:
    checkpoint = dspine_specforge(WIDE)
    source = save(tmp_path / "source", *checkpoint)
    convert(source, tmp_path / "out", codes_bits=bits)
    weights = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert [n for n in weights if n.endswith(".scales")] == ["transfer_codes.scales"]
    wanted = mx.quantize(mx.array(checkpoint[1]["transfer_codes"]), group_size=64, bits=bits)
    assert mx.array_equal(weights["transfer_codes.weight"], wanted[0])
    found = verify(open_checkpoint(source), tmp_path / "out")
    assert not found.exact
    assert 0 < found.difference < {4: 0.2, 8: 0.02}[bits] * found.scale


REDUCED: dict[str, Maker] = {
    "DFlash": dflash_zlab,
    "DSpine": dspine_specforge,
    "DSpark": partial(dspark_specforge, draft_vocab_size=40),
}


@pytest.mark.parametrize("V", [96, 5000])
@pytest.mark.parametrize("method", REDUCED)
def test_verify_reads_any_vocabulary(tmp_path: Path, method: str, V: int) -> None:
    """Also one with more tokens than the stand-in target has rows for, and a reduced one; a wrong
    tensor is seen."""
    config, weights = REDUCED[method](Shape(V=V))
    kept = np.sort(np.random.default_rng(2).choice(V, 40, replace=False))
    reduced = weights | {"d2t": offsets(kept)}
    if method == "DSpark":
        rng = np.random.default_rng(3)
        reduced["markov_head.markov_w2.weight"] = rng.normal(size=(40, 8)).astype("f4")
        reduced["lm_head.weight"] = rng.normal(size=(40, 32)).astype("f4")
    cases = {"reduced": reduced} if method == "DSpark" else {"whole": weights, "reduced": reduced}
    for name, tensors in cases.items():
        source = save(tmp_path / name, config, tensors)
        convert(source, tmp_path / f"{name} out")
        found = verify(open_checkpoint(source), tmp_path / f"{name} out")
        assert found.passed
        assert found.exact
        assert found.scale > 0.1
        wrong = save(
            tmp_path / f"{name} wrong", config, tensors | {"fc.weight": -weights["fc.weight"]}
        )
        assert not verify(open_checkpoint(wrong), tmp_path / f"{name} out").passed


def test_infinite_differences_do_not_pass() -> None:
    assert not Verification(np.inf, np.inf, True).passed
    assert not Verification(np.nan, 1.0, False).passed
    assert Verification(1e-6, 1.0, True).passed


@pytest.mark.parametrize("make", [dflash_zlab, dspine_specforge])
def test_a_vocabulary_size_without_its_tokens_says_nothing(
    tmp_path: Path, make: Callable[..., Checkpoint]
) -> None:
    """Some configs state one; the drafter has the target's head."""
    checkpoint = make(Shape(), draft_vocab_size=48)
    model, head = tiny_target()
    score = dspine_round if make is dspine_specforge else dflash_round
    drafter = load_drafter(save(tmp_path, *checkpoint), model)
    assert_same_round(drafter, score, checkpoint, head, Shape())


def test_packed_folders_are_not_converted_again(tmp_path: Path) -> None:
    convert(save(tmp_path / "source", *dspine_specforge(WIDE)), tmp_path / "out", quantize=True)
    with pytest.raises(InputError, match="packed already"):
        convert(tmp_path / "out", tmp_path / "again")


def test_unpacked_folders_are(tmp_path: Path) -> None:
    checkpoint = speculators(reduced=True)
    convert(save(tmp_path / "source", *checkpoint), tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "again")
    model, head = tiny_target()
    drafter = load_drafter(tmp_path / "again", model)
    assert_same_round(drafter, dspark_round, checkpoint, head, Shape())


def test_sinks_are_read_where_there_are_any(tmp_path: Path) -> None:
    config, weights = dspark_specforge()
    for i in range(2):
        weights[f"layers.{i}.self_attn.attention_sink_bias"] = np.linspace(-1, 2, 4, dtype="f4")
    model, head = tiny_target()
    drafter = load_drafter(save(tmp_path, config, weights), model)
    assert_same_round(drafter, dspark_round, (config, weights), head, Shape())


def test_biases_of_attention(tmp_path: Path) -> None:
    config, weights = dflash_zlab(attention_bias=True)
    rng = np.random.default_rng(0)
    for name in [n for n in weights if n.endswith("_proj.weight") and "self_attn" in n]:
        bias = rng.normal(size=len(weights[name])).astype(np.float32)
        weights[name.replace("weight", "bias")] = bias
    model, head = tiny_target()
    drafter = load_drafter(save(tmp_path, config, weights), model)
    assert_same_round(drafter, dflash_round, (config, weights), head, Shape())


def test_dtype_casts_floats_only(tmp_path: Path) -> None:
    source = save(tmp_path / "source", *speculators(reduced=True))
    convert(source, tmp_path / "out", dtype="bfloat16")
    weights = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert weights.pop("d2t").dtype == mx.uint32
    assert {w.dtype for w in weights.values()} == {mx.bfloat16}


def test_large_outputs_are_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspine_mlx.convert.write.SHARD", 40_000)
    checkpoint = dspine_specforge()
    convert(save(tmp_path / "source", *checkpoint), tmp_path / "out")
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 45_000 for file in files)
    model, head = tiny_target(Shape())
    drafter = load_drafter(tmp_path / "out", model)
    assert_same_round(drafter, dspine_round, checkpoint, head, Shape())

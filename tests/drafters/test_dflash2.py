"""DFlash2 against a float64 evaluation in NumPy, known figures, and what each part must do."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.convert.reference import Config, Head, Tensors, Weights, flat
from dspine_mlx.convert.reference_dflash2 import convolved_layer, dflash2_round, dflash2_states
from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.dflash2 import BlockConvolution, DFlash2, DFlash2Config, convolve
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.top_k import rank
from dspine_mlx.round.select import select
from dspine_mlx.target.model import Target
from tests.support.checkpoints import Shape, dflash_zlab, random_features, tiny_target
from tests.support.dflash2 import (
    KNOWN_ANCHOR,
    KNOWN_CONFIG,
    Sizes,
    dflash2_zlab,
    known,
    propose,
)

FULL = {"layer_types": ["full_attention"] * 2}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
VARIANTS: dict[str, Config] = {
    "as published": {},
    "full layers": FULL,
    "mixed layers": MIXED,
    "sliding layers are causal where nothing is said": MIXED | {"is_causal": None},
    "causal": {"is_causal": True},
    "three taps": {"sizes": Sizes(C=3, g=16)},
    "one group per channel": {"sizes": Sizes(g=1, r=3, K=2)},
    "softcap": {"final_logit_softcapping": 1.5},
    "scales": {"input_embedding_scale": 3.0, "output_multiplier": 0.25},
    "some tokens": {"selector_vocab_size": 40},
}


def build(
    config: Config, weights: Weights, model: nn.Module, dtype: mx.Dtype = mx.float32
) -> Drafter:
    drafter = DFlash2(DFlash2Config.from_dict(config))
    arrays = {
        f"{name}.weight" if name.endswith("codebook") else name: mx.array(value).astype(dtype)
        for name, value in weights.items()
    }
    drafter.load_weights(list(arrays.items()))
    return drafter.bind(Target(model))


def known_drafter() -> tuple[Drafter, Head, np.ndarray]:
    weights, head, features = known()
    model, _ = tiny_target(Shape(H=8, V=20, taps=(0, 1)))
    model.model.embed_tokens.weight = mx.array(head.embedding).astype(mx.float32)
    model.lm_head.weight = mx.array(head.head).astype(mx.float32)
    return build(KNOWN_CONFIG, weights, model), head, features.astype(np.float32)


def test_known_states_and_scores() -> None:
    """Figures that agree with the authors' own MLX code."""
    drafter, _, features = known_drafter()
    cache = drafter.make_cache()
    h = drafter.network.backbone(
        mx.array(KNOWN_ANCHOR), mx.array(features)[None], cache, drafter.target
    )
    states = [
        [-2.199242, -1.100585, -0.500553, -0.386042],
        [-1.085749, -1.186387, -0.336576, 2.408018],
        [0.658468, -1.766530, -0.160615, 1.616479],
    ]
    np.testing.assert_allclose(np.array(h[:, :4]), states, atol=1e-5)
    proposal = propose(drafter, features, KNOWN_ANCHOR)
    assert proposal.candidates.tolist() == [[4, 12, 1], [2, 4, 12], [4, 12, 1]]
    path = [proposal.first, proposal.transitions[0, 1], proposal.transitions[1, 0]]
    wanted = [
        [3.92963, 4.06104, 0.47838],
        [4.02806, 0.02039, -0.90906],
        [1.89415, 1.79493, 1.26852],
    ]
    np.testing.assert_allclose(np.array(mx.stack(path)), wanted, atol=2e-5)
    assert select(proposal).tokens.tolist() == [12, 2, 4]


def test_the_reference_has_the_known_figures() -> None:
    weights, head, features = known()
    round = dflash2_round(weights, KNOWN_CONFIG, head, features, KNOWN_ANCHOR)
    base = np.take_along_axis(round.base, round.candidates, axis=1)
    wanted = [[3.39596, 3.00874, 1.84030], [2.98264, 0.94291, 0.82108], [1.73714, 1.60834, 1.21966]]
    np.testing.assert_allclose(base, wanted, atol=5.1e-6)
    np.testing.assert_allclose(round.transitions[0, 1], [4.02806, 0.02039, -0.90906], atol=5.1e-6)


def assert_same_round(
    config: Config, weights: Weights, shape: Shape, features: np.ndarray, chunks: tuple[int, ...]
) -> None:
    model, head = tiny_target(shape)
    proposal = propose(build(config, weights, model), features, 11, chunks)
    round = dflash2_round(weights, config, head, features, 11)
    assert proposal.candidates.tolist() == round.candidates.tolist()
    scale = np.abs(round.base[np.isfinite(round.base)]).max()
    for ours, wanted in (
        (proposal.first, round.first),
        (proposal.transitions, round.transitions),
    ):
        assert ours.dtype == mx.float32
        assert np.abs(np.array(ours) - wanted).max(initial=0) <= 2e-5 * scale


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunks", [(), (3,), (7, 2)])
def test_dflash2_equals_numpy(variant: str, chunks: tuple[int, ...]) -> None:
    changes = dict(VARIANTS[variant])
    config, weights = dflash2_zlab(Shape(), changes.pop("sizes", Sizes()), **changes)
    assert_same_round(config, weights, Shape(), random_features(Shape(), 9), chunks)


@settings(deadline=None, max_examples=25)
@given(
    shape=st.builds(
        Shape,
        H=st.sampled_from([16, 32]),
        L=st.integers(1, 3),
        kv=st.sampled_from([1, 2]),
        taps=st.sampled_from([(0,), (0, 2), (1, 2, 3)]),
        B=st.integers(2, 9),
        seed=st.integers(0, 50),
    ),
    sizes=st.builds(
        Sizes,
        C=st.integers(1, 4),
        g=st.sampled_from([1, 2, 8]),
        r=st.integers(1, 9),
        K=st.integers(1, 8),
    ),
    length=st.integers(1, 12),
)
def test_any_sizes_equal_numpy(shape: Shape, sizes: Sizes, length: int) -> None:
    config, weights = dflash2_zlab(shape, sizes)
    assert_same_round(config, weights, shape, random_features(shape, length), ())


def test_variants_differ() -> None:
    tables = []
    for changes in map(dict, VARIANTS.values()):
        config, weights = dflash2_zlab(Shape(), changes.pop("sizes", Sizes()), **changes)
        drafter = build(config, weights, tiny_target(Shape())[0])
        tables.append(np.array(propose(drafter, random_features(Shape(), 9), 11).first))
    assert len({table.tobytes() for table in tables}) == len(VARIANTS)


def test_identity_convolutions_and_silent_successors_make_a_dflash() -> None:
    """Bit for bit, and each slot's best token is that of its logits whatever comes before."""
    shape, features = Shape(), random_features(Shape(), 9)
    config, weights = dflash2_zlab(shape)
    for name, value in weights.items():
        if "kernel_projection" in name or "successor" in name:
            value[:] = 0
        if "base_kernel" in name:
            value[:] = np.array([1, 0], np.float32)[:, None]
    model, _ = tiny_target(shape)
    ours = propose(build(config, weights, model), features, 5)
    plain = DFlash(DrafterConfig.from_dict(config | {"top_k": 5}))
    backbone = [(n, mx.array(weights[n])) for n in dflash_zlab(shape)[1]]
    theirs = propose(plain.load_weights(backbone).bind(Target(model)), features, 5)
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        assert mx.array_equal(a, b)
    assert (mx.argmax(ours.transitions, axis=-1) == 0).all()  # the best base logit


def test_a_kernel_of_the_slot_before_alone_shifts_by_one() -> None:
    kernel = mx.zeros((5, 2, 8))
    kernel[:, 1] = 1
    rows = mx.random.normal((5, 8))
    shifted = convolve(kernel, rows)
    assert mx.array_equal(shifted[1:], rows[:-1])
    assert not shifted[0].any()


@pytest.mark.parametrize("name", ["attention", "mlp"])
@pytest.mark.parametrize("side", [0, 1])
def test_each_side_of_each_sub_layer_has_its_own_kernel(name: str, side: int) -> None:
    """With all other kernels the identity, one random one makes what float64 says it makes."""
    shape = Shape(L=1)
    config, weights = dflash2_zlab(shape)
    for conv in ("attention", "mlp"):
        weights[f"layers.0.{conv}_conv.kernel_projection.weight"][:] = 0
        weights[f"layers.0.{conv}_conv.base_kernel"][:] = np.array([1, 0])[:, None]
    at, rng = f"layers.0.{name}_conv.base_kernel", np.random.default_rng(3)
    plain = build(config, weights, tiny_target(shape)[0])
    weights[at][side] = rng.normal(size=weights[at][side].shape)
    drafter = build(config, weights, tiny_target(shape)[0])
    x, context = (rng.normal(size=(n, shape.H)).astype(np.float32) for n in (shape.B, 6))
    layer, (cache,) = drafter.layers[0], drafter.make_cache()
    rows = mx.array(x)[None]
    ours = layer(rows, layer.input_layernorm(rows), mx.array(context)[None], cache)[0]
    wanted = convolved_layer(Tensors(weights), flat(config), 0, x.astype(np.float64), context)
    np.testing.assert_allclose(np.array(ours), wanted, atol=1e-5)
    other, (cache,) = plain.layers[0], plain.make_cache()
    unchanged = other(rows, other.input_layernorm(rows), mx.array(context)[None], cache)[0]
    assert not np.allclose(np.array(unchanged), wanted, atol=1e-2)


def test_a_groups_part_changes_its_own_channels_alone() -> None:
    config = DFlash2Config.from_dict(dflash2_zlab(Shape(), Sizes(C=2, g=8))[0])
    conv = BlockConvolution(config)
    weight = np.zeros((2, 2, 4, 32), np.float32)  # side, tap, group
    weight[1, 0, 2, 0] = 3
    conv.kernel_projection.weight = mx.array(weight.reshape(-1, 32))
    normed = mx.ones((5, 32))
    kernels = np.array(conv.kernels(normed))
    wanted = np.zeros((5, 2, 2, 32), np.float32)
    wanted[:, :, 0] = 1
    wanted[:, 1, 0, 16:24] = 4
    np.testing.assert_array_equal(kernels, wanted)


@pytest.mark.parametrize("limit", [None, 60])
def test_padded_rows_and_unselectable_tokens_are_never_proposed(limit: int | None) -> None:
    """The head's rows past the vocabulary, or past selector_vocab_size, would win every slot."""
    shape = Shape()
    config, weights = dflash2_zlab(shape)
    config["dflash_config"] |= {"selector_vocab_size": limit, "selector_top_k": 40}
    model, _ = tiny_target(shape)
    first = shape.V if limit is None else limit
    extra = mx.random.normal((32, shape.H)) * 50
    model.lm_head.weight = mx.concatenate([model.lm_head.weight[:first], extra])
    for seed in range(3):
        features = random_features(Shape(seed=seed), 6)
        proposal = propose(build(config, weights, model), features, 5 + seed)
        assert proposal.candidates.max().item() < first


@pytest.mark.parametrize("context", [1, 6, 7, 8, 20])
def test_slots_see_the_window_of_their_own_position(context: int) -> None:
    """A change of one context row reaches the slots that are within W of it, and no other: with one
    layer that nothing else mixes."""
    shape = Shape(L=1, B=5)
    config, weights = dflash2_zlab(shape, sliding_window=7, is_causal=True)
    for conv in ("attention", "mlp"):
        weights[f"layers.0.{conv}_conv.kernel_projection.weight"][:] = 0
        weights[f"layers.0.{conv}_conv.base_kernel"][:] = np.array([1, 0])[:, None]
    drafter = build(config, weights, tiny_target(shape)[0])
    features = random_features(shape, context)

    def states(rows: np.ndarray) -> np.ndarray:
        h = drafter.network.backbone(
            mx.array(3), mx.array(rows)[None], drafter.make_cache(), drafter.target
        )
        return np.array(h)

    before = states(features)
    for row in range(context):
        changed = features.copy()
        changed[row] += 1
        moved = np.abs(states(changed) - before).max(axis=-1) > 0
        assert moved.tolist() == [context + slot - row < 7 for slot in range(1, shape.B)]


def test_the_greedy_path_scores_slot_by_slot() -> None:
    """Argmax over all candidates of logit + affinity, left to right, from the float64 states."""
    shape = Shape(B=8)
    config, weights = dflash2_zlab(shape)
    model, head = tiny_target(shape)
    features = random_features(shape, 9)
    tokens = select(propose(build(config, weights, model), features, 5)).tokens.tolist()
    w, c = Tensors(weights), {"first_slot": 1} | flat(config)
    states, previous = dflash2_states(w, c, head, features, 5), 5
    at = "candidate_selector."
    for h, token in zip(states, tokens, strict=True):
        logits = head.head @ h
        best = np.argsort(-logits)[:5]
        mixed = w[f"{at}predecessor_codebook"][previous] * (w[f"{at}hidden_projection.weight"] @ h)
        scores = logits[best] + w[f"{at}successor_codebook"][best] @ mixed
        assert token == best[scores.argmax()]
        previous = token


@pytest.mark.parametrize("rounds", [[1] * 12, [3, 1, 1, 4, 1]])
def test_rounds_past_the_window_keep_the_order_of_positions(rounds: list[int]) -> None:
    """Rounds that accept nothing append one context row to a window that is full; each proposal is
    that of a fresh cache."""
    shape = Shape()
    config, weights = dflash2_zlab(shape, sliding_window=6)
    model, head = tiny_target(shape)
    drafter = build(config, weights, model)
    features = random_features(shape, 9 + sum(rounds))
    cache, seen = drafter.make_cache(), 9
    drafter.extend(mx.array(features[:seen])[None], cache)
    for rows in rounds:
        new = features[seen : seen + rows]
        proposal = drafter.propose(4, mx.array(new)[None], cache).ranked()
        seen += rows
        wanted = dflash2_round(weights, config, head, features[:seen], 4)
        assert proposal.candidates.tolist() == wanted.candidates.tolist()
        np.testing.assert_allclose(np.array(proposal.transitions), wanted.transitions, atol=1e-4)


def test_scores_are_float32_in_half_precision() -> None:
    """A quantised head and bfloat16 weights; the products of the selector are not rounded."""
    shape = Shape()
    config, weights = dflash2_zlab(shape, Sizes(r=64))
    model, _ = tiny_target(shape)
    nn.quantize(model, 32, 8, class_predicate=lambda path, m: path == "lm_head")
    model.set_dtype(mx.bfloat16)
    drafter = build(config, weights, model, mx.bfloat16)
    features = mx.array(random_features(shape, 9))[None].astype(mx.bfloat16)
    proposal = drafter.propose(4, features, drafter.make_cache()).ranked()
    assert proposal.first.dtype == proposal.transitions.dtype == mx.float32
    base = proposal.transitions - proposal.transitions.astype(mx.bfloat16).astype(mx.float32)
    assert base.any()  # more digits than bfloat16 has
    assert isinstance(drafter.network, DFlash2)
    selector, cache = drafter.network.candidate_selector, drafter.make_cache()
    states = drafter.network.backbone(mx.array(4), features, cache, drafter.target)
    ids, scores = rank(drafter.target.head(states), drafter.config)
    slots = np.array(selector.hidden_projection(states).astype(mx.float32), np.float64)
    books = [
        np.array(book.weight.astype(mx.float32), np.float64)
        for book in (selector.predecessor_codebook, selector.successor_codebook)
    ]
    for t in range(1, 4):
        rows = (books[0][np.array(ids[t - 1])] * slots[t]) @ books[1][np.array(ids[t])].T
        wanted = np.array(scores[t]) + rows
        np.testing.assert_allclose(np.array(proposal.transitions[t - 1]), wanted, atol=1e-4)

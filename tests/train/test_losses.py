"""Training losses and gradients against float64 NumPy: values, and finite differences."""

from dataclasses import replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dspine_mlx.checkpoints.detect import detect
from dspine_mlx.checkpoints.open import parameters
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspine import GATES, DSpine
from dspine_mlx.errors import InputError
from dspine_mlx.target.model import Target
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.losses import (
    LossRows,
    Schedule,
    acceptance_length,
    length_loss,
    survival,
)
from dspine_mlx.train.objectives.dspine import OBJECTIVE
from dspine_mlx.train.step import drafter_loss, forward
from tests.support.checkpoints import (
    Checkpoint,
    Shape,
    Weights,
    dflash_zlab,
    dspark_deepspec,
    dspark_specforge,
    dspine_specforge,
    offsets,
    tiny_target,
)
from tests.support.training import SHAPE, NumpyLoss, random_batch, softmax

EPSILON = 1e-5
CE = LossConfig(refinement=False, replacement_layers=0)
WHOLE = replace(CE, reference="distribution")
TERMS: dict[str, tuple[LossConfig, float, float]] = {  # loss, alpha, beta
    "base CE": (CE, 1.0, 0.0),
    "base CE against the distribution": (WHOLE, 1.0, 0.0),
    "base L1": (CE, 0.0, 0.0),
    "with refined CE": (replace(CE, refinement=True), 1.0, 0.0),
    "with refined CE against the distribution": (replace(WHOLE, refinement=True), 1.0, 0.0),
    "with refined L1": (replace(CE, refinement=True), 0.0, 0.0),
    "with alignment": (CE, 1.0, 0.5),
    "with token alignment": (replace(CE, alignment="token"), 1.0, 0.5),
    "without injection": (replace(CE, injection=False, refinement=True), 0.5, 0.0),
    "all of the paper": (LossConfig(), 0.1, 0.5),
}
GROUPS = {
    "fc": ("fc.", "hidden_norm."),
    "attention": ("self_attn.",),
    "mlp": ("mlp.",),
    "norms": ("layernorm.", "norm.weight"),
    "readouts": ("injection.readouts.",),
    "writes": ("injection.writes.",),
    "gates": ("injection.message.", "_gate.", "injection.bias"),
    "from two slots back": ("earlier.",),
    "markov": ("markov_head.",),
    "confidence": ("confidence_head.",),
    "ends": ("embed_tokens.", "lm_head."),
}


def reduced(shape: Shape, **extra: Any) -> Checkpoint:
    """A DSpark over 17 of the tokens, with a head of its own for them."""
    config, weights = dspark_specforge(shape, draft_vocab_size=17, **extra)
    rng = np.random.default_rng(5)
    ids = np.sort(rng.choice(shape.V, 17, replace=False))
    w2 = "markov_head.markov_w2.weight"
    head = rng.normal(size=(17, shape.H)).astype(np.float32) / shape.H**0.5
    return config, weights | {w2: weights[w2][ids], "d2t": offsets(ids), "lm_head.weight": head}


def softmax_rows(x: np.ndarray) -> np.ndarray:
    return np.stack([softmax(row) for row in x])


def build(checkpoint: Checkpoint) -> tuple[Drafter, Any]:
    config, weights = checkpoint
    model, head = tiny_target(SHAPE)
    arrays = {name: mx.array(value) for name, value in weights.items()}
    method, layout = detect(config, arrays)
    network = method.network(method.config.from_dict(config))
    network.add_own_embeddings(weights)
    network.load_weights(list(parameters(layout, arrays).items()))
    if isinstance(network, DSpine):
        network.transfer_codes.freeze()
    return network.bind(Target(model)), head


def torch_names(tensors: dict[str, mx.array]) -> Weights:
    """The stacked gates apart again, as float64 arrays."""
    out = {name: np.array(value, np.float64) for name, value in tensors.items()}
    if "injection.gates.weight" in out:
        parts = np.split(out.pop("injection.gates.weight"), 3)
        out |= {f"injection.{name}.weight": x for name, x in zip(GATES, parts, strict=True)}
    return out


def check(checkpoint: Checkpoint, loss: LossConfig, alpha: float, beta: float) -> None:
    """The value, and the gradient of every parameter group along a random direction."""
    drafter, head = build(checkpoint)
    batch = random_batch(SHAPE, drafter.config.num_proposals)
    schedule = Schedule(
        mx.array(alpha),
        mx.array(beta),
        batch.weights.sum(),
        length=mx.array(loss.length_weight),
        proposals=(batch.weights > 0).sum(),
    )
    network = drafter.network
    function = nn.value_and_grad(network, lambda: drafter_loss(drafter, batch, schedule, loss)[0])
    value, grads = function()
    config, weights = checkpoint
    weights = {n: v.astype(np.float64) for n, v in weights.items() if n != "transfer_ready"}
    wanted = NumpyLoss(config, head, batch, loss, alpha, beta)
    assert value.item() == pytest.approx(wanted(weights), rel=2e-5)
    ours = torch_names(dict(tree_flatten(grads)))
    rng = np.random.default_rng(0)
    seen = set()
    for parts in GROUPS.values():
        names = [n for n in ours if n not in seen and any(part in n for part in parts)]
        seen |= set(names)
        if not names:
            continue
        step = {n: rng.normal(size=ours[n].shape) for n in names}
        up = wanted(weights | {n: weights[n] + EPSILON * step[n] for n in names})
        down = wanted(weights | {n: weights[n] - EPSILON * step[n] for n in names})
        slope = sum((ours[n] * step[n]).sum() for n in names)
        scale = sum(np.abs(ours[n] * step[n]).sum() for n in names)
        assert slope == pytest.approx((up - down) / (2 * EPSILON), abs=1e-4 * scale + 1e-7), names
    assert seen == set(ours)


@pytest.mark.parametrize("term", TERMS)
def test_dspine_equals_numpy(term: str) -> None:
    check(dspine_specforge(SHAPE), *TERMS[term])


@pytest.mark.parametrize("layers", [0, 1])
def test_dspine_from_two_slots_back_equals_numpy(layers: int) -> None:
    loss = LossConfig(replacement_layers=layers)
    check(dspine_specforge(replace(SHAPE, reach=2)), loss, 0.1, 0.5)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_dspark_equals_numpy(kind: str) -> None:
    checkpoint = dspark_specforge(SHAPE, kind)
    check(checkpoint, LossConfig(position_decay=4.0), 0.1, 0.0)


@pytest.mark.parametrize("reference", ["token", "distribution"])
@pytest.mark.parametrize("alpha", [1.0, 0.1])
def test_a_reduced_draft_vocabulary_equals_numpy(
    reference: Literal["token", "distribution"], alpha: float
) -> None:
    """Its distribution is compared with the target's whole one; labels that it lacks cost no CE."""
    checkpoint = reduced(SHAPE, final_logit_softcapping=3.0)
    check(checkpoint, LossConfig(reference=reference), alpha, 0.0)


@pytest.mark.parametrize("alignment", ["embedding", "token"])
@pytest.mark.parametrize("reference", ["token", "distribution"])
def test_the_targets_rows_of_a_reduced_vocabulary_equal_numpy(
    reference: Literal["token", "distribution"], alignment: Literal["embedding", "token"]
) -> None:
    """DSpine and DFlash over 17 of the tokens, whose head is the target's rows."""
    ids = np.sort(np.random.default_rng(5).choice(SHAPE.V, 17, replace=False))
    for make, beta in ((dspine_specforge, 0.5), (dflash_zlab, 0.0)):
        config, weights = make(SHAPE, draft_vocab_size=17)
        loss = LossConfig(reference=reference, alignment=alignment)
        check((config, weights | {"d2t": offsets(ids)}), loss, 0.4, beta)


def test_own_embedding_and_head_equal_numpy() -> None:
    check(dspark_deepspec(SHAPE), LossConfig(), 0.1, 0.0)


def test_rows_of_a_reduced_vocabulary_tell_how_its_drafts_fare() -> None:
    """sum of min(p, q) over the vocabulary, and the target's best token against the drafter's."""
    checkpoint = reduced(SHAPE)
    drafter, head = build(checkpoint)
    batch = random_batch(SHAPE, drafter.config.num_proposals)
    hidden, states = (
        np.array(batch.gather(batch.hidden, 0)),
        np.array(forward(drafter, batch, CE).base),
    )
    weights, ids = checkpoint[1], checkpoint[1]["d2t"] + np.arange(17)
    own = states @ weights["lm_head.weight"].T
    own += weights["markov_head.markov_w1.weight"][np.array(batch.predecessors)] @ (
        weights["markov_head.markov_w2.weight"].T
    )
    schedule = Schedule(mx.array(0.1), mx.array(0.0), batch.weights.sum())
    _, rows = drafter_loss(drafter, batch, schedule, LossConfig())
    for at in np.ndindex(*batch.weights.shape):
        p, q = softmax(head.head @ hidden[at]), np.zeros(SHAPE.V)
        q[ids] = softmax(own[at])
        assert rows.overlap[at].item() == pytest.approx(np.minimum(p, q).sum(), abs=1e-5)
        assert rows.agree[at].item() == (p.argmax() == q.argmax())
    missed = ~np.isin(np.array(batch.labels), ids)
    assert missed.any()
    assert not np.array(rows.ce)[missed].any()


@pytest.mark.parametrize("alpha", [1.0, 0.1])
@pytest.mark.parametrize("causal", [True, False])
def test_dflash_equals_numpy(alpha: float, causal: bool) -> None:
    check(dflash_zlab(SHAPE, is_causal=causal), LossConfig(), alpha, 0.0)


def test_scaled_and_capped_scores_equal_numpy() -> None:
    checkpoint = dspine_specforge(SHAPE, output_multiplier=0.5, final_logit_softcapping=3.0)
    check(checkpoint, LossConfig(), 0.5, 0.5)


def test_alignment_gives_no_gradient_through_its_weight() -> None:
    drafter, _ = build(dspine_specforge(SHAPE))
    batch = random_batch(SHAPE, drafter.config.num_proposals)
    states = forward(drafter, batch, CE)
    ce = mx.ones(batch.weights.shape)

    def total(ce: mx.array) -> mx.array:
        return OBJECTIVE.alignment(drafter, batch, states, ce, CE).sum()

    value, slope = mx.value_and_grad(total)(ce)
    assert value.item() > 1
    assert not slope.any().item()


@pytest.mark.parametrize("method", [dflash_zlab, dspark_specforge, reduced, dspine_specforge])
def test_chunks_and_checkpoints_change_nothing(method: Any) -> None:
    drafter, _ = build(method(SHAPE))
    batch = random_batch(SHAPE, drafter.config.num_proposals)
    schedule = Schedule(mx.array(0.3), mx.array(0.5), batch.weights.sum())

    def gradient(**options: Any) -> list[tuple[str, mx.array]]:
        def loss() -> mx.array:
            return drafter_loss(drafter, batch, schedule, LossConfig(), **options)[0]

        value, grads = nn.value_and_grad(drafter.network, loss)()
        return [("loss", value), *tree_flatten(grads)]

    plain = gradient()
    for other in (gradient(logit_rows=5), gradient(checkpoint=True)):
        for (name, a), (_, b) in zip(plain, other, strict=True):
            assert mx.allclose(a, b, rtol=1e-4, atol=1e-6).item(), name


@pytest.mark.parametrize("method", [dflash_zlab, dspark_specforge, reduced, dspine_specforge])
@pytest.mark.parametrize("greedy", [0.0, 0.3, 1.0])
def test_the_expected_length_equals_numpy(method: Any, greedy: float) -> None:
    loss = LossConfig(length_weight=1.0, length_greedy=greedy)
    check(method(SHAPE), replace(loss, confidence_weight=0.0), 0.1, 0.5)
    check(method(SHAPE), replace(loss, length_weight=0.4), 0.1, 0.5)


def test_the_expected_length_by_enumeration() -> None:
    """Every draft of three slots, and every way to accept and reject its tokens."""
    rng = np.random.default_rng(0)
    p, q = (softmax_rows(rng.normal(size=(3, 4)) * 1.5) for _ in range(2))
    wanted = 0.0
    for tokens in np.ndindex(4, 4, 4):
        chances = [min(1, p[t, x] / q[t, x]) for t, x in enumerate(tokens)]
        drawn = np.prod([q[t, x] for t, x in enumerate(tokens)])
        for length in range(4):
            rejected = 1 - chances[length] if length < 3 else 1
            wanted += length * drawn * np.prod(chances[:length]) * rejected
    overlap, best = (np.zeros((1, 2, 5), np.float32) for _ in range(2))
    overlap[0, 0, :3], best[0, 0, :3] = np.minimum(p, q).sum(axis=-1), 0.25
    overlap[:, :, 3:], best[:, :, 3:] = 0.9, 0.9  # past the end of the text
    weights = mx.array([[[1.0, 0.5, 0.1, 0, 0], [0, 0, 0, 0, 0]]])
    rows = LossRows(*(mx.zeros_like(weights),) * 3, mx.array(overlap), mx.array(best))
    sampled, greedy, mixed = (
        3 - length_loss(weights, rows, LossConfig(length_greedy=share)).item()
        for share in (0.0, 1.0, 0.25)
    )
    assert sampled == pytest.approx(wanted, rel=1e-6)
    assert greedy == pytest.approx(0.25 + 0.25**2 + 0.25**3)
    assert mixed == pytest.approx(0.75 * sampled + 0.25 * greedy)


def test_a_slot_that_is_never_accepted_still_gets_a_gradient() -> None:
    """So does nothing after it; the chances up to it say how much."""
    chances = mx.array([[[0.5, 0.0, 0.5]]])
    weights = mx.ones((1, 1, 3))
    slope = mx.grad(lambda a: survival(weights, a).sum())(chances)
    assert slope.tolist() == [[[1.0, 0.75, 0.0]]]


def test_the_length_counts_from_its_start_on() -> None:
    loss = LossConfig(length_weight=0.6, length_start=0.5)
    assert [loss.length(x) for x in (0.0, 0.49, 0.5, 1.0)] == [0.0, 0.0, 0.6, 0.6]
    with pytest.raises(InputError, match=r"loss.length_greedy is 1.5; it must lie in \[0, 1\]"):
        LossConfig(length_greedy=1.5)


def test_acceptance_length_by_hand() -> None:
    weights = mx.array([[[1.0, 0.9, 0.8], [1.0, 0.9, 0.0], [0.0, 0.0, 0.0]]])
    accepted = mx.array([[[1.0, 0.5, 0.5], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]])
    length, blocks = acceptance_length(weights, accepted)
    assert blocks.item() == 2  # the empty block does not count
    assert length.item() == pytest.approx((1 + 1 + 0.5 + 0.25) + (1 + 1 + 1))

"""Losses of DFlash, DSpark and DSpine drafters, row by row.

A row is one proposal of one block. Every term is a sum over rows of weight * loss, divided by the
sum of the weights of all rows of the optimiser step: micro-batches add up to the loss of the whole.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspark import DSpark, RNNMarkov, VanillaMarkov
from dspine_mlx.drafters.dspine import DSpine
from dspine_mlx.drafters.top_k import scale_scores, top_k
from dspine_mlx.train.blocks import Batch, States, forward
from dspine_mlx.train.config import LossConfig


class Schedule(NamedTuple):
    """What changes from step to step; arrays, so that a compiled step sees them as inputs."""

    alpha: mx.array  # share of CE
    beta: mx.array  # weight of the alignment
    denominator: mx.array  # sum of the weights of all rows of the optimiser step


class LossRows(NamedTuple):
    """What one chunk of rows adds to the loss, and how its drafts would fare."""

    loss: mx.array  # [R]
    ce: mx.array  # [R] of the base logits, against the text
    agree: mx.array  # [R] bool: the drafter's best token is the target's
    overlap: mx.array  # [R] sum over v of min(p, q): the chance that a sampled draft stands


def drafter_loss(
    drafter: Drafter,
    batch: Batch,
    schedule: Schedule,
    config: LossConfig,
    *,
    checkpoint: bool = False,
    logit_rows: int = 2048,
) -> tuple[mx.array, LossRows]:
    """This batch's share of the step's loss, and the rows [S, A, M] it is made of."""
    states = forward(drafter, batch, config, checkpoint=checkpoint)
    inputs, shared = row_inputs(drafter, batch, states)
    flat = [x.reshape(-1, *x.shape[3:]) for x in inputs]
    row_loss: RowLoss = partial(ROWS[type(drafter.network)], drafter, config)
    count = flat[0].shape[0]
    if count > logit_rows:
        row_loss = mx.checkpoint(row_loss)  # a chunk's logits are made again in the backward pass
    chunks = [
        row_loss(schedule.alpha, *shared, *(x[i : i + logit_rows] for x in flat))
        for i in range(0, count, logit_rows)
    ]
    parts = [mx.concatenate(part) for part in zip(*chunks, strict=True)]
    rows = LossRows(*(part.reshape(batch.weights.shape) for part in parts))
    loss = rows.loss
    if isinstance(drafter.network, DSpine):
        loss = loss + schedule.beta * alignment(drafter, batch, states, rows.ce, config)
    return (batch.weights * loss).sum() / schedule.denominator, rows


def row_inputs(
    drafter: Drafter, batch: Batch, states: States
) -> tuple[list[mx.array], list[mx.array]]:
    """What a loss takes, besides alpha: of every row, [S, A, M, ...] each, and what rows share."""
    inputs = [batch.gather(batch.hidden, 0), draft_ids(drafter, batch.labels), states.base]
    if states.refined is not None:
        return [*inputs, states.refined], []
    network = drafter.network
    if not isinstance(network, DSpark):
        return inputs, []
    previous = network.markov_head.markov_w1(batch.predecessors)
    mixed = teacher_forced(network.markov_head, previous, states.base)
    features = states.base
    if network.config.confidence_head_with_markov:
        features = mx.concatenate([features, previous], axis=-1)
    confidence = network.confidence_head(features)
    own = [network.lm_head.weight] if "lm_head" in network else []
    return [*inputs, mixed, confidence], [network.markov_head.markov_w2.weight, *own]


def draft_ids(drafter: Drafter, tokens: mx.array) -> mx.array:
    """Tokens as rows of the drafter's head; Vd for those outside a reduced vocabulary."""
    if "d2t" not in drafter.network:
        return tokens
    ids = drafter.network.d2t
    places = mx.full((drafter.verifier.vocab_size,), ids.size, tokens.dtype)
    places[ids] = mx.arange(ids.size, dtype=tokens.dtype)
    return places[tokens]


def teacher_forced(head: VanillaMarkov, previous: mx.array, states: mx.array) -> mx.array:
    """The r numbers [S, A, M, r] that w2 turns into the bias, from the true predecessors' w1."""
    if not isinstance(head, RNNMarkov):
        return head.mix(previous, states)
    state, outputs = mx.zeros_like(previous[:, :, 0]), []
    for t in range(previous.shape[2]):
        joint = head.joint_proj(
            mx.concatenate([state, previous[:, :, t], states[:, :, t]], axis=-1)
        )
        gate, candidate, output = mx.split(joint, 3, axis=-1)
        gate = mx.sigmoid(gate)
        state = gate * state + (1 - gate) * mx.tanh(candidate)
        outputs.append(mx.tanh(output))
    return mx.stack(outputs, axis=2)


class Laws(NamedTuple):
    """The target's law and the drafter's, of R rows over the tokens that the drafter proposes."""

    p: mx.array  # [R, V]; of a reduced vocabulary [R, Vd], which does not add up to 1
    q: mx.array  # the same
    lse: mx.array  # [R] log of the sum of exp(logits)
    logits: mx.array  # the drafter's
    best: mx.array  # [R] the target's best token, as `draft_ids` counts
    outside: mx.array  # [R] the target's share of tokens that are not proposed

    def cross_entropy(self, labels: mx.array) -> mx.array:
        """Of labels among the drafter's tokens; 0 of others."""
        return cross_entropy(self.logits, self.lse, labels)

    @property
    def agree(self) -> mx.array:
        return self.best == mx.argmax(self.logits, axis=-1)

    @property
    def overlap(self) -> mx.array:
        """1 - L1 / 2"""
        return mx.minimum(self.p, self.q).sum(axis=-1)

    def distribution_loss(self, ce: mx.array, alpha: mx.array, config: LossConfig) -> mx.array:
        """alpha CE + (1 - alpha) L1 of each row, L1 = sum over v of |p - q|: [R]."""
        if config.reference == "law":
            ce = (1 - self.outside) * self.lse - (self.p * self.logits).sum(axis=-1)
        return alpha * ce + (1 - alpha) * (mx.abs(self.p - self.q).sum(axis=-1) + self.outside)


def cross_entropy(logits: mx.array, lse: mx.array, labels: mx.array) -> mx.array:
    """lse - logits[label] over the last axis; 0 of labels that it does not have."""
    # mx.checkpoint asks for the gradient of every input, and indices have none
    labels = mx.stop_gradient(labels)
    index = mx.minimum(labels, logits.shape[-1] - 1)[..., None]
    ce = lse - mx.take_along_axis(logits, index, axis=-1)[..., 0]
    return mx.where(labels < logits.shape[-1], ce, 0)


def laws(drafter: Drafter, hidden: mx.array, own: mx.array) -> Laws:
    """From the target's last states [R, d] and the drafter's own logits."""
    head = drafter.verifier.head(hidden.astype(drafter.verifier.dtype))
    p = mx.stop_gradient(mx.softmax(scale_scores(head, drafter.config), axis=-1))
    best, outside = draft_ids(drafter, mx.argmax(p, axis=-1)), mx.array(0.0)
    if "d2t" in drafter.network:
        p = p[:, drafter.network.d2t]
        outside = 1 - p.sum(axis=-1)
    return Laws(p, *softmax(own), own, best, outside)


def all_logits(drafter: Drafter, states: mx.array) -> mx.array:
    """Full-vocabulary logits, float32, by the frozen head in its own precision."""
    target = drafter.target
    return scale_scores(target.head(states.astype(target.dtype)), drafter.config)


def softmax(logits: mx.array) -> tuple[mx.array, mx.array]:
    """The softmax [R, V] and its log normaliser [R] from one pass of exponentials."""
    top = mx.stop_gradient(logits.max(axis=-1, keepdims=True))
    powers = mx.exp(logits - top)
    total = powers.sum(axis=-1, keepdims=True)
    return powers / total, (top + mx.log(total))[:, 0]


def dflash_rows(
    drafter: Drafter,
    config: LossConfig,
    alpha: mx.array,
    hidden: mx.array,
    labels: mx.array,
    base: mx.array,
) -> LossRows:
    """CE (alpha = 1), or the papers' mix with L1."""
    law = laws(drafter, hidden, all_logits(drafter, base))
    ce = law.cross_entropy(labels)
    return LossRows(law.distribution_loss(ce, alpha, config), ce, law.agree, law.overlap)


def dspark_rows(
    drafter: Drafter,
    config: LossConfig,
    alpha: mx.array,
    successors: mx.array,
    *rows: mx.array,
) -> LossRows:
    """The mix on logits with the Markov bias, and BCE of the confidence against 1 - L1 / 2.

    successors: w2 [V, r]; rows: the drafter's own head if it has one, then the target's states,
    labels, base, mixed [R, r], confidence [R].
    """
    *head, hidden, labels, base, mixed, confidence = rows
    own = scale_scores(base @ head[0].T, drafter.config) if head else all_logits(drafter, base)
    law = laws(drafter, hidden, own + mixed @ successors.T)
    ce = law.cross_entropy(labels)
    stands = nn.losses.binary_cross_entropy(
        confidence, mx.stop_gradient(law.overlap), with_logits=True, reduction="none"
    )
    loss = law.distribution_loss(ce, alpha, config) + config.confidence_weight * stands
    return LossRows(loss, ce, law.agree, law.overlap)


def dspine_rows(
    drafter: Drafter,
    config: LossConfig,
    alpha: mx.array,
    *rows: mx.array,
) -> LossRows:
    """The mix on the base logits, and again on the scores of the base's K candidates, which are the
    refined ones (without refinement: the base's).

    rows: the target's states, labels, base and refined states.
    """
    hidden, labels, base, refined = rows
    law = laws(drafter, hidden, all_logits(drafter, base))
    ce = law.cross_entropy(labels)
    loss = law.distribution_loss(ce, alpha, config)
    logits = mx.stop_gradient(law.logits)
    candidates = mx.stop_gradient(top_k(logits, drafter.config.top_k)[0])
    p = mx.take_along_axis(law.p, candidates, axis=-1)
    if config.refinement:
        head = drafter.target.head_rows(candidates).astype(refined.dtype)  # [R, K, d]
        scores = scale_scores((head @ refined[..., None])[..., 0], drafter.config)
        own = candidate_loss(scores, p, candidates == labels[:, None], alpha, config)
        loss = loss + config.refined_weight * own
    else:
        scores = mx.take_along_axis(law.logits, candidates, axis=-1)
    first = mx.stop_gradient(mx.argmax(scores, axis=-1, keepdims=True))
    best = mx.take_along_axis(candidates, first, axis=-1)[:, 0]
    overlap = mx.minimum(p, mx.softmax(scores, axis=-1)).sum(axis=-1)
    return LossRows(loss, ce, best == law.best, overlap)


RowLoss = Callable[..., LossRows]
ROWS: dict[type[DFlash], RowLoss] = {DFlash: dflash_rows, DSpark: dspark_rows, DSpine: dspine_rows}


def candidate_loss(
    scores: mx.array, p: mx.array, hit: mx.array, alpha: mx.array, config: LossConfig
) -> mx.array:
    """The mix on K candidates, [R]: of scores, the target's p, and hit (it is the label), [R, K].

    The target's law is renormalised on the candidates. CE counts only where the label is one of
    them, L1 (and CE against the law) only where they hold more than `candidate_mass_threshold`.
    """
    q, lse = softmax(scores)
    mass = p.sum(axis=-1, keepdims=True)
    inside = (mass > config.candidate_mass_threshold)[:, 0]
    target = p / mx.maximum(mass, config.candidate_mass_threshold)
    if config.reference == "law":
        ce = mx.where(inside, lse - (target * scores).sum(axis=-1), 0)
    else:
        ce = mx.where(hit, lse[:, None] - scores, 0).sum(axis=-1)
    l1 = mx.where(inside, mx.abs(target - q).sum(axis=-1), 0)
    return alpha * ce + (1 - alpha) * l1


def alignment(
    drafter: Drafter, batch: Batch, states: States, ce: mx.array, config: LossConfig
) -> mx.array:
    """What each layer's states say of their own token, per row, the mean over layers: [S, A, M].

    1 - cos(R_l h_l, C[y]), weighted with the row's CE (no gradient), so that it fades as the
    drafter learns; `token`: the CE of norm(h_l) in its place, the plain way to supervise a layer.
    """
    network, labels, weight = drafter.network, batch.labels, mx.stop_gradient(ce)
    if config.alignment == "token":
        ids = draft_ids(drafter, labels)
        logits = [all_logits(drafter, network.norm(h)) for h in states.layers]
        losses = [cross_entropy(own, mx.logsumexp(own, axis=-1), ids) for own in logits]
        return sum(losses) / len(losses)
    codes = network.transfer_codes(labels)
    cosines = [
        nn.losses.cosine_similarity_loss(readout(h), codes, axis=-1, eps=1e-12)
        for readout, h in zip(network.injection.readouts, states.layers, strict=True)
    ]
    return weight * (1 - sum(cosines) / len(cosines))


def acceptance_length(weights: mx.array, stands: mx.array) -> tuple[mx.array, mx.array]:
    """Sum over blocks of the expected tokens of a round, the target's own included, and the blocks.

    stands [S, A, M]: the chance that slot t stands given that the slots before it did; weights > 0
    mark the proposals inside the text.
    """
    inside = weights > 0
    survival = mx.cumprod(mx.where(inside, stands.astype(mx.float32), 0), axis=-1)
    blocks = inside.any(axis=-1)
    return blocks.sum() + survival.sum(), blocks.sum()

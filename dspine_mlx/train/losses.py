"""Losses of DFlash, DSpark and DSpine drafters, row by row.

A row is one proposal of one block. Every term is a sum over rows of weight * loss, divided by the sum
of the weights of all rows of the optimiser step: micro-batches add up to the loss of the whole.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.dflash import DFlash, top_k
from dspine_mlx.dspine import DSpine
from dspine_mlx.train.blocks import Batch, States, forward
from dspine_mlx.train.config import LossConfig


class Schedule(NamedTuple):
    """What changes from step to step; arrays, so that a compiled step sees them as inputs."""

    alpha: mx.array  # share of CE
    beta: mx.array  # weight of the alignment
    denominator: mx.array  # sum of the weights of all rows of the optimiser step


class Rows(NamedTuple):
    """What one chunk of rows adds to the loss, and how its drafts would fare."""

    loss: mx.array  # [R]
    ce: mx.array  # [R] of the base logits, against the text
    agree: mx.array  # [R] bool: the drafter's best token is the target's
    overlap: mx.array  # [R] sum over v of min(p, q): the chance that a sampled draft stands


RowLoss = Callable[..., Rows]


def drafter_loss(
    drafter: DFlash,
    batch: Batch,
    schedule: Schedule,
    config: LossConfig,
    *,
    checkpoint: bool = False,
    logit_rows: int = 2048,
) -> tuple[mx.array, Rows]:
    """This batch's share of the step's loss, and the rows [S, A, M] it is made of."""
    states = forward(
        drafter, batch, replacement_layers=config.replacement_layers, checkpoint=checkpoint
    )
    flat = [x.reshape(-1, *x.shape[3:]) for x in row_inputs(batch, states)]
    make = dspine_rows if isinstance(drafter, DSpine) else dflash_rows
    row_loss = make(drafter, config)
    count = flat[0].shape[0]
    if count > logit_rows:
        row_loss = mx.checkpoint(row_loss)  # a chunk's logits are made again in the backward pass
    chunks = [
        row_loss(schedule.alpha, *(x[i : i + logit_rows] for x in flat))
        for i in range(0, count, logit_rows)
    ]
    rows = Rows(*(mx.concatenate(parts).reshape(batch.weights.shape) for parts in zip(*chunks)))
    loss = rows.loss
    if isinstance(drafter, DSpine):
        loss = loss + schedule.beta * alignment(drafter, batch, states, rows.ce, config)
    return (batch.weights * loss).sum() / schedule.denominator, rows


def row_inputs(batch: Batch, states: States) -> list[mx.array]:
    """The target's states, the labels, the drafter's states: [S, A, M, ...] each."""
    inputs = [batch.gather(batch.hidden, 0), batch.labels, states.base]
    return inputs if states.refined is None else [*inputs, states.refined]


class Laws(NamedTuple):
    """The target's law and the drafter's, of R rows over the vocabulary."""

    p: mx.array  # [R, V]
    q: mx.array  # [R, V]
    logits: mx.array  # [R, V] the drafter's
    lse: mx.array  # [R] log of the sum of exp(logits)

    def cross_entropy(self, labels: mx.array) -> mx.array:
        return self.lse - mx.take_along_axis(self.logits, labels[:, None], axis=-1)[:, 0]

    def distribution_loss(self, ce: mx.array, alpha: mx.array, config: LossConfig) -> mx.array:
        """alpha CE + (1 - alpha) L1 of each row, L1 = sum over v of |p - q|: [R]."""
        if config.reference == "law":
            ce = self.lse - (self.p * self.logits).sum(axis=-1)
        return alpha * ce + (1 - alpha) * mx.abs(self.p - self.q).sum(axis=-1)


def laws(drafter: DFlash, hidden: mx.array, base: mx.array) -> Laws:
    """From the target's last states and the drafter's: [R, d] each."""
    p = mx.softmax(drafter.scale_scores(drafter.target.head(hidden)), axis=-1)
    logits = drafter.scale_scores(drafter.target.head(base))
    q, lse = softmax(logits)
    return Laws(mx.stop_gradient(p), q, logits, lse)


def softmax(logits: mx.array) -> tuple[mx.array, mx.array]:
    """The softmax [R, V] and its log normaliser [R] from one pass of exponentials."""
    top = mx.stop_gradient(logits.max(axis=-1, keepdims=True))
    powers = mx.exp(logits - top)
    total = powers.sum(axis=-1, keepdims=True)
    return powers / total, (top + mx.log(total))[:, 0]


def dflash_rows(drafter: DFlash, config: LossConfig) -> RowLoss:
    """CE (alpha = 1), or the papers' mix with L1."""

    def rows(alpha: mx.array, hidden: mx.array, labels: mx.array, base: mx.array) -> Rows:
        law = laws(drafter, hidden, base)
        ce = law.cross_entropy(labels)
        agree = mx.argmax(law.p, axis=-1) == mx.argmax(law.logits, axis=-1)
        overlap = mx.minimum(law.p, law.q).sum(axis=-1)
        return Rows(law.distribution_loss(ce, alpha, config), ce, agree, overlap)

    return rows


def dspine_rows(drafter: DSpine, config: LossConfig) -> RowLoss:
    """The mix on the base logits, and again on the scores of the base's K candidates, which are the
    refined ones (without refinement: the base's)."""

    def rows(
        alpha: mx.array, hidden: mx.array, labels: mx.array, base: mx.array, refined: mx.array
    ) -> Rows:
        law = laws(drafter, hidden, base)
        ce = law.cross_entropy(labels)
        loss = law.distribution_loss(ce, alpha, config)
        candidates = top_k(mx.stop_gradient(law.logits), drafter.config.top_k)[0]
        p = mx.take_along_axis(law.p, candidates, axis=-1)
        if config.refinement:
            head = drafter.target.head_rows(candidates)  # [R, K, d]
            scores = drafter.scale_scores((head @ refined[..., None])[..., 0])
            own = candidate_loss(scores, p, candidates == labels[:, None], alpha, config)
            loss = loss + config.refined_weight * own
        else:
            scores = mx.take_along_axis(law.logits, candidates, axis=-1)
        best = mx.take_along_axis(candidates, mx.argmax(scores, -1, keepdims=True), -1)[:, 0]
        overlap = mx.minimum(p, mx.softmax(scores, axis=-1)).sum(axis=-1)
        return Rows(loss, ce, best == mx.argmax(law.p, axis=-1), overlap)

    return rows


def candidate_loss(
    scores: mx.array, p: mx.array, hit: mx.array, alpha: mx.array, config: LossConfig
) -> mx.array:
    """The mix on K candidates: [R] of scores, the target's p, and hit (it is the label), [R, K] each.

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
    drafter: DSpine, batch: Batch, states: States, ce: mx.array, config: LossConfig
) -> mx.array:
    """What each layer's states say of their own token, per row, the mean over layers: [S, A, M].

    1 - cos(R_l h_l, C[y]), weighted with the row's CE (no gradient), so that it fades as the drafter
    learns; `token`: the CE of norm(h_l) in its place, the plain way to supervise a layer.
    """
    labels, weight = batch.labels, mx.stop_gradient(ce)
    if config.alignment == "token":
        losses = [
            nn.losses.cross_entropy(
                drafter.scale_scores(drafter.target.head(drafter.norm(h))), labels
            )
            for h in states.layers
        ]
        return sum(losses) / len(losses)
    codes = drafter.transfer_codes(labels)
    cosines = [
        nn.losses.cosine_similarity_loss(readout(h), codes, axis=-1, eps=1e-12)
        for readout, h in zip(drafter.injection.readouts, states.layers, strict=True)
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

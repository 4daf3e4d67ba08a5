"""Training losses, row by row. A method's own terms are in `dspine_mlx.train.objectives`.

A row is one proposal of one block. Every term is a sum over rows of weight * loss, divided by the
sum of weights over all rows of the optimiser step. So micro-batches add up to the loss of the
whole. `length_loss` alone looks at whole blocks.
"""

from typing import NamedTuple

import mlx.core as mx

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.top_k import scale_scores
from dspine_mlx.train.config import LossConfig


class Schedule(NamedTuple):
    """Quantities that change from step to step; arrays, so that a compiled step takes them as
    inputs."""

    alpha: mx.array  # share of CE
    beta: mx.array  # weight of the alignment
    denominator: mx.array  # sum of the weights of all rows of the optimiser step
    backbone: mx.array = mx.array(0.0)  # share of the backbone's own loss, for Domino
    length: mx.array = mx.array(0.0)  # share of the loss on the expected accepted length
    proposals: mx.array = mx.array(1.0)  # proposals inside the text, of the optimiser step


class LossRows(NamedTuple):
    """One chunk of rows' part of the loss, and how well its drafts would do."""

    loss: mx.array  # [R]
    ce: mx.array  # [R] of the base logits, against the text
    agree: mx.array  # [R] bool: the drafter's best token is the target's
    overlap: mx.array  # [R] sum over v of min(p, q): the chance that a sampled draft is accepted
    chance: mx.array  # [R] the drafter's probability of the target's best token


def draft_ids(drafter: Drafter, tokens: mx.array) -> mx.array:
    """Map tokens to rows of the drafter's head; Vd for those outside a reduced vocabulary."""
    if "d2t" not in drafter.network:
        return tokens
    ids = drafter.network.d2t
    places = mx.full((drafter.verifier.vocab_size,), ids.size, tokens.dtype)
    places[ids] = mx.arange(ids.size, dtype=tokens.dtype)
    return places[tokens]


class Distributions(NamedTuple):
    """The target's p and the drafter's q of R rows, over the tokens that the drafter proposes."""

    p: mx.array  # [R, V]; of a reduced vocabulary [R, Vd], which does not add up to 1
    q: mx.array  # the same
    lse: mx.array  # [R] log of the sum of exp(logits)
    logits: mx.array  # the drafter's
    best: mx.array  # [R] the target's best token, as `draft_ids` counts
    outside: mx.array  # [R] the target's probability of tokens that can't be proposed

    def cross_entropy(self, labels: mx.array) -> mx.array:
        """Cross-entropy of labels among the drafter's tokens; 0 for others."""
        return cross_entropy(self.logits, self.lse, labels)

    @property
    def agree(self) -> mx.array:
        return self.best == mx.argmax(self.logits, axis=-1)

    @property
    def overlap(self) -> mx.array:
        """The overlap of p and q, 1 - L1 / 2."""
        return mx.minimum(self.p, self.q).sum(axis=-1)

    @property
    def chance(self) -> mx.array:
        """The drafter's probability of the target's best token; 0 if it can't be proposed."""
        index = mx.minimum(self.best, self.q.shape[-1] - 1)[:, None]
        chance = mx.take_along_axis(self.q, index, axis=-1)[:, 0]
        return mx.where(self.best < self.q.shape[-1], chance, 0)

    def rows(self, loss: mx.array, ce: mx.array) -> LossRows:
        """Make the rows of a drafter that proposes from these logits."""
        return LossRows(loss, ce, self.agree, self.overlap, self.chance)

    def candidate_rows(
        self, candidates: mx.array, scores: mx.array, loss: mx.array, ce: mx.array
    ) -> LossRows:
        """Make the rows of a drafter that proposes one of K candidates [R, K] by their scores."""
        q = mx.softmax(scores, axis=-1)
        first = mx.stop_gradient(mx.argmax(scores, axis=-1, keepdims=True))
        agree = mx.take_along_axis(candidates, first, axis=-1)[:, 0] == self.best
        p = mx.take_along_axis(self.p, candidates, axis=-1)
        chance = mx.where(candidates == self.best[:, None], q, 0).sum(axis=-1)
        return LossRows(loss, ce, agree, mx.minimum(p, q).sum(axis=-1), chance)

    def distribution_loss(self, ce: mx.array, alpha: mx.array, config: LossConfig) -> mx.array:
        """alpha CE + (1 - alpha) L1 of each row, L1 = sum over v of |p - q|: [R]."""
        if config.reference == "distribution":
            ce = (1 - self.outside) * self.lse - (self.p * self.logits).sum(axis=-1)
        return alpha * ce + (1 - alpha) * (mx.abs(self.p - self.q).sum(axis=-1) + self.outside)


def cross_entropy(logits: mx.array, lse: mx.array, labels: mx.array) -> mx.array:
    """Compute lse - logits[label] over the last axis; 0 for labels past its end."""
    # mx.checkpoint needs the gradient of every input, and indices have none
    labels = mx.stop_gradient(labels)
    index = mx.minimum(labels, logits.shape[-1] - 1)[..., None]
    ce = lse - mx.take_along_axis(logits, index, axis=-1)[..., 0]
    return mx.where(labels < logits.shape[-1], ce, 0)


def distributions(drafter: Drafter, hidden: mx.array, own: mx.array) -> Distributions:
    """Compute both distributions from the target's last states [R, d] and the drafter's logits."""
    head = drafter.verifier.head(hidden.astype(drafter.verifier.dtype))
    p = mx.stop_gradient(mx.softmax(scale_scores(head, drafter.config), axis=-1))
    best, outside = draft_ids(drafter, mx.argmax(p, axis=-1)), mx.array(0.0)
    if "d2t" in drafter.network:
        p = p[:, drafter.network.d2t]
        outside = 1 - p.sum(axis=-1)
    return Distributions(p, *softmax(own), own, best, outside)


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


def acceptance_length(weights: mx.array, accepted: mx.array) -> tuple[mx.array, mx.array]:
    """Sum of the expected tokens per round over blocks, the target's own included; and the number
    of blocks.

    accepted [S, A, M]: the chance that slot t is accepted if the slots before it are; weights > 0
    mark the proposals inside the text.
    """
    blocks = (weights > 0).any(axis=-1).sum()
    return blocks + survival(weights, accepted).sum(), blocks


def survival(weights: mx.array, accepted: mx.array) -> mx.array:
    """Chance that all of a block's slots up to each one are accepted, 0 outside the text:
    [S, A, M]."""
    accepted = mx.where(weights > 0, accepted.astype(mx.float32), 0)
    chances = [accepted[..., 0]]
    for t in range(1, accepted.shape[-1]):  # the gradient of mx.cumprod divides by the chances
        chances.append(chances[-1] * accepted[..., t])
    return mx.stack(chances, axis=-1)


def length_loss(weights: mx.array, rows: LossRows, config: LossConfig) -> mx.array:
    """Sum of M - E[L] over blocks: how many of the M proposals inside the text are expected to be
    rejected.

        E[L] = sum over slots t of the product over slots s <= t of a_s

    a_s is the chance that slot s is accepted if the slots before it are. At temperature 1 that is
    sum over v of min(p_s(v), q_s(v)); greedily it would be 0 or 1, and q_s of the target's best
    token takes its place, which has a gradient. E[L] is taken of both and mixed by `length_greedy`.
    The chances follow the text's own tokens, so at temperature 1 E[L] is exact where they do not
    depend on which tokens were accepted. A slot thus counts for all later ones that need it, and
    little after a likely rejection. Arrays of rows: [S, A, M].
    """
    parts = (config.length_greedy, rows.chance), (1 - config.length_greedy, rows.overlap)
    length = sum(share * survival(weights, chances).sum() for share, chances in parts)
    return (weights > 0).sum() - length

"""Selection: walk a proposal left to right and pick one candidate a slot."""

from typing import NamedTuple

import mlx.core as mx

from dspine_mlx.dflash import Proposal
from dspine_mlx.metal.kernel import OFF, Kernels
from dspine_mlx.metal.walk import walk
from dspine_mlx.sampling import Sampler


class Draft(NamedTuple):
    """The tokens to verify, in order, and the law each was drawn from."""

    tokens: mx.array  # [M]
    candidates: mx.array  # [M, K]
    q: mx.array | None  # [M, K] float32, the very law that was sampled; None: one-hot (the argmax)
    evidence: mx.array | None = None  # [M] log-odds that slot t stands after t - 1, uncalibrated
    outlook: mx.array | None = None  # [M] the same along the greedy path, known before any draw

    def first(self, length: int) -> "Draft":
        q = None if self.q is None else self.q[:length]
        return Draft(self.tokens[:length], self.candidates[:length], q)


def select(
    proposal: Proposal,
    sampler: Sampler | None = None,
    kernels: Kernels = OFF,
    stop: mx.array | None = None,
    weigh: bool = True,
) -> Draft:
    """Greedy without a sampler, else drawn slot by slot: x_t ~ softmax over the K candidates.

    stop: ids of tokens that end a text, after which no slot can stand; weigh: with the evidence.
    Nothing is evaluated here. With a sampler the draws come from `mx.random`'s global state.
    """
    candidates, first, transitions = proposal.candidates, proposal.first, proposal.transitions
    if sampler is None and proposal.best is not None:
        known = until_stop(proposal.best, best_evidence(proposal), stop) if weigh else None
        return Draft(proposal.best, candidates, None, known)
    noise, temp = mx.broadcast_to(mx.array(0.0), candidates.shape), 1.0
    if sampler is not None:
        if sampler.truncates:  # scores become log laws, to be drawn from at temperature 1
            rows = mx.concatenate([first[None], transitions.reshape(-1, first.size)])
            rows = mx.log(sampler.draft_law(rows))
            first, transitions = rows[0], rows[1:].reshape(transitions.shape)
        else:
            temp = sampler.temp
        noise = mx.random.gumbel(candidates.shape) * temp
    path, law = walk(first, transitions, noise, 1 / temp, kernels)
    draft = Draft(tokens_on(proposal, path), candidates, None if sampler is None else law)
    if not weigh:
        return draft
    draft = draft._replace(evidence=judged(proposal, path, law, stop))
    if sampler is None:
        return draft
    greedy = walk(first, transitions, mx.zeros_like(noise), 1 / temp, kernels)
    return draft._replace(outlook=judged(proposal, *greedy, stop))


def tokens_on(proposal: Proposal, path: mx.array) -> mx.array:
    """A path's tokens: [M]."""
    return mx.take_along_axis(proposal.candidates, path[:, None], axis=1)[:, 0]


def judged(proposal: Proposal, path: mx.array, law: mx.array, stop: mx.array | None) -> mx.array:
    """A path's evidence: [M]."""
    known = evidence(proposal.confidence, path, law)
    return until_stop(tokens_on(proposal, path), known, stop)


def until_stop(tokens: mx.array, known: mx.array, stop: mx.array | None) -> mx.array:
    """Evidence [M], -inf after a stop token."""
    if stop is None or stop.size == 0:
        return known
    ends = (tokens[:, None] == stop).any(axis=-1)
    return mx.where(mx.cumsum(ends, axis=0, inclusive=False) > 0, -mx.inf, known)


def evidence(confidence: mx.array | None, path: mx.array, law: mx.array) -> mx.array:
    """Log-odds [M] that slot t stands given that slot t - 1 does, as the drafter has it.

    From its confidence [M, K] after the predecessor on the path [M] of candidate indices; without
    one, the log-odds of the top entry of the law [K] that slot t was picked from.
    """
    if confidence is not None:
        before = mx.concatenate([mx.zeros((1,), path.dtype), path[:-1]])
        return log_odds(mx.take_along_axis(confidence, before[:, None], axis=1)[:, 0])
    rows = mx.log(law)
    top = mx.argmax(rows, axis=-1, keepdims=True)
    others = mx.where(mx.arange(rows.shape[-1]) == top, -mx.inf, rows)
    return rows.max(axis=-1) - mx.logsumexp(others, axis=-1)


def best_evidence(proposal: Proposal) -> mx.array:
    """The same of the first candidates of slots that pick on their own: no law is needed."""
    if proposal.confidence is not None:
        return log_odds(proposal.confidence[:, 0])
    scores = mx.concatenate([proposal.first[None], proposal.transitions[:, 0]])
    others = mx.where(mx.arange(scores.shape[1]) > 0, scores, -mx.inf)
    return scores[:, 0] - mx.logsumexp(others, axis=-1)


def log_odds(chance: mx.array) -> mx.array:
    return mx.log(chance) - mx.log1p(-chance)

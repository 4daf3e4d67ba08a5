"""Selection: walk a proposal left to right and pick one candidate per slot."""

import math
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from dspine_mlx.drafters.chain import AnyProposal, ChainProposal
from dspine_mlx.drafters.proposal import Proposal, SlotwiseProposal
from dspine_mlx.metal.kernel import OFF, Kernels
from dspine_mlx.metal.walk import walk
from dspine_mlx.round.foresee import draws_by_inverse_cdf, foresee, foresee_slots
from dspine_mlx.round.lookup import Copy
from dspine_mlx.round.sampler import Sampler

Stops = frozenset[int | None]  # tokens that end a text; None: of a tokenizer without an end
FEW = 64  # numbers per slot that go to the host as they are


class Evidence(NamedTuple):
    """What a drafter knows of a path's chances, as it comes from the device. The host computes the
    log-odds: for a block's few numbers that takes less time than a launch."""

    tokens: mx.array  # [M]
    chances: mx.array  # [M] from its confidence or of top entries, or the probs [M, K] picked from
    stops: Stops = frozenset()

    def log_odds(self) -> list[float]:
        """Log-odds [M] that slot t is accepted given that slot t - 1 is, uncalibrated: of the
        confidence, or of a row's top probability; -inf after a token that ends the text."""
        tokens, odds = self.tokens.tolist(), [log_odds(c) for c in self.chances.tolist()]
        end = next((t for t, token in enumerate(tokens, 1) if token in self.stops), len(odds))
        return odds[:end] + [-math.inf] * (len(odds) - end)


def log_odds(chance: float | list[float]) -> float:
    """Log-odds of a chance, or of the largest of several probabilities."""
    if isinstance(chance, list):
        top, others = max(chance), sum(chance)
        others -= top
    else:
        top, others = chance, 1 - chance
    if others <= 0:
        return math.inf
    return math.log(top / others) if top != 0 else -math.inf


class Draft(NamedTuple):
    """The tokens to verify, in order, and the distribution that each was drawn from."""

    tokens: mx.array  # [M]
    candidates: mx.array  # [M, K] that it was picked from; [M, 1] where nothing was ranked
    q: (
        mx.array | None
    )  # [M, K] float32, the very probs that were sampled; None: one-hot (the argmax)
    evidence: Evidence | None = None  # of the tokens
    greedy_path: Evidence | None = None  # of a sampled draft, known before any draw
    copied: Copy | None = None  # that its last tokens are from

    def first(self, length: int) -> "Draft":
        q = None if self.q is None else self.q[:length]
        return Draft(self.tokens[:length], self.candidates[:length], q)


def select(
    proposal: AnyProposal,
    sampler: Sampler | None = None,
    kernels: Kernels = OFF,
    stops: Stops = frozenset(),
    with_evidence: bool = True,
) -> Draft:
    """Pick greedily without a sampler, else draw slot by slot: x_t ~ softmax over the K candidates.
    A seeded sampler's draws are foreseen.

    stops: tokens after which no slot can be accepted. Nothing is evaluated here. With a sampler the
    draws come from `mx.random`'s global state, which a seeded one leaves as it is.
    """
    if sampler is not None and sampler.seeded:
        if draws_by_inverse_cdf() and isinstance(proposal, ChainProposal):
            return foreseen_chain(proposal, sampler, stops)
        if draws_by_inverse_cdf():
            return foreseen(proposal.ranked(), sampler, kernels, stops)
        sampler = None
    if sampler is None and isinstance(proposal, SlotwiseProposal):
        tokens, chances = proposal.greedy_tokens(), proposal.confidence
        draft = Draft(tokens, tokens[:, None], None)
        if not with_evidence:
            return draft
        chances = proposal.probs() if chances is None else chances
        return draft._replace(evidence=Evidence(tokens, chances, stops))
    if not isinstance(proposal, ChainProposal):
        proposal = proposal.ranked()
    candidates, reshape, temp = proposal.candidates, None, 1.0
    noises = [mx.broadcast_to(mx.array(0.0), candidates.shape)]
    if sampler is not None:
        if sampler.truncates:  # scores become log probs, to be drawn from at temperature 1
            reshape = log_probs(sampler)
        else:
            temp = sampler.temp
        noises.insert(0, mx.random.gumbel(candidates.shape) * temp)
    walks = proposal.paths(noises if with_evidence else noises[:1], 1 / temp, reshape, kernels)
    path, probs = walks[0]
    draft = Draft(tokens_on(proposal, path), candidates, None if sampler is None else probs)
    if not with_evidence:
        return draft
    draft = draft._replace(evidence=evidence(proposal, path, probs, stops))
    if sampler is None:
        return draft
    return draft._replace(greedy_path=evidence(proposal, *walks[1], stops))


def log_probs(sampler: Sampler) -> Callable[[mx.array], mx.array]:
    """Scores [n, K] -> the logarithms of what the sampler draws from them."""
    return lambda scores: mx.log(sampler.draft_probs(scores))


def foreseen(proposal: Proposal, sampler: Sampler, kernels: Kernels, stops: Stops) -> Draft:
    """What the sampler will most probably draw from the random state as it is now."""
    first, transitions = foresee(proposal, sampler, mx.random.state[0])
    noise = mx.zeros(proposal.candidates.shape)
    path, chances = walk(first, transitions, noise, 1.0, kernels)
    tokens = tokens_on(proposal, path)
    return Draft(tokens, tokens[:, None], None, Evidence(tokens, chances, stops))


def foreseen_chain(proposal: ChainProposal, sampler: Sampler, stops: Stops) -> Draft:
    shaped = foresee_slots(proposal.tokens, sampler, mx.random.state[0], proposal.slots)
    (path,), (rows,) = proposal.walk(mx.zeros((proposal.slots, 1, 1)), shaped)
    tokens = tokens_on(proposal, path)
    return Draft(
        tokens, tokens[:, None], None, Evidence(tokens, few(mx.softmax(rows, axis=-1)), stops)
    )


def tokens_on(proposal: Proposal | ChainProposal, path: mx.array) -> mx.array:
    """A path's tokens: [M], or [B, M] of several texts."""
    return mx.take_along_axis(proposal.candidates, path[..., None], axis=-1)[..., 0]


def evidence(
    proposal: Proposal | ChainProposal, path: mx.array, probs: mx.array, stops: Stops
) -> Evidence:
    """Evidence on a path [M] of candidate indices, whose slots picked from the probs [M, K]."""
    tokens, known = tokens_on(proposal, path), proposal.confidence_on(path)
    return Evidence(tokens, few(probs) if known is None else known, stops)


def few(probs: mx.array) -> mx.array:
    """Probs [..., M, K] as they are, or the top one [..., M] of many."""
    return probs if probs.shape[-1] <= FEW else probs.max(axis=-1)

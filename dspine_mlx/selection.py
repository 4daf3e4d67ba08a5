"""Selection: walk a proposal left to right and pick one candidate a slot."""

from typing import NamedTuple

import mlx.core as mx

from dspine_mlx.dflash import Proposal
from dspine_mlx.metal.walk import walk
from dspine_mlx.sampling import Sampler


class Draft(NamedTuple):
    """The tokens to verify, in order, and the law each was drawn from."""

    tokens: mx.array  # [M]
    candidates: mx.array  # [M, K]
    q: mx.array | None  # [M, K] float32, the very law that was sampled; None: one-hot (the argmax)

    def first(self, length: int) -> "Draft":
        q = None if self.q is None else self.q[:length]
        return Draft(self.tokens[:length], self.candidates[:length], q)


NO_DRAFT = Draft(mx.zeros((0,), mx.uint32), mx.zeros((0, 1), mx.uint32), None)


def select(proposal: Proposal, sampler: Sampler | None = None) -> Draft:
    """Greedy without a sampler, else drawn slot by slot: x_t ~ softmax over the K candidates.

    Nothing is evaluated here. With a sampler the draws come from `mx.random`'s global state.
    """
    candidates, first, transitions = proposal.candidates, proposal.first, proposal.transitions
    if sampler is None:
        path = walk(first, transitions, mx.zeros(candidates.shape))
        return Draft(at(candidates, path), candidates, None)
    M, K = candidates.shape
    law = sampler.draft_law(mx.concatenate([first[None], transitions.reshape(-1, K)]))
    scores = mx.log(law)
    noise = mx.random.gumbel((M, K))
    path = walk(scores[0], scores[1:].reshape(M - 1, K, K), noise)
    visited = mx.concatenate([mx.zeros((1,), path.dtype), 1 + K * mx.arange(M - 1) + path[:-1]])
    return Draft(at(candidates, path), candidates, law[visited])


def at(candidates: mx.array, path: mx.array) -> mx.array:
    return mx.take_along_axis(candidates, path[:, None], axis=1)[:, 0]

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
    first, transitions = proposal.first, proposal.transitions
    if sampler is None:
        path = walk(first, transitions, mx.zeros(proposal.candidates.shape))
        return Draft(at(proposal.candidates, path), proposal.candidates, None)
    first, transitions = sampler.draft_law(first), sampler.draft_law(transitions)
    noise = mx.random.gumbel(proposal.candidates.shape)
    path = walk(mx.log(first), mx.log(transitions), noise)
    rows = mx.take_along_axis(transitions, path[:-1, None, None], axis=1)[:, 0]
    return Draft(
        at(proposal.candidates, path), proposal.candidates, mx.concatenate([first[None], rows])
    )


def at(candidates: mx.array, path: mx.array) -> mx.array:
    return mx.take_along_axis(candidates, path[:, None], axis=1)[:, 0]

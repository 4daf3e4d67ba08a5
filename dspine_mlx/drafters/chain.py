"""A proposal without a table: the scores of a slot depend on the whole path before it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dspine_mlx.metal.kernel import OFF, Kernels

State = Any  # of N paths: arrays [N, ...]


class ChainProposal(ABC):
    """M slots that pick from one pool of P tokens, one slot after the other.

    Slot t scores the pool given the tokens picked so far, so q_t = softmax(scores / T) over the
    pool is the very distribution of its draw, whatever was left out of the pool.
    """

    def __init__(self, slots: int, pool: mx.array):
        self.slots, self.pool = slots, pool  # M, and token ids [P]

    @property
    def candidates(self) -> mx.array:
        """[M, P] token ids."""
        return mx.broadcast_to(self.pool, (self.slots, self.pool.size))

    @abstractmethod
    def start(self, paths: int) -> State:
        """The state of N paths that have the anchor alone."""

    @abstractmethod
    def scores(self, slot: int, state: State) -> mx.array:
        """Float32 scores [N, P] of the pool at a slot."""

    @abstractmethod
    def follow(self, slot: int, state: State, picks: mx.array) -> State:
        """The state after the slot has picked entries [N] of the pool."""

    def confidence_on(self, path: mx.array) -> mx.array | None:
        """[M] the chance that each slot is accepted if the one before is; None: not known."""
        return None

    def scores_on(self, picks: mx.array) -> mx.array:
        """Scores [M, P] along a path that picks the entries [M] of the pool."""
        state, rows = self.start(1), []
        for slot in range(self.slots):
            rows.append(self.scores(slot, state)[0])
            state = self.follow(slot, state, picks[slot : slot + 1])
        return mx.stack(rows)

    def ranked(self) -> "ChainProposal":
        """Itself: a pool has no order."""
        return self

    def paths(
        self,
        noises: list[mx.array],
        scale: float,
        reshape: Callable[[mx.array], mx.array] | None = None,
        kernels: Kernels = OFF,
    ) -> list[tuple[mx.array, mx.array]]:
        """Walks side by side, one per noise [M, P]; see `Proposal.paths`."""
        state, noise = self.start(len(noises)), mx.stack(noises, axis=1)
        rows, picks = [], []
        for slot in range(self.slots):
            row = self.scores(slot, state)
            row = row if reshape is None else reshape(row)
            picked = mx.argmax(row + noise[slot], axis=-1)
            rows.append(row)
            picks.append(picked)
            if slot + 1 < self.slots:
                state = self.follow(slot, state, picked)
        probs = mx.softmax(mx.stack(rows, axis=1) * scale, axis=-1)
        return list(zip(mx.stack(picks, axis=1), probs, strict=True))

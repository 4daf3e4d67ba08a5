"""A proposal without a table: a slot's scores depend on the whole path before it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

import mlx.core as mx

from dspine_mlx.drafters.proposal import Proposal, SlotwiseProposal
from dspine_mlx.metal.kernel import OFF, Kernels

POOL = 1 << 14  # tokens that the slots of a block pick from
State = Any  # of N paths: arrays [N, ...]


class ChainProposal(ABC):
    """M slots that pick from one pool of P tokens, one slot after the other.

    Slot t scores the pool given the tokens picked so far. So q_t = softmax(scores / T) over the
    pool is exactly the distribution it draws from, whatever the pool leaves out.
    """

    def __init__(self, slots: int, tokens: mx.array):
        self.slots, self.tokens = slots, tokens  # M, and the pool's token ids [P], ascending

    @property
    def candidates(self) -> mx.array:
        """[M, P] token ids."""
        return mx.broadcast_to(self.tokens, (self.slots, self.tokens.size))

    @abstractmethod
    def start(self, paths: int) -> State:
        """The state of N paths that hold only the anchor."""

    @abstractmethod
    def scores(self, slot: int, state: State) -> tuple[mx.array, State]:
        """Float32 scores [N, P] of the pool at a slot, and the state that the slot leaves."""

    @abstractmethod
    def follow(self, state: State, picks: mx.array) -> State:
        """The state after picking entries [N] of the pool."""

    def confidence_on(self, path: mx.array) -> mx.array | None:
        """[M] the chance that each slot is accepted if the one before is; None: not known."""
        return None

    def arrays(self) -> list[mx.array]:
        """Arrays that the walk starts from, for callers that evaluate them."""
        return [x for x in vars(self).values() if isinstance(x, mx.array)]

    def ranked(self) -> NoReturn:
        raise TypeError("a chain of slots has no table of candidates; walk it with `paths`")

    def scores_on(self, path: mx.array) -> mx.array:
        """Scores [M, P] along a path that picks the entries [M] of the pool."""
        state, rows = self.start(1), []
        for slot in range(self.slots):
            row, state = self.scores(slot, state)
            rows.append(row[0])
            state = self.follow(state, path[slot : slot + 1])
        return mx.stack(rows)

    def paths(
        self,
        noises: list[mx.array],
        scale: float,
        reshape: Callable[[mx.array], mx.array] | None = None,
        kernels: Kernels = OFF,
    ) -> list[tuple[mx.array, mx.array]]:
        """Walk side by side, once per noise [M, P]; see `Proposal.paths`."""
        shaped = (lambda _, row: row) if reshape is None else (lambda _, row: reshape(row))
        picks, rows = self.walk(mx.stack(noises, axis=1), shaped)
        return list(zip(picks, mx.softmax(rows * scale, axis=-1), strict=True))

    def walk(
        self, noise: mx.array, shaped: Callable[[int, mx.array], mx.array]
    ) -> tuple[mx.array, mx.array]:
        """Pick argmax(shaped(slot, scores) + noise) slot by slot, with noise [M, N, P]. Returns the
        picks [N, M] and the shaped scores [N, M, P]."""
        state, picks, rows = self.start(noise.shape[1]), [], []
        for slot in range(self.slots):
            row, state = self.scores(slot, state)
            rows.append(shaped(slot, row))
            picks.append(mx.argmax(rows[-1] + noise[slot], axis=-1))
            if slot + 1 < self.slots:
                state = self.follow(state, picks[-1])
        return mx.stack(picks, axis=1), mx.stack(rows, axis=1)


AnyProposal = Proposal | SlotwiseProposal | ChainProposal


def shared_pool(base: mx.array, size: int = POOL) -> mx.array | None:
    """Columns of base scores [M, V], ascending, with the smallest gap to the best of some slot;
    None: all.

    Every slot's best token is in it.
    """
    if base.shape[1] <= size:
        return None
    below = (base - base.max(axis=-1, keepdims=True)).max(axis=0)
    return mx.sort(mx.argpartition(-below, size - 1)[:size])

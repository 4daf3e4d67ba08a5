"""DSpark's proposal as published: the Markov head scores a large pool before candidates are cut."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.drafters.chain import ChainProposal


class MarkovHead(Protocol):
    markov_w1: nn.Embedding
    markov_w2: nn.Embedding

    def step(
        self, previous: mx.array, states: mx.array, memory: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The factor [N, r] of w2, from w1 [N, r] of the previous token and the slot's states [N,
        d], and the slot's memory [N, r] for the next one."""


class Path(NamedTuple):
    previous: mx.array  # w1 [N, r] of the newest token
    memory: mx.array  # [N, r], of an RNN head


class MarkovProposal(ChainProposal):
    """Scores U_t(v) + B_t(x_{t-1}, v) of a pool of tokens; a small vocabulary is all in it."""

    def __init__(
        self,
        head: MarkovHead,
        base: mx.array,
        states: mx.array,
        anchor: mx.array,
        vocabulary: mx.array | None,
        pool: mx.array | None,
        confidence: Callable[[mx.array, mx.array], mx.array | None],
    ):
        """base: scores [M, Vd]; vocabulary: the target's ids [Vd]; pool: columns of base [P]; both
        None: all. confidence: chances [M] of states [M, d] and w1 [M, r] of the tokens before."""
        self.head, self.states, self.anchor, self.chances = head, states, anchor, confidence
        w2 = head.markov_w2
        if pool is None:
            self.base, self.successors = base, w2.as_linear
            pool = mx.arange(base.shape[1], dtype=mx.uint32)
        else:
            rows = w2(pool)
            self.base, self.successors = base[:, pool], lambda mixed: mixed @ rows.T
        super().__init__(len(states), pool if vocabulary is None else vocabulary[pool])

    def start(self, paths: int) -> Path:
        previous = self.head.markov_w1(mx.broadcast_to(self.anchor.reshape(1), (paths,)))
        return Path(previous, mx.zeros_like(previous))

    def scores(self, slot: int, state: Path) -> tuple[mx.array, Path]:
        shape = (len(state.previous), self.states.shape[1])
        states = mx.broadcast_to(self.states[slot], shape)
        mixed, memory = self.head.step(state.previous, states, state.memory)
        bias = self.successors(mixed).astype(mx.float32)
        return self.base[slot] + bias, state._replace(memory=memory)

    def follow(self, state: Path, picks: mx.array) -> Path:
        return state._replace(previous=self.head.markov_w1(self.tokens[picks]))

    def confidence_on(self, path: mx.array) -> mx.array | None:
        anchor = self.anchor.reshape(1).astype(self.tokens.dtype)
        before = mx.concatenate([anchor, self.tokens[path[:-1]]])
        return self.chances(self.states, self.head.markov_w1(before))

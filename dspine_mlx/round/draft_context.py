"""The drafter's side of a text: its caches, and the features that they have not taken in yet."""

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from dspine_mlx.drafters.chain import AnyProposal
from dspine_mlx.drafters.drafter import Drafter

BACKLOG = 64  # positions whose features enter the drafter's cache together in plain decoding


class DraftContext:
    """The drafter's caches [one per draft layer] and a backlog of target features [1, n, m*d].

    Plain decoding takes the backlog in now and then, if the policy finds that worth its time. If
    not, the next draft takes in the newest BACKLOG rows, and the rows before them are dropped:
    rotary positions are relative, so later drafts only lose context.
    """

    def __init__(self, drafter: Drafter, cache: list[KVCache]):
        self.drafter, self.cache = drafter, cache
        self.keeps_up: Callable[[int], bool] = lambda depth: True  # by the text's depth
        self.backlog: list[mx.array] = []
        self.waiting = 0  # rows of the backlog
        self.checkpoint()

    def checkpoint(self) -> None:
        """Mark all rows in the caches as the text's."""
        self.marks = [c.offset for c in self.cache]
        self.taken: int | None = None  # rows of the backlog that a proposal took in

    def propose(self, anchor: mx.array, features: mx.array) -> AnyProposal:
        """Take in the backlog and the newest features, and propose tokens after the anchor."""
        rows = mx.concatenate([*self.backlog, features], axis=1)
        proposal = self.drafter.propose(anchor, rows, self.cache)
        self.taken, self.backlog, self.waiting = self.waiting, [], 0
        if not features.shape[1]:  # no row is in doubt: the backlog belongs to the text
            self.checkpoint()
        return proposal

    def roll_back(self, features: mx.array, rows: int, depth: int) -> None:
        """Keep the first `rows` of the newest features, which belong to the text. Rows that a
        proposal took in past them are dropped; if the proposal failed, all of its rows are."""
        keep = 0 if self.taken is None else self.taken + rows
        for c, mark in zip(self.cache, self.marks, strict=True):
            c.trim(c.offset - mark - keep)
        taken = self.taken
        self.checkpoint()
        if taken is None and rows:
            self.add(features[:, :rows] if rows < features.shape[1] else features, depth)

    def add(self, features: mx.array, depth: int) -> None:
        """Queue features of the text's rows, to be taken in later."""
        self.backlog.append(features)
        self.waiting += features.shape[1]
        if self.waiting < BACKLOG:
            return
        if self.keeps_up(depth):
            self.catch_up()
        while self.waiting > BACKLOG:
            self.waiting -= self.backlog.pop(0).shape[1]

    def catch_up(self) -> None:
        """Take in the backlog without a proposal."""
        if self.backlog:
            self.drafter.extend(mx.concatenate(self.backlog, axis=1), self.cache)
            mx.async_eval([c.state for c in self.cache])
        self.backlog, self.waiting = [], 0
        self.checkpoint()

"""The drafter's side of several texts: its caches, and features that they have not taken in yet."""

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from dspine_mlx.batch.draft_rows import DraftLengths, DraftRows
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.proposals import Proposals
from dspine_mlx.round.draft_context import BACKLOG, DraftContext


class DraftContexts:
    """The drafter's caches [one per draft layer] of the texts that are drafted for together, and a
    backlog of features [B, n, m*d]: of its newest part the first counts[i] rows are text i's, of
    the rest all.

    While it is not worth its time to take a full backlog in, the newest BACKLOG rows are kept, as
    for one text (`dspine_mlx.round.draft_context`)."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.lengths = drafter, DraftLengths()
        self.cache = [DraftRows(self.lengths) for _ in drafter.layers]
        self.clear()

    def clear(self) -> None:
        self.backlog: list[mx.array] = []
        self.waiting = 0  # rows of all its parts
        self.counts = [0] * len(self.lengths.host)  # rows of the backlog, text by text

    def add(
        self, features: mx.array, counts: list[int], keeps_up: Callable[[], bool] = lambda: True
    ) -> None:
        """Rows of the texts, to be taken in later; keeps_up: whether a full backlog is worth taking
        in now."""
        if min(self.counts, default=0) != self.waiting or (self.waiting >= BACKLOG and keeps_up()):
            self.catch_up()
        while self.waiting >= BACKLOG:
            self.drop(self.backlog.pop(0).shape[1])
        self.backlog.append(features)
        self.waiting += features.shape[1]
        self.counts = [n + more for n, more in zip(self.counts, counts, strict=True)]

    def drop(self, rows: int) -> None:
        """Forget the oldest rows of the backlog: later drafts lose context only, as rotary
        positions are relative."""
        self.waiting -= rows
        self.counts = [n - rows for n in self.counts]

    def propose(self, anchors: mx.array, slots: int | None = None) -> Proposals:
        """Take in the backlog, and propose tokens after each text's anchor [B]."""
        self.lengths.take_in(self.counts)
        proposals = self.drafter.propose_texts(anchors, self.features, self.cache, slots)
        self.lengths.taken()
        self.clear()
        return proposals

    def catch_up(self) -> None:
        """Take in the backlog without a proposal."""
        if self.backlog:
            self.lengths.take_in(self.counts)
            self.drafter.extend(self.features, self.cache)
            self.lengths.taken()
            mx.async_eval([c.state for c in self.cache])
        self.clear()

    @property
    def features(self) -> mx.array:
        if self.backlog:
            return mx.concatenate(self.backlog, axis=1)
        none = self.drafter.no_features()
        return mx.zeros((len(self.counts), *none.shape[1:]), none.dtype)

    def join(self, own: list[KVCache]) -> None:
        """Take one more text in, from the caches that its prompt went into."""
        self.catch_up()
        for rows, cache in zip(self.cache, own, strict=True):
            rows.join(cache)
        self.lengths.replace([*self.lengths.host, own[0].offset if own else 0])
        self.clear()

    def keep(self, texts: list[int]) -> None:
        """Only these texts stay."""
        if not texts:
            self.lengths = DraftLengths()
            self.cache = [DraftRows(self.lengths) for _ in self.cache]
            self.clear()
            return
        self.lengths.keep(texts)
        for rows in self.cache:
            rows.keep(texts)
        self.backlog = [part[mx.array(texts)] for part in self.backlog]
        self.counts = [self.counts[i] for i in texts]

    def extract(self, text: int) -> list[KVCache]:
        """A text's own caches, after `catch_up`."""
        return [rows.extract(text) for rows in self.cache]

    def put_apart(self, text: int, own: DraftContext) -> None:
        """Move a text's caches and backlog into a context of its own, before the others' `keep`."""
        for cache, moved in zip(own.cache, self.extract(text), strict=True):
            cache.keys, cache.values, cache.offset = moved.keys, moved.values, moved.offset
        own.checkpoint()
        left = self.counts[text]
        for part in self.backlog:
            rows = min(left, part.shape[1])
            if rows:
                own.add(part[text : text + 1, :rows], 0)
            left -= rows

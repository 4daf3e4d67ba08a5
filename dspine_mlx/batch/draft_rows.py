"""The drafter's caches of several texts, each with its own number of new context rows."""

import mlx.core as mx

from dspine_mlx.batch.rows import Lengths, RowsKV


class DraftLengths(Lengths):
    """Context positions of each text, and how many more each takes in with the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.take_in([])

    def take_in(self, counts: list[int]) -> None:
        """The next forward has context rows [B, n], of which the first counts[i] are text i's."""
        self.counts, self.new = counts, mx.array(counts, mx.int32)

    @property
    def anchors(self) -> mx.array:
        """Positions [B] of the anchors in the next forward."""
        return self.device + self.new

    def taken(self) -> None:
        """The forward is over: its context rows stay, its blocks don't."""
        self.advance(self.counts)
        self.take_in([])


class DraftRows(RowsKV):
    lengths: DraftLengths

    def __init__(self, lengths: DraftLengths):
        super().__init__(lengths)

    @property
    def anchors(self) -> mx.array:
        return self.lengths.anchors

    def side_by_side(self, context: mx.array, block: mx.array) -> mx.array:
        """Each text's own context rows, of [B, n, d], and its block [B, L, d] right after them:
        [B, n + L, d]. What is too much comes last; nothing sees it."""
        n, L = context.shape[1], block.shape[1]
        slot, own = mx.arange(n + L, dtype=mx.int32), self.lengths.new[:, None]
        source = mx.where(slot < own, slot, mx.minimum(slot - own, L - 1) + n)
        rows = mx.concatenate([context, block], axis=1)
        return mx.take_along_axis(rows, source[..., None], axis=1)

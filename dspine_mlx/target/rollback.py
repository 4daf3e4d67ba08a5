"""Rollback: returning the target's caches to the accepted prefix of a verify forward.

Rows of a KV cache are trimmed and rows of a window are sliced off. Recurrent states are recomputed
from what the verify forward recorded, in `dspine_mlx.target.recurrent`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from dspine_mlx.errors import InputError
from dspine_mlx.target.recurrent import Record, Recorder
from dspine_mlx.target.swap import swapping


class KVMark:
    """A cache whose newest rows can be cut off: KV, quantised KV, chunked KV."""

    def __init__(self, cache: Any):
        self.cache, self.offset = cache, cache.offset

    def advance_one(self) -> None:
        """Advance past one row."""
        self.offset = self.cache.offset

    def keep_first(self, rows: int) -> None:
        excess = self.cache.offset - self.offset - rows
        if excess > 0:
            self.cache.trim(excess)


class WindowMark(KVMark):
    """A rotating cache, wrapped or not. Its own trim moves counters only.

    After an update of several rows, the buffer is in time order and holds up to max_size - 1 rows
    besides the new ones, so the window of the remaining rows is complete. Such an update makes new
    arrays, so keeping the old ones costs only a reference. A single row overwrites the oldest one,
    which no later row sees. There, moving the counters is correct, and a reference would make MLX
    copy the whole window.
    """

    def __init__(self, cache: RotatingKVCache):
        super().__init__(cache)
        self.before: tuple[Any, ...] | None = None

    def snapshot(self) -> None:
        """Keep the arrays before an update of several rows."""
        cache = self.cache
        self.before = cache.keys, cache.values, cache.offset, cache._idx

    def keep_first(self, rows: int) -> None:
        cache = self.cache
        fed = cache.offset - self.offset
        if fed <= rows:
            return
        if fed == 1:
            cache.trim(1)
        elif rows == 0 and self.before is not None:
            cache.keys, cache.values, cache.offset, cache._idx = self.before
        else:
            excess = fed - rows
            cache.keys, cache.values = cache.keys[..., :-excess, :], cache.values[..., :-excess, :]
            cache.offset -= excess
            cache._idx = cache.keys.shape[2]


class RecurrentMark:
    """A recurrent state: the old arrays, and what was recorded of the forward that changed them."""

    def __init__(self, cache: ArraysCache):
        self.cache, self.before = cache, list(cache.cache)
        self.record = Record(cache)

    def advance_one(self) -> None:
        self.before = list(self.cache.cache)

    def keep_first(self, rows: int) -> None:
        if rows == 0:
            self.cache.cache = list(self.before)
        elif rows < self.record.fed:
            self.cache.cache = self.record.states_after(rows)


MARKS: dict[type, type[KVMark] | type[RecurrentMark]] = {
    KVCache: KVMark,
    QuantizedKVCache: KVMark,
    ChunkedKVCache: KVMark,
    RotatingKVCache: WindowMark,
    ArraysCache: RecurrentMark,
}


class Rollback:
    """`checkpoint` before a verify forward, the forward inside `verifying`, `accept(rows)` after.

    accept keeps the first `rows` of the rows fed since the checkpoint. It may be called again with
    fewer rows until another forward runs. Outside `verifying`, as in prefill and plain decoding,
    nothing is recorded, and only all rows of a forward or none can be kept.

    If no record explains a recurrent layer (see `Record`), a second forward of the target runs over
    the accepted tokens. A round that is not fully accepted then costs about T(accepted) more.
    """

    def __init__(self, cache: list[Any], model: nn.Module):
        self.cache, self.model = cache, model
        unknown = {type(c).__name__ for c in leaves(cache) if type(c) not in MARKS}
        if unknown:
            known = ", ".join(kind.__name__ for kind in MARKS)
            raise InputError(
                f"can't roll back {', '.join(sorted(unknown))} to an accepted prefix; drafting "
                f"needs a target whose caches are {known} or a CacheList of these"
            )
        recurrent = any(type(c) is ArraysCache for c in leaves(cache))
        self.recorder = Recorder(model) if recurrent else None
        self.checkpoint()

    @property
    def position(self) -> int:
        """Tokens in the caches at the last checkpoint, or 0 if no cache counts them."""
        return max((m.offset for m in self.marks if isinstance(m, KVMark)), default=0)

    @property
    def recurrent(self) -> list[RecurrentMark]:
        return [m for m in self.marks if isinstance(m, RecurrentMark)]

    def checkpoint(self) -> None:
        self.marks = [MARKS[type(c)](c) for c in leaves(self.cache)]
        self.tokens = mx.array([], mx.uint32)  # of the verify forward since then

    def advance(self) -> None:
        """Move the checkpoint past the single row fed since, in plain decoding: it belongs to the
        text."""
        for mark in self.marks:
            mark.advance_one()

    def feeding(self, rows: int, more: bool = False) -> None:
        """Prepare the caches for a forward over so many rows. more: one row will follow, and keep
        these."""
        if rows > 1:
            for mark in self.marks:
                if isinstance(mark, WindowMark):
                    mark.snapshot()

    @contextmanager
    def verifying(self, tokens: mx.array) -> Iterator[None]:
        """Context for the target's forward over tokens [n], of which a prefix will be accepted."""
        self.feeding(tokens.size)
        sinks = [c for c in leaves(self.cache) if type(c) is RotatingKVCache and c.keep]
        with swapping([(cache, Sinks) for cache in sinks]), ExitStack() as stack:
            # One row is kept or not: nothing to record. (Some layers compile that case, and
            # a trace must not be recorded.)
            if self.recorder is not None and tokens.size > 1:
                records = [m.record for m in self.recurrent]
                stack.enter_context(self.recorder.recording(records, tokens.size))
            yield
        self.tokens = tokens

    def accept(self, rows: int) -> None:
        partly = 0 < rows < self.tokens.size
        records = [m.record for m in self.recurrent]
        if partly and self.recorder is not None and not self.recorder.explains(records):
            for mark in self.marks:
                mark.keep_first(0)
            self.model(self.tokens[None, :rows], cache=self.cache)
        else:
            for mark in self.marks:
                mark.keep_first(rows)
        if partly:  # start now, while the next forward is being built
            mx.async_eval([m.cache.cache for m in self.recurrent])

    def deepen(self, depth: int) -> None:
        """Fill the attention caches up to depth positions, to time steps there."""
        deepen(self.cache, depth)

    def end(self) -> None:
        """The text is over: nothing more is fed."""


def deepen(cache: list[Any], depth: int) -> None:
    """Fill attention caches up to depth positions; their contents don't affect the times."""
    for c in leaves(cache):
        if type(c) in (KVCache, RotatingKVCache) and c.offset < depth:
            B, heads, _, size = c.keys.shape
            rows = mx.zeros((B, heads, depth - c.offset, size), c.keys.dtype)
            c.update_and_fetch(rows, mx.zeros((*rows.shape[:3], c.values.shape[3]), rows.dtype))


def leaves(cache: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    """Iterate over all caches, with the members of a CacheList in place of the list."""
    for c in cache:
        if type(c) is CacheList:
            yield from leaves(c.caches)
        else:
            yield c


class Sinks(RotatingKVCache):
    """A rotating cache that keeps its first rows for ever, with the right mask.

    Row i of several sees what it would see if fed alone: the `keep` rows and the newest of the
    others, max_size in all. mlx-lm's mask for several rows hides kept rows from all but the first.
    """

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        first = min(self.max_size - 1, self.offset)
        if N == 1 or window_size or first + N <= self.max_size:
            return super().make_mask(N, window_size, return_array)
        column = mx.arange(first + N)
        row = mx.arange(first, first + N)[:, None]
        near = column > row - (self.max_size - self.keep)
        return (column <= row) & (near | (column < self.keep))

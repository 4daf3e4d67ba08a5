"""Rollback: the target's caches back to the accepted prefix of a verify forward."""

from typing import Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from dspine_mlx.errors import InputError

TRIMMED = (KVCache, QuantizedKVCache)


class Rollback:
    """`checkpoint` before a verify forward, `accept(rows)` after it.

    accept keeps the first `rows` rows that were fed since the checkpoint. It may be called again
    with fewer rows, as long as no other forward has run.
    """

    def __init__(self, cache: list[Any]):
        unknown = {type(c).__name__ for c in cache} - {
            c.__name__ for c in (*TRIMMED, RotatingKVCache)
        }
        if unknown:
            raise InputError(
                f"can't roll back {', '.join(sorted(unknown))} to an accepted prefix; drafting "
                "needs a target whose layers all use KVCache, QuantizedKVCache or RotatingKVCache"
            )
        self.cache = cache
        self.marks: list[int] = []

    @property
    def position(self) -> int:
        """Tokens in the caches at the last checkpoint."""
        return max(self.marks)

    def checkpoint(self) -> None:
        self.marks = [c.offset for c in self.cache]

    def accept(self, rows: int) -> None:
        for cache, mark in zip(self.cache, self.marks, strict=True):
            excess = cache.offset - mark - rows
            if excess > 0 and isinstance(cache, RotatingKVCache):
                drop_newest(cache, excess)
            elif excess > 0:
                cache.trim(excess)


def drop_newest(cache: RotatingKVCache, n: int) -> None:
    """Take the n newest rows out of a rotating cache, wrapped or not.

    After an update of several rows the buffer is in time order and holds up to max_size - 1 rows
    besides the new ones, so the window of the rows that stay is still complete. (The cache's own
    trim moves only its counters and leaves a wrapped buffer wrong.)
    """
    cache.keys, cache.values = cache.keys[..., :-n, :], cache.values[..., :-n, :]
    cache.offset -= n
    cache._idx = cache.keys.shape[2]

"""The target's caches of several texts: joined from mlx-lm's own, and taken apart into them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from dspine_mlx.batch.recurrent import RecurrentRows
from dspine_mlx.batch.rows import Lengths, RingKV, RowsKV
from dspine_mlx.target.rollback import leaves

# Families of mlx-lm whose layers take an offset and a mask per text. Others may compute with an
# offset as one number, and be wrong without a sign of it.
FAMILIES = {
    *("qwen2", "qwen3", "qwen3_moe", "llama", "olmo3", "gpt_oss"),
    *("gemma3_text", "gemma3", "gemma4_text", "gemma4"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "kimi_linear", "lfm2", "lfm2_moe"),
    *("mamba2", "nemotron_h", "falcon_h1", "granitemoehybrid"),
}


def refusal(model: nn.Module, caches: list[Any]) -> str | None:
    """Why these caches can't share a forward with those of other texts; None if they can."""
    family = type(model).__module__.rpartition(".")[2]
    if family not in FAMILIES:
        return f"{family} models decode one text at a time here"
    for cache in leaves(caches):
        if type(cache) is RotatingKVCache and cache.keep:
            return "caches of a limited size (max_kv_size) decode one text at a time"
        if type(cache) not in (KVCache, RotatingKVCache, ArraysCache):
            return f"a {type(cache).__name__} decodes one text at a time"
    return None


class TargetRows:
    """Caches of several texts for the model, and their rollback.

        rows.join(own)                 # at any time between two rounds
        with rows.verifying(width):
            model(tokens [B, width], cache=rows.caches)
        rows.accept([...])             # of each text's rows, at least one

    widest: rows that one forward may feed per text, at most.
    """

    def __init__(self, model: nn.Module, like: list[Any], widest: int):
        """like: one text's own caches."""
        self.lengths = Lengths()
        self.caches = [self.rows_like(cache, widest) for cache in like]
        recurrent = [c for c in leaves(self.caches) if type(c) is ArraysCache]
        self.recurrent = RecurrentRows(model, recurrent)

    def rows_like(self, cache: Any, widest: int) -> Any:
        if type(cache) is CacheList:
            return CacheList(*(self.rows_like(c, widest) for c in cache.caches))
        if type(cache) is ArraysCache:
            return ArraysCache(len(cache.cache))
        if type(cache) is RotatingKVCache:
            return RingKV(self.lengths, cache.max_size, widest)
        return RowsKV(self.lengths)

    @property
    def keyed(self) -> list[RowsKV]:
        """The caches of keys and values."""
        return [c for c in leaves(self.caches) if isinstance(c, RowsKV)]

    @property
    def state(self) -> list[Any]:
        return [c.state for c in leaves(self.caches)]

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in leaves(self.caches))

    def join(self, own: list[Any]) -> None:
        """Move one more text in, from the caches that it was prefilled in, which end up empty."""
        pairs = list(zip(leaves(self.caches), leaves(own), strict=True))
        length = max((c.offset for _, c in pairs if type(c) is not ArraysCache), default=0)
        for rows, cache in pairs:
            if isinstance(rows, RowsKV):
                rows.join(cache)
        states = [cache for _, cache in pairs if type(cache) is ArraysCache]
        self.recurrent.join(states, len(self.lengths.host))
        self.lengths.replace([*self.lengths.host, length])
        mx.eval(self.state)
        empty(own)

    def keep(self, texts: list[int]) -> None:
        """Only these texts stay."""
        self.lengths.keep(texts)
        for cache in self.keyed:
            cache.keep(texts)
        self.recurrent.keep(texts)

    def extract(self, text: int) -> list[Any]:
        """A text's own caches, of mlx-lm's classes, as after decoding it alone."""
        return [extracted(cache, text) for cache in self.caches]

    @contextmanager
    def verifying(self, width: int) -> Iterator[None]:
        """Around a forward over `width` rows of each text."""
        with self.recurrent.verifying(width):
            yield

    def cancel(self) -> None:
        """Take the forward since the last `accept` back altogether. In a ring, a single row only
        has been written over a position that no later row sees."""
        self.recurrent.cancel()

    def accept(self, rows: list[int]) -> None:
        """Keep the first rows[i] >= 1 of the rows just fed of each text i."""
        self.recurrent.accept(rows)
        self.lengths.advance(rows)


def extracted(cache: Any, text: int) -> Any:
    if type(cache) is CacheList:
        return CacheList(*(extracted(c, text) for c in cache.caches))
    if type(cache) is ArraysCache and cache.empty():
        return ArraysCache(len(cache.cache))
    return cache.extract(text)


def empty(caches: list[Any]) -> None:
    """Give up what the caches hold."""
    for cache in leaves(caches):
        if type(cache) is ArraysCache:
            cache.cache = [None] * len(cache.cache)
            continue
        cache.keys = cache.values = None
        cache.offset = 0
        if type(cache) is RotatingKVCache:
            cache._idx = 0

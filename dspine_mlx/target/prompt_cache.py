"""Prefix reuse: only the new part of a prompt is prefilled, even on targets that can't trim.

A recurrent state or a wrapped window can't be rolled back to the prefix of two prompts. So copies
are kept where a later prompt is likely to diverge from this one: at the ends of turns.
"""

import copy
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    LRUPromptCache,
    RotatingKVCache,
)

from dspine_mlx.target.rollback import leaves

# Caches that can't be rolled back to any prefix.
PARTLY_TRIMMED = (ArraysCache, ChunkedKVCache, RotatingKVCache)


class SlidChunk(ChunkedKVCache):
    """A stored chunked cache that has given up its first rows.

    `ChunkedKVCache` claims to be trimmable, but then trims fewer rows than it is asked for, or
    leaves too few for the tokens before. mlx-lm's prompt cache does not check.
    """

    def is_trimmable(self) -> bool:
        return False


def stored(cache: Any) -> Any:
    """A cache as an entry keeps it: its claim to be trimmable is true."""
    if type(cache) is CacheList:
        return CacheList(*map(stored, cache.caches))
    if type(cache) is not ChunkedKVCache or cache.start_position == 0:
        return cache
    slid = SlidChunk(cache.chunk_size)
    slid.state = copy.deepcopy(cache.state)
    return slid


def restored(cache: Any) -> Any:
    """Copy an entry's cache into the class that the model takes."""
    if type(cache) is CacheList:
        return CacheList(*map(restored, cache.caches))
    if type(cache) is not SlidChunk:
        return cache
    chunked = ChunkedKVCache(cache.chunk_size)
    chunked.state = cache.state
    return chunked


class PromptCaches(LRUPromptCache):
    """mlx_lm.server's prompt cache (`max_size` entries, `max_bytes` in all), plus turn ends.

        caches = PromptCaches(max_bytes=4 << 30)
        cache, rest = caches.fetch_nearest_cache(key, tokens)
        cache = cache or make_prompt_cache(model)
        checkpoints = caches.checkpoints(key, tokens, rest, tokenizer.eos_token_ids)
        for r in stream_generate(model, tokenizer, rest, drafter, prompt_cache=cache,
                                 prompt_checkpoints=checkpoints):
            ...
        caches.insert_cache(key, tokens + reply, cache)

    key names the model (and drafter) of the caches; tokens are lists of ints. A copy of a
    cache shares its arrays until one of the two is written to.
    """

    def fetch_nearest_cache(
        self, model: Any, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """The caches of the longest stored prefix, and the tokens after it: at least one."""
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if tokens and not rest:
            cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
            rest = [*rest, tokens[-1]]
        if cache is not None:
            cache[:] = map(restored, cache)
        return cache, rest

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], **options: Any
    ) -> None:
        entry = copy.copy(prompt_cache)
        entry[:] = map(stored, prompt_cache)
        super().insert_cache(model, tokens, entry, **options)

    def checkpoints(
        self, model: Any, tokens: list[int], rest: list[int], stops: Collection[int]
    ) -> dict[int, Callable[[list[Any]], None]]:
        """Checkpoints for `stream_generate(prompt_checkpoints=...)`, as far as they lie in rest:
        the ends of the first turn, which other conversations share, and of the last one, which
        survives when a template rewrites the reply, as those of thinking models do."""
        ends = [i for i, token in enumerate(tokens[:-1], 1) if token in stops]
        done = len(tokens) - len(rest)
        return {
            end - done: partial(self.keep, model, tokens[:end], kind)
            for kind, end in zip(("system", "user"), ends[:1] + ends[-1:], strict=False)
            if end > done
        }

    def keep(self, model: Any, tokens: list[int], kind: str, cache: list[Any]) -> None:
        """Store a copy of the caches under these tokens, if they can't be trimmed from a longer
        entry."""
        if any(type(c) in PARTLY_TRIMMED for c in leaves(cache)):
            self.insert_cache(model, tokens, copy.deepcopy(cache), cache_type=kind)

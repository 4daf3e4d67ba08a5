"""Prompt caches are reused only from where all of a model's caches can be taken back to."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from dspine_mlx.target.prompt_cache import PromptCaches

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=24)


def feed(caches: list[Any], tokens: list[int], rows: int = 1) -> list[Any]:
    """Each token's key is its place and value; `rows` at a time, as llama4 does it."""
    for at in range(0, len(tokens), rows):
        for cache in leaves(caches):
            if isinstance(cache, ChunkedKVCache):
                cache.maybe_trim_front()
            new = tokens[at : at + rows]
            first = cache.offset
            values = mx.array([[[[t, first + i] for i, t in enumerate(new)]]], mx.float32)
            cache.update_and_fetch(values, values)
    return caches


def leaves(caches: list[Any]) -> list[Any]:
    out: list[Any] = []
    for cache in caches:
        out += cache.caches if isinstance(cache, CacheList) else [cache]
    return out


def fresh(chunk: int, nested: bool) -> list[Any]:
    pair: list[Any] = [ChunkedKVCache(chunk), KVCache()]
    return [CacheList(*pair)] if nested else pair


def seen(cache: Any, chunk: int) -> list[list[float]]:
    """The rows that the next token attends to: of its chunk, or all."""
    if cache.keys is None:
        return []
    if isinstance(cache, KVCache):
        return cache.keys[0, 0, : cache.offset].tolist()
    start = cache.start_position
    rows = cache.keys[0, 0, : cache.offset - start].tolist()
    wanted = cache.offset // chunk * chunk
    return rows[max(0, wanted - start) :] if wanted >= start else [["missing"]]  # type: ignore[list-item]


@given(
    st.lists(TOKENS, min_size=1, max_size=4),
    st.integers(2, 9),
    st.integers(1, 4),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_a_reused_chunked_cache_is_a_fresh_one(
    prompts: list[list[int]], chunk: int, rows: int, nested: bool
) -> None:
    caches = PromptCaches(8)
    for tokens in prompts:
        found, rest = caches.fetch_nearest_cache("pair", tokens)
        assert tokens[len(tokens) - len(rest) :] == rest
        assert rest
        used = found or fresh(chunk, nested)
        kept = tokens[: len(tokens) - len(rest)] if found else []
        for got, want in zip(leaves(used), leaves(feed(fresh(chunk, nested), kept)), strict=True):
            assert type(got) is type(want)
            assert got.offset == len(kept)
            assert seen(got, chunk) == seen(want, chunk)
        feed(used, tokens[len(kept) :], rows)
        caches.insert_cache("pair", tokens, used)


def test_what_has_not_slid_is_still_trimmed() -> None:
    caches, tokens = PromptCaches(8), list(range(8))
    caches.insert_cache("pair", tokens, feed(fresh(16, False), tokens))
    found, rest = caches.fetch_nearest_cache("pair", [*tokens[:5], 99])
    assert ([c.offset for c in found or []], rest) == ([5, 5], [99])


@pytest.mark.parametrize(
    "slides", [ChunkedKVCache(8), RotatingKVCache(8)], ids=["chunked", "rotating"]
)
def test_a_slid_entry_gives_way_to_a_shorter_one(slides: Any) -> None:
    caches, tokens = PromptCaches(8), list(range(20))
    shorter = [type(slides)(8), KVCache()]
    caches.insert_cache("pair", tokens[:4], feed(shorter, tokens[:4]))
    caches.insert_cache("pair", tokens, feed([slides, KVCache()], tokens))
    found, rest = caches.fetch_nearest_cache("pair", [*tokens[:10], 99])
    assert ([c.offset for c in found or []], rest) == ([4, 4], [*tokens[4:10], 99])


def test_turn_ends_of_chunked_caches_are_kept() -> None:
    caches, tokens = PromptCaches(8), [1, 2, 9, 4, 5, 6, 9, 8]
    ends = caches.checkpoints("pair", tokens, tokens, {9})
    cache = fresh(4, False)
    for end, keep in ends.items():
        feed(cache, tokens[cache[1].offset : end])
        keep(cache)
    feed(cache, tokens[cache[1].offset :])
    caches.insert_cache("pair", tokens, cache)
    found, rest = caches.fetch_nearest_cache("pair", [*tokens[:7], 3, 3])
    assert ([c.offset for c in found or []], rest) == ([7, 7], [3, 3])

"""Rollback against plain forwards over the accepted text, for every family of targets."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from dspine_mlx.errors import InputError
from dspine_mlx.target.rollback import Rollback, Sinks, WindowMark, leaves
from tests.support.each_family import IN_BITS, KINDS, slow
from tests.support.families import WINDOW, build
from tests.support.rollback import (
    CONTEXT,
    DISTINCT,
    LENGTH,
    VOCABULARY,
    agree,
    modules,
    start,
    text,
    verify,
)

rounds = st.lists(
    st.tuples(
        st.integers(1, 16),  # rows of the verify forward
        st.integers(0, 16),  # of these, accepted at first
        st.integers(0, 16),  # and after a second thought
        st.booleans(),  # whether a plain step follows
    ),
    min_size=5,
    max_size=9,
).filter(lambda rounds: sum(min(counts[:3]) for counts in rounds) > WINDOW)


@pytest.mark.parametrize(("family", "bits"), IN_BITS)
@settings(max_examples=1, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(rounds=rounds)
def test_any_rounds_equal_plain_decoding(
    family: str, bits: int | None, rounds: list[tuple[int, int, int, bool]]
) -> None:
    """Accepted rows, and all rows that follow, are those of one forward per token; refused tokens
    and tokens accepted by mistake leave no trace, before and after windows are full."""
    model, tokens, logits = text(family, bits)
    junk = (tokens + 1) % VOCABULARY
    prompt_cache, rollback = start(model, tokens[:CONTEXT])
    done = CONTEXT
    for rows, first, kept, plain_step in rounds:
        if done == LENGTH:
            break
        rows = min(rows, LENGTH - done)
        first = min(first, rows)
        kept = min(kept, first)
        fed = mx.concatenate([tokens[done : done + kept], junk[done + kept : done + rows]])
        ours = verify(model, rollback, fed)
        rollback.accept(first)
        rollback.accept(kept)
        rollback.checkpoint()
        assert agree(family, ours[:kept], logits[done : done + kept])
        done += kept
        if plain_step and done < LENGTH:
            ours = model(tokens[None, done : done + 1], cache=prompt_cache)[0]
            rollback.accept(1)
            rollback.checkpoint()
            assert agree(family, ours, logits[done : done + 1])
            done += 1
    if done < LENGTH:
        rest = model(tokens[None, done:], cache=prompt_cache)[0]
        assert agree(family, rest, logits[done:])


@pytest.mark.parametrize("context", [3, WINDOW + 9])
@pytest.mark.parametrize("family", [f if f in KINDS else slow(f) for f in DISTINCT])
def test_a_round_leaves_what_a_forward_over_the_accepted_rows_leaves(
    family: str, context: int
) -> None:
    """Bit for bit in every family: the replay of a prefix is the computation of that prefix."""
    model, tokens, _ = text(family)
    following = tokens[-3:]
    for rows, kept in ((2, 1), (5, 2), (16, 15)):
        prompt_cache, rollback = start(model, tokens[:context])
        verify(model, rollback, tokens[context : context + rows])
        rollback.accept(kept)
        plain_cache = make_prompt_cache(model)
        model(tokens[None, :context], cache=plain_cache)
        model(tokens[None, context : context + kept], cache=plain_cache)
        ours = model(following[None], cache=prompt_cache)[0]
        plain = model(following[None], cache=plain_cache)[0]
        if kept == 1:  # one row alone may take another formula
            assert agree(family, ours, plain)
        else:
            assert mx.array_equal(ours, plain), (rows, kept)


class Stop(Exception):
    pass


@pytest.mark.parametrize("context", [3, WINDOW + 9])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("family", DISTINCT)
def test_a_forward_that_raises_midway_is_undone(family: str, rows: int, context: int) -> None:
    """Some layers have taken the rows, some have not; nothing of them or of the recorder stays."""
    model, tokens, logits = text(family)
    _, rollback = start(model, tokens[:context])
    before = modules(model)
    layer = model.layers[2]

    class Failing(type(layer)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            super().__call__(*args, **kwargs)
            raise Stop

    original, layer.__class__ = type(layer), Failing
    with pytest.raises(Stop):
        verify(model, rollback, tokens[:rows])
    layer.__class__ = original
    rollback.accept(0)
    assert modules(model) == before
    rollback.checkpoint()
    ours = verify(model, rollback, tokens[context : context + 6])
    assert agree(family, ours, logits[context : context + 6])


class Novel(KVCache):
    pass


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", [ConcatenateKVCache, Novel])
def test_an_unknown_cache_is_refused_by_name(kind: type, inside: bool) -> None:
    model = text("llama").model
    unknown = CacheList(KVCache(), kind()) if inside else kind()
    with pytest.raises(InputError, match=f"can't roll back {kind.__name__} to"):
        Rollback([KVCache(), unknown], model)


def test_position_counts_whatever_cache_counts() -> None:
    positions = {}
    for family in ("qwen3_5", "falcon_h1", "nemotron_h", "gpt_oss", "mamba2"):
        model, tokens, _ = text(family)
        positions[family] = start(model, tokens[:11])[1].position
    assert positions.pop("mamba2") == 0  # no cache of it counts
    assert set(positions.values()) == {11}


@pytest.mark.parametrize("context", [6, 13, 14, 15, 16, 17, 40])
@pytest.mark.parametrize("rows", [2, 5, 16])
def test_rows_of_max_kv_size_see_what_they_see_alone(context: int, rows: int) -> None:
    """Past max_kv_size mlx-lm keeps the first 4 rows and the newest others."""
    model, tokens, _ = text("qwen3")
    size = 16

    def rotating() -> list[Any]:
        prompt_cache = make_prompt_cache(model, size)
        for token in tokens[:context]:
            model(token[None, None], cache=prompt_cache)
        return prompt_cache

    fed = tokens[context : context + rows]
    plain_cache = rotating()
    plain = mx.concatenate([model(t[None, None], cache=plain_cache)[0] for t in fed])
    rollback = Rollback(rotating(), model)
    ours = verify(model, rollback, fed)
    assert mx.allclose(ours, plain, rtol=0, atol=1e-5)
    assert {type(c) for c in leaves(rollback.cache)} == {RotatingKVCache}
    if context + rows > size:  # control: mlx-lm's own mask would hide kept rows
        assert not mx.allclose(model(fed[None], cache=rotating())[0], plain, atol=1e-3)


@pytest.mark.parametrize("keep", [0, 1, 4])
@pytest.mark.parametrize("offset", [0, 3, 9, 15, 16, 40])
def test_mask_of_kept_rows(keep: int, offset: int) -> None:
    """By definition: kept rows and the newest others, max_size in all, none from the future."""
    size, rows = 16, 7
    sinks = Sinks(size, keep)
    sinks.offset = offset
    mask: Any = sinks.make_mask(rows, return_array=True)
    buffer = list(range(offset))
    if offset >= size:  # what an update of several rows leaves before it appends
        buffer = [*range(keep), *range(offset - (size - 1 - keep), offset)]
    for i in range(rows):
        seen = [*buffer, *range(offset, offset + rows)]
        visible = [p for p in seen if p <= offset + i]
        others = [p for p in visible if p >= keep]
        wanted = {p for p in visible if p < keep} | set(others[-(size - keep) :])
        assert {p for p, m in zip(seen, mask[i].tolist(), strict=True) if m} == wanted


def test_recurrent_caches_are_found_inside_lists() -> None:
    inner = CacheList(ArraysCache(2), CacheList(KVCache(), ArraysCache(1)))
    assert [type(c) for c in leaves([inner, KVCache()])] == [
        ArraysCache,
        KVCache,
        ArraysCache,
        KVCache,
    ]


def test_single_rows_are_written_in_place() -> None:
    """Nothing but the cache refers to a window's arrays before a single row is fed."""
    model = build("gemma3")
    cache = make_prompt_cache(model)
    model(mx.arange(5)[None], cache=cache)
    rollback = Rollback(cache, model)
    windows = [mark for mark in rollback.marks if isinstance(mark, WindowMark)]
    assert windows
    rollback.feeding(1)
    assert all(mark.before is None for mark in windows)
    rollback.feeding(2)
    assert all(mark.before[0] is mark.cache.keys for mark in windows if mark.before)
    assert all(mark.before for mark in windows)

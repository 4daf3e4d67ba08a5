"""Rollback against plain forwards over the accepted text, for every family of targets."""

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
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
from tests.support.families import FAMILIES, WINDOW, build

CONTEXT, LENGTH, VOCABULARY = 5, 2 * WINDOW + 10, 256
MAMBA2 = {"nemotron_h", "falcon_h1", "granitemoehybrid", "mamba2"}
WINDOWED = {
    "llama_sliding",
    "olmo3",
    "gemma3_text",
    "gemma3",
    "gemma4_text",
    "gemma4",
    "gpt_oss",
    "recurrent_gemma",
}
# These don't give the same bits for one row and several: the ring of a window is summed in another
# order once it is wrapped, Mamba-2 and latent attention have other formulas for several rows.
ROUNDED = MAMBA2 | WINDOWED | {"kimi_linear"}
AGAIN = {"jamba", "rwkv7", "recurrent_gemma"}  # go back by a second forward
RECORDED = MAMBA2 | {
    "qwen3_5",
    "qwen3_5_wrapped",
    "qwen3_5_moe",
    "qwen3_next",
    "olmo_hybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
}
WRAPPED = {"gemma3", "gemma4", "qwen3_5_wrapped", "qwen3_tied"}  # bodies that others have, too
DISTINCT = [family for family in FAMILIES if family not in WRAPPED]


class Text(NamedTuple):
    model: nn.Module
    tokens: mx.array  # [LENGTH]
    logits: mx.array  # [LENGTH, V], each row from a forward of its own


@cache
def text(family: str, bits: int | None = None) -> Text:
    model = build(family, bits, vocab_size=VOCABULARY)
    tokens = mx.random.randint(0, VOCABULARY, (LENGTH,), key=mx.random.key(3))
    prompt_cache = make_prompt_cache(model)
    rows = [model(token[None, None], cache=prompt_cache)[0] for token in tokens]
    logits = mx.concatenate(rows)
    mx.eval(logits)
    return Text(model, tokens, logits)


def agree(family: str, ours: mx.array, plain: mx.array) -> bool:
    if family in ROUNDED and len(plain):
        return bool(mx.allclose(ours, plain, rtol=0, atol=2e-5 * mx.abs(plain).max().item()))
    return mx.array_equal(ours, plain)


def start(model: nn.Module, tokens: mx.array) -> tuple[list[Any], Rollback]:
    prompt_cache = make_prompt_cache(model)
    model(tokens[None], cache=prompt_cache)
    return prompt_cache, Rollback(prompt_cache, model)


def verify(model: nn.Module, rollback: Rollback, tokens: mx.array) -> mx.array:
    with rollback.verifying(tokens):
        return model(tokens[None], cache=rollback.cache)[0]


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


@pytest.mark.parametrize("bits", [None, 4], ids=["float32", "4-bit"])
@pytest.mark.parametrize("family", FAMILIES)
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
@pytest.mark.parametrize("family", DISTINCT)
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


@pytest.mark.parametrize("family", sorted(RECORDED | AGAIN | {"qwen3"}))
def test_one_forward_a_round_where_the_recurrence_is_known(family: str) -> None:
    model, tokens, _ = text(family)
    calls: list[int] = []

    class Counting(type(model)):  # type: ignore[misc]
        def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            calls.append(inputs.shape[1])
            return super().__call__(inputs, *args, **kwargs)

    _, rollback = start(model, tokens[:CONTEXT])
    original, model.__class__ = type(model), Counting
    try:
        verify(model, rollback, tokens[:8])
        rollback.accept(3)
    finally:
        model.__class__ = original
    assert calls == ([8, 3] if family in AGAIN else [8])
    assert bool(rollback.recurrent) == (family in RECORDED | AGAIN)


def test_states_in_an_unforeseen_order_are_found_out() -> None:
    """Two windows of one shape change places: the record fits, its first use proves it wrong."""
    model = build("olmo_hybrid", vocab_size=VOCABULARY)
    mixers = [layer.linear_attn for layer in model.layers if "linear_attn" in layer]

    class Swapping(type(mixers[0])):  # type: ignore[misc]
        def _apply_conv1d(
            self, x: mx.array, conv: nn.Conv1d, state: Any, cache: Any, slot: int, *rest: Any
        ) -> mx.array:
            slot = {0: 1, 1: 0}.get(slot, slot)
            return super()._apply_conv1d(x, conv, cache[slot], cache, slot, *rest)

    for mixer in mixers:
        mixer.__class__ = Swapping
    tokens = text("olmo_hybrid").tokens
    prompt_cache, rollback = start(model, tokens[:CONTEXT])
    verify(model, rollback, tokens[CONTEXT : CONTEXT + 8])
    assert all(m.record.complete for m in rollback.recurrent)
    rollback.accept(3)
    plain_cache, _ = start(model, tokens[: CONTEXT + 3])
    following = tokens[None, CONTEXT + 3 : CONTEXT + 7]
    ours = model(following, cache=prompt_cache)
    assert mx.array_equal(ours, model(following, cache=plain_cache))
    assert rollback.recorder is not None
    assert rollback.recorder.proven is False


def modules(model: nn.Module) -> list[type]:
    return [type(m) for m in model.modules()]


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


@pytest.mark.parametrize("family", sorted(RECORDED))
def test_nothing_is_recorded_in_prefill_and_plain_decoding(family: str) -> None:
    model, tokens, _ = text(family)
    prompt_cache, rollback = start(model, tokens[:CONTEXT])
    before, during = modules(model), []
    layer = model.layers[0]

    class Watching(type(layer)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            during.append(modules(self)[1:])
            return super().__call__(*args, **kwargs)

    original, layer.__class__ = type(layer), Watching
    model(tokens[None, :8], cache=prompt_cache)
    verify(model, rollback, tokens[:1])
    verify(model, rollback, tokens[:2])
    layer.__class__ = original
    assert modules(model) == before
    prefill, single, several = during
    assert prefill == single == modules(layer)[1:]
    assert several != prefill  # the watcher would have seen it


def test_two_models_of_one_class_record_apart() -> None:
    """One generator in its verify forward, the other in a forward inside of it."""
    a, b = text("qwen3_5"), text("qwen3_5", 4)
    _, rollback_a = start(a.model, a.tokens[:CONTEXT])
    _, rollback_b = start(b.model, b.tokens[:CONTEXT])
    rows_a, rows_b = a.tokens[CONTEXT : CONTEXT + 5], b.tokens[CONTEXT : CONTEXT + 7]
    with rollback_a.verifying(rows_a):
        with rollback_b.verifying(rows_b):
            b.model(rows_b[None], cache=rollback_b.cache)
        a.model(rows_a[None], cache=rollback_a.cache)
    rollback_a.accept(2)
    rollback_b.accept(3)
    for (model, tokens, logits), rollback, kept in ((a, rollback_a, 2), (b, rollback_b, 3)):
        done = CONTEXT + kept
        ours = model(tokens[None, done : done + 4], cache=rollback.cache)[0]
        assert mx.array_equal(ours, logits[done : done + 4])


def test_two_rollbacks_of_one_model_take_turns() -> None:
    model, tokens, logits = text("qwen3_next")
    sessions = [start(model, tokens[:CONTEXT])[1] for _ in range(2)]
    junk = (tokens + 5) % VOCABULARY
    for done in range(CONTEXT, CONTEXT + 12, 3):
        fed = mx.concatenate([tokens[done : done + 3], junk[:4]])
        results = [verify(model, rollback, fed) for rollback in sessions]  # both, before any accept
        for rollback, ours in zip(sessions, results, strict=True):
            rollback.accept(3)
            rollback.checkpoint()
            assert mx.array_equal(ours[:3], logits[done : done + 3])


def recorded_arrays(rollback: Rollback) -> list[mx.array]:
    """Arrays with a row per token that a round keeps alive, each once."""
    found: dict[int, mx.array] = {}
    for mark in rollback.recurrent:
        for call in mark.record.calls:
            found |= {id(call.arguments[n]): call.arguments[n] for n in call.per_token}
        found |= {id(a): a for a in mark.record.convolutions}
    return [a for a in found.values() if a is not None]


# Float32 numbers per row, as docs/notes/families.md counts them: convolution input, q, k, v, a, b.
NUMBERS_PER_ROW = {
    "qwen3_5": 2 * (128 + 32 + 32 + 64 + 4 + 4),
    "nemotron_h": 3 * (128 + 64 + 32 + 32 + 4),  # convolution input, x, B, C, dt
    "lfm2": 2 * 64,
}


@pytest.mark.parametrize("family", NUMBERS_PER_ROW)
def test_records_are_linear_in_the_block(family: str) -> None:
    """Per row the inputs of the recurrence, never a copy of its state."""
    model, tokens, _ = text(family)
    size = {}
    for rows in (4, 8, 16):
        _, rollback = start(model, tokens[:CONTEXT])
        verify(model, rollback, tokens[:rows])
        size[rows] = sum(a.nbytes for a in recorded_arrays(rollback))
    assert size[16] - size[8] == 2 * (size[8] - size[4]) == 8 * 4 * NUMBERS_PER_ROW[family]
    if family != "lfm2":  # whose state is a window of its inputs
        state = sum(m.before[1].nbytes for m in rollback.recurrent)
        assert 4 * NUMBERS_PER_ROW[family] < state


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

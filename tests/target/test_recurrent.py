"""What verify forwards record of recurrent layers, and how long it is kept."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from dspine_mlx.target.rollback import Rollback
from tests.support.families import build
from tests.support.rollback import (
    AGAIN,
    CONTEXT,
    RECORDED,
    VOCABULARY,
    modules,
    start,
    text,
    verify,
)


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

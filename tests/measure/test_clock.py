"""The clock of bench: what it counts, with a fake clock and in real calls."""

from typing import Any

import mlx.nn as nn
import mlx_lm
import mlx_lm.models.cache
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.measure.clock import Clock, mlx_lm_speculative
from tests.support.tiny import plain_steps, random_prompt, scripted, tiny_target


class Time:
    """Seconds that pass only when they are told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_speed_counts_from_the_end_of_prefill() -> None:
    """10 s of prefill, then blocks of 4 tokens at 1 s each: 4 tokens per second, from the first."""
    now = Time()
    clock = Clock(now)
    clock.progress(0, 21)
    now.seconds = 10
    clock.progress(20, 21)
    for _ in range(3):
        now.seconds += 1
        clock.progress(21, 21)  # the first token: not prefill's end
        for _ in range(4):
            clock.token()
    assert clock.decoding_speed == 12 / 3
    assert clock.call_speed == 12 / 13
    assert clock.first_token == 11
    assert clock.tokens == 12


def test_a_call_without_tokens_has_no_speed() -> None:
    clock = Clock(Time())
    assert (clock.decoding_speed, clock.call_speed, clock.first_token) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize("drafted", [False, True])
def test_prefill_ends_before_the_first_forward_that_makes_a_token(
    size: int, drafted: bool, model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """By the rows in the target's cache at the last report that counts."""
    prompt = random_prompt(size)
    text = prompt + [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=8)]
    cache = mlx_lm.models.cache.make_prompt_cache(model)
    rows: list[int] = []

    def progress(done: int, total: int) -> None:
        if done < total:
            rows.append(cache[0].offset)

    options: dict[str, Any] = {"max_tokens": 8, "prompt_cache": cache}
    stream: Any = mlx_lm.stream_generate
    if drafted:
        stream = dspine_mlx.stream_generate
        options |= {"drafter": scripted(model, text, "right"), "verify_length": 3}
    tokens = [
        r.token
        for r in stream(model, tokenizer, prompt, prompt_progress_callback=progress, **options)
    ]
    assert tokens == text[size:]
    assert rows[-1] == size - 1


@pytest.mark.parametrize("size", [1, 2, 9])
def test_mlx_lms_draft_models_are_prefilled_here(size: int, tokenizer: TokenizerWrapper) -> None:
    models, prompt = (tiny_target(), tiny_target()), random_prompt(size)
    plain = [token for token, _ in plain_steps(models[0], tokenizer, prompt, max_tokens=8)]
    reports: list[tuple[int, int]] = []
    responses = mlx_lm_speculative(
        models, tokenizer, prompt, lambda *report: reports.append(report), max_tokens=8
    )
    assert [r.token for r in responses] == plain
    assert reports == [(0, size), (size - 1, size)]

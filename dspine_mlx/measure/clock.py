"""Timing from the end of prefill: decoding speed is the tokens per second since then.

mlx-lm counts from the first token. But a drafted text's first token comes with its whole first
block, and plain decoding's first forward would not be counted.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

LEAST_TOKENS = 32  # of a text whose speed is compared: with fewer, one block decides the ratio
PREFILL_STEP = 512  # prompt tokens per forward, as mlx-lm's speculative decoding has it


@dataclass
class Clock:
    """Times one call. Pass `progress` as its prompt_progress_callback.

    Prefill ends when all of the prompt but its last token is in the caches: at the last report
    short of the whole prompt.
    """

    now: Callable[[], float] = time.perf_counter
    started: float = field(init=False)
    prefilled: float = field(init=False)
    first: float | None = field(default=None, init=False)  # the first token
    ended: float = field(init=False)  # the newest token
    tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.started = self.prefilled = self.ended = self.now()

    def progress(self, done: int, total: int) -> None:
        if done < total:
            self.prefilled = self.now()

    def token(self) -> None:
        self.ended, self.tokens = self.now(), self.tokens + 1
        if self.first is None:
            self.first = self.ended

    @property
    def decoding_speed(self) -> float:
        """Tokens per second since prefill ended."""
        return speed(self.tokens, self.ended - self.prefilled)

    @property
    def call_speed(self) -> float:
        """Tokens per second of the whole call, prefill included."""
        return speed(self.tokens, self.ended - self.started)

    @property
    def first_token(self) -> float:
        """Seconds from the call to its first token."""
        return (self.ended if self.first is None else self.first) - self.started


def speed(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def mlx_lm_speculative(
    models: tuple[nn.Module, nn.Module],
    tokenizer: Any,
    prompt: list[int],
    progress: Callable[[int, int], None],
    **options: Any,
) -> Iterator[Any]:
    """Run mlx_lm.stream_generate with a draft model. It reports no progress, so all of the prompt
    but its last token is fed here."""
    caches = [make_prompt_cache(model) for model in models]
    progress(0, len(prompt))
    with mx.stream(generation_stream):
        for model, cache in zip(models, caches, strict=True):
            for start in range(0, len(prompt) - 1, PREFILL_STEP):
                rows = prompt[start : min(start + PREFILL_STEP, len(prompt) - 1)]
                model(mx.array([rows]), cache=cache)
                mx.eval([c.state for c in cache])
    progress(len(prompt) - 1, len(prompt))
    target, draft_model = models
    yield from mlx_lm.stream_generate(
        target,
        tokenizer,
        prompt[-1:],
        draft_model=draft_model,
        prompt_cache=caches[0] + caches[1],
        **options,
    )

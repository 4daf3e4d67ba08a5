"""Net speed against mlx-lm's own decoding, measured in one run on the user's machine."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.sample_utils import Sampler as SamplerFunction
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.dflash import DFlash
from dspine_mlx.errors import InputError
from dspine_mlx.generate import stream_generate
from dspine_mlx.load import resolve
from dspine_mlx.response import GenerationResponse

PLAIN = "plain"


@dataclass(frozen=True)
class Pair:
    """What every way of decoding shares."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    drafter: DFlash
    sampler: SamplerFunction


Run = Callable[[list[int], int], Iterator[Any]]  # prompt, max_tokens -> responses


def make_way(name: str, pair: Pair) -> Run:
    """plain, auto, fixed:N or mlx-lm-draft:MODEL."""
    if name == PLAIN:
        return lambda prompt, n: mlx_lm.stream_generate(
            pair.model, pair.tokenizer, prompt, max_tokens=n, sampler=pair.sampler
        )
    if name.startswith("mlx-lm-draft:"):
        draft_model, _ = mlx_lm.load(str(resolve(name.removeprefix("mlx-lm-draft:"))))
        return lambda prompt, n: mlx_lm.stream_generate(
            pair.model,
            pair.tokenizer,
            prompt,
            max_tokens=n,
            sampler=pair.sampler,
            draft_model=draft_model,
        )
    kind, _, number = name.partition(":")
    if name != "auto" and (kind != "fixed" or not number.isdecimal()):
        raise InputError(
            f"can't compare {name!r}; ways are plain, auto, fixed:N and mlx-lm-draft:MODEL"
        )
    length: int | str = "auto" if name == "auto" else int(number)
    return lambda prompt, n: stream_generate(
        pair.model,
        pair.tokenizer,
        prompt,
        pair.drafter,
        max_tokens=n,
        sampler=pair.sampler,
        verify_length=length,
    )


@dataclass
class Measurement:
    """One text: seconds to the first token, tokens per second after it, and what came out."""

    first_token: float
    tokens_per_second: float
    tokens: list[int]
    acceptance_length: float
    peak_memory: float  # GB


def measure(run: Run, prompt: list[int], max_tokens: int, seed: int) -> Measurement:
    mx.random.seed(seed)
    mx.reset_peak_memory()
    start = time.perf_counter()
    first = 0.0
    tokens: list[int] = []
    drafted = 0
    response: Any = None
    for response in run(prompt, max_tokens):
        if not tokens:
            first = time.perf_counter()
        tokens.append(response.token)
        drafted += response.from_draft
    seconds = time.perf_counter() - first
    rounds = len(tokens) - drafted  # every round gives one token that is not a draft
    acceptance = len(tokens) / max(rounds, 1)
    if isinstance(response, GenerationResponse) and response.rounds:
        acceptance = response.acceptance_length
    speed = (len(tokens) - 1) / seconds if len(tokens) > 1 else 0.0
    return Measurement(first - start, speed, tokens, acceptance, mx.get_peak_memory() / 1e9)


@dataclass
class Comparison:
    """Measurements by way, prompt and repeat; all ways of a prompt are measured in turn."""

    ways: list[str]
    runs: dict[str, list[list[Measurement]]] = field(default_factory=dict)

    def summary(self, way: str) -> dict[str, Any]:
        """Medians of a way, its net speed-up over plain decoding of the same prompt in the same
        repeat, and how many texts are those of plain decoding."""
        flat = [m for runs in self.runs[way] for m in runs]
        plain = [m for runs in self.runs[PLAIN] for m in runs]
        pairs = list(zip(flat, plain, strict=False))
        ratios = sorted(
            m.tokens_per_second / p.tokens_per_second for m, p in pairs if p.tokens_per_second
        )
        return {
            "way": way,
            "tokens_per_second": median(m.tokens_per_second for m in flat),
            "speedup": median(ratios) if ratios else None,
            "speedup_range": [ratios[0], ratios[-1]] if ratios else None,
            "acceptance_length": median(m.acceptance_length for m in flat),
            "first_token_seconds": median(m.first_token for m in flat),
            "peak_memory_gb": max(m.peak_memory for m in flat),
            "identical": sum(m.tokens == p.tokens for m, p in pairs),
            "texts": len(pairs),
        }

    def forks(self, way: str) -> Iterator[tuple[int, int]]:
        """(prompt, position) of every first repeat that leaves plain decoding's text."""
        for i, (runs, plain) in enumerate(zip(self.runs[way], self.runs[PLAIN], strict=False)):
            if runs[0].tokens != plain[0].tokens:
                yield i, fork(runs[0].tokens, plain[0].tokens)


def fork(a: list[int], b: list[int]) -> int:
    """The first position where two texts differ."""
    shared = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(shared) if x != y), min(len(a), len(b)))


def fork_margin(
    pair: Pair, prompt: list[int], plain: list[int], position: int, other: int
) -> float:
    """How far plain decoding preferred its token over the other one at a fork, in nats."""
    logits = pair.model(mx.array([prompt + plain[:position]]))[0, -1].astype(mx.float32)
    return (logits[plain[position]] - logits[other]).item()


def compare(
    pair: Pair,
    ways: list[str],
    prompts: list[list[int]],
    *,
    max_tokens: int,
    repeat: int,
) -> Iterator[Comparison]:
    """Measure all ways, interleaved (A B A B ...) per prompt; yields the comparison so far after
    each prompt, so that an interrupted run keeps what it has."""
    ways = [PLAIN, *[way for way in ways if way != PLAIN]]
    runs = {way: make_way(way, pair) for way in ways}
    for run in runs.values():  # warm-up
        for _ in run(prompts[0], 8):
            pass
    comparison = Comparison(ways, {way: [] for way in ways})
    for prompt in prompts:
        row: dict[str, list[Measurement]] = {way: [] for way in ways}
        for seed in range(repeat):
            for way in ways:
                row[way].append(measure(runs[way], prompt, max_tokens, seed))
        for way in ways:
            comparison.runs[way].append(row[way])
        yield comparison

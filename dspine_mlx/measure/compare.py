"""Net speed against mlx-lm's own decoding, measured in one run on the user's machine."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.generate import stream_generate
from dspine_mlx.group.in_step import plain_in_step
from dspine_mlx.group.no_drafter import NoDrafter
from dspine_mlx.group.target import LeadTarget
from dspine_mlx.load import resolve
from dspine_mlx.measure.clock import LEAST_TOKENS, Clock, mlx_lm_speculative
from dspine_mlx.measure.modes import AUTO, MLX_LM, PLAIN, verify_length
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.statistics import GenerationResponse
from dspine_mlx.target.open import open_target


@dataclass(frozen=True)
class Models:
    """The models that all modes share. Without a drafter, only mlx-lm's own modes run."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    drafter: Drafter | None
    sampler: Sampler


Progress = Callable[[int, int], None]  # prompt tokens done, of how many
Run = Callable[[list[int], int, Progress], Iterator[Any]]  # prompt, max_tokens -> responses


def untimed(done: int, total: int) -> None:
    """Ignore progress: for runs that are not timed."""


def make_run(mode: str, pair: Models) -> Run:
    """Make the run of a mode: plain, auto, fixed:N or mlx-lm-draft:MODEL."""
    length = verify_length(mode)
    lead = pair.drafter.verifier if pair.drafter is not None else None
    if mode == PLAIN and isinstance(lead, LeadTarget):  # mlx-lm's own, on all machines
        return lambda prompt, n, progress: plain_in_step(
            lead, pair.tokenizer, prompt, pair.sampler, progress, max_tokens=n
        )
    if mode == PLAIN:
        return lambda prompt, n, progress: mlx_lm.stream_generate(
            pair.model,
            pair.tokenizer,
            prompt,
            max_tokens=n,
            sampler=pair.sampler,
            prompt_progress_callback=progress,
        )
    if length is None:
        models = pair.model, load_draft_model(mode.removeprefix(MLX_LM), pair)
        return lambda prompt, n, progress: mlx_lm_speculative(
            models, pair.tokenizer, prompt, progress, max_tokens=n, sampler=pair.sampler
        )
    if pair.drafter is None:
        raise InputError(f"{mode} needs a drafter; give --draft-model")
    return lambda prompt, n, progress: stream_generate(
        pair.model,
        pair.tokenizer,
        prompt,
        pair.drafter,
        max_tokens=n,
        sampler=pair.sampler,
        verify_length=length,
        prompt_progress_callback=progress,
    )


def load_draft_model(path: str, pair: Models) -> nn.Module:
    """Load a whole model for mlx-lm's own speculative decoding to draft with."""
    model, tokenizer = open_target(resolve(path), path)
    if tokenizer.vocab_size != pair.tokenizer.vocab_size:
        raise InputError(
            f"{path} has a vocabulary of {tokenizer.vocab_size} tokens, the target's has "
            f"{pair.tokenizer.vocab_size}; mlx-lm needs a draft model with the target's tokenizer"
        )
    return model


@dataclass
class Measurement:
    """One text's speeds and tokens."""

    first_token: float  # seconds from the call to the first token
    tokens_per_second: float  # since prefill ended
    call_tokens_per_second: float  # of the whole call, prefill included
    tokens: list[int]
    acceptance_length: float
    peak_memory: float  # GB
    verify_lengths: Counter[int] = field(default_factory=Counter)

    @property
    def long_enough(self) -> bool:
        """Whether the text is long enough for a ratio of speeds."""
        return len(self.tokens) >= LEAST_TOKENS and self.tokens_per_second > 0


def measure(run: Run, prompt: list[int], max_tokens: int, seed: int) -> Measurement:
    mx.random.seed(seed)
    mx.reset_peak_memory()
    tokens: list[int] = []
    drafted = 0
    response: Any = None
    clock = Clock()
    for response in run(prompt, max_tokens, clock.progress):
        clock.token()
        tokens.append(response.token)
        drafted += response.from_draft
    # Every round ends with a token that is not drafted, unless max_tokens cuts it.
    rounds = len(tokens) - drafted + response.from_draft
    acceptance, lengths = len(tokens) / rounds, Counter[int]()
    if isinstance(response, GenerationResponse) and response.rounds:
        acceptance, lengths = response.acceptance_length, response.verify_lengths
    memory = mx.get_peak_memory() / 1e9
    speeds = clock.first_token, clock.decoding_speed, clock.call_speed
    return Measurement(*speeds, tokens, acceptance, memory, lengths)


def out_of_memory(error: Exception) -> bool:
    """Recognise MLX's "[malloc] Unable to allocate", "[metal::malloc] Attempting to allocate ..."
    or "... Resource limit", and "[METAL] Command buffer execution failed: Insufficient Memory"."""
    if isinstance(error, RuntimeError):
        return re.search(r"malloc\]|Insufficient Memory", str(error)) is not None
    return isinstance(error, MemoryError)


@dataclass
class Comparison:
    """Measurements by mode, prompt and repeat; a prompt's modes are measured in turn."""

    modes: list[str]
    runs: dict[str, list[list[Measurement]]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)  # mode -> reason

    @contextmanager
    def surviving(self, mode: str, *refusals: type[Exception]) -> Iterator[None]:
        """Drop a mode that runs out of memory or raises one of the refusals. Errors in plain
        decoding propagate: without it there is nothing to compare."""
        try:
            yield
        except (ValueError, MemoryError, RuntimeError) as error:
            refused = isinstance(error, refusals)
            if mode == PLAIN or not (refused or out_of_memory(error)):
                raise
            reason = "" if refused else "out of memory: "
            self.dropped[mode] = reason + " ".join(str(error).split())
            self.modes.remove(mode)
            self.runs.pop(mode, None)
        if mode in self.dropped:
            mx.clear_cache()

    def matched(self, mode: str, other: str) -> list[tuple[Measurement, Measurement]]:
        """Measurements of two modes, matched by prompt and repeat."""
        flat = ([m for runs in self.runs[name] for m in runs] for name in (mode, other))
        return list(zip(*flat, strict=False))

    def ratios(self, mode: str, other: str) -> list[float]:
        """Speed ratios of two modes, ascending, over texts that are long enough to compare."""
        matched = self.matched(mode, other)
        return sorted(
            a.tokens_per_second / b.tokens_per_second
            for a, b in matched
            if a.long_enough and b.long_enough
        )

    def summary(self, mode: str) -> dict[str, Any]:
        """Summarise a mode: medians, net speed-up over plain decoding, how many times as fast
        `auto` is, and how many texts equal plain decoding's."""
        pairs, ratios = self.matched(mode, PLAIN), self.ratios(mode, PLAIN)
        flat = [m for m, _ in pairs]
        auto = self.ratios(AUTO, mode) if AUTO in self.runs else []
        return {
            "way": mode,
            "tokens_per_second": median(m.tokens_per_second for m in flat),
            "call_tokens_per_second": median(m.call_tokens_per_second for m in flat),
            "speedup": median(ratios) if ratios else None,
            "speedup_range": [ratios[0], ratios[-1]] if ratios else None,
            "auto_speedup": median(auto) if auto else None,
            "acceptance_length": median(m.acceptance_length for m in flat),
            "verify_lengths": dict(sorted(self.verify_lengths(mode).items())),
            "first_token_seconds": median(m.first_token for m in flat),
            "peak_memory_gb": max(m.peak_memory for m in flat),
            "identical": sum(m.tokens == p.tokens for m, p in pairs),
            "texts": len(pairs),
            "texts_in_ratios": len(ratios),
        }

    def verify_lengths(self, mode: str) -> Counter[int]:
        """Count the rounds by the number of drafted tokens they offered."""
        return sum((m.verify_lengths for runs in self.runs[mode] for m in runs), Counter())

    def divergences(self, mode: str) -> Iterator[tuple[int, int]]:
        """(prompt, position) where a first repeat diverges from plain decoding's text."""
        for i, (runs, plain) in enumerate(zip(self.runs[mode], self.runs[PLAIN], strict=False)):
            if runs[0].tokens != plain[0].tokens:
                yield i, divergence(runs[0].tokens, plain[0].tokens)


def divergence(a: list[int], b: list[int]) -> int:
    """The first position where two texts differ."""
    shared = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(shared) if x != y), min(len(a), len(b)))


def divergence_margin(
    pair: Models, prompt: list[int], plain: list[int], n: int, other: int
) -> float:
    """Measure how far plain decoding preferred its token n over the other one, in nats."""
    before = [*prompt, *plain[:n]]
    if pair.drafter is not None and isinstance(pair.drafter.verifier, LeadTarget):
        none = NoDrafter(pair.drafter.verifier)
        with closing(
            stream_generate(pair.model, pair.tokenizer, before, none, max_tokens=1, verify_length=0)
        ) as responses:
            logprobs = next(responses).logprobs
    else:
        _, logprobs = next(generate_step(mx.array(before), pair.model, max_tokens=1))
    return (logprobs[plain[n]] - logprobs[other]).item()


def summaries(comparison: Comparison, greedy: bool) -> list[dict[str, Any]]:
    """Every mode's summary, with its divergences: prompt and token counted from 1, the margin not
    yet known. Sampled texts differ from run to run, and are not compared."""
    rows = []
    for mode in comparison.modes:
        places = comparison.divergences(mode) if greedy else ()
        divergences = [{"prompt": i + 1, "token": n + 1, "margin": None} for i, n in places]
        row = comparison.summary(mode) | {"forks": divergences}
        rows.append(row if greedy else row | {"identical": None})
    return rows


def add_margins(
    rows: list[dict[str, Any]], comparison: Comparison, pair: Models, prompts: list[list[int]]
) -> None:
    """Fill in how far the target preferred its own token at each divergence, in nats. A text that
    only ends earlier than the other has no margin."""
    for row in rows:
        for place in row["forks"]:
            index, n = place["prompt"] - 1, place["token"] - 1
            plain, other = (comparison.runs[w][index][0].tokens for w in (PLAIN, row["way"]))
            if n < min(len(plain), len(other)):
                place["margin"] = divergence_margin(pair, prompts[index], plain, n, other[n])


def compare(
    pair: Models, modes: list[str], prompts: list[list[int]], *, max_tokens: int, repeat: int
) -> Iterator[Comparison]:
    """Measure all modes, interleaved (A B A B ...) per prompt. Yields the comparison so far after
    each prompt, so an interrupted run keeps its results."""
    comparison = Comparison(list(dict.fromkeys([PLAIN, *modes])))
    runs: dict[str, Run] = {}
    for mode in list(comparison.modes):
        with comparison.surviving(mode):
            runs[mode] = make_run(mode, pair)
    for mode in list(comparison.modes):
        comparison.runs[mode] = []
        with comparison.surviving(mode, ValueError):  # a target that can't be drafted for
            for _ in runs[mode](prompts[0], 8, untimed):  # warm-up
                pass
    for prompt in prompts:
        row: dict[str, list[Measurement]] = {mode: [] for mode in comparison.modes}
        for seed in range(repeat):
            for mode in list(comparison.modes):
                with comparison.surviving(mode):
                    row[mode].append(measure(runs[mode], prompt, max_tokens, seed))
        for mode in comparison.modes:
            comparison.runs[mode].append(row[mode])
        yield comparison

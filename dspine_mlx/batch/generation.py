"""The texts of several prompts, as they were asked for: decoded together, or one by one."""

import copy
import math
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchStats, generation_stream, wired_limit
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import LogitsProcessor
from mlx_lm.sample_utils import Sampler as SamplerFunction
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.arguments import (
    check_cache_sizes,
    check_flag,
    check_function,
    check_max_tokens,
    check_model,
    check_processors,
    check_seed,
    check_stream,
    check_tokenizer,
    check_top_k,
    check_whole,
)
from dspine_mlx.batch.decode import Decoding, Request, Work
from dspine_mlx.batch.policies import batch_policy
from dspine_mlx.batch.target_rows import refusal
from dspine_mlx.drafters import method_of
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.generate import (
    drafter_of,
    make_caches,
    stream_generate,
    to_responses,
    to_token_ids,
)
from dspine_mlx.round.decode import Prefill
from dspine_mlx.round.lookup import Lookup
from dspine_mlx.round.policy import check_verify_length
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.statistics import GenerationResponse, Speed, Statistics
from dspine_mlx.round.text import DraftFilter, Text, Token
from dspine_mlx.round.user_code import user_processors, user_sampler

Prompts = list[str] | list[list[int]] | list[mx.array]
Response = tuple[int, GenerationResponse]  # a prompt's index, and its next token
T = TypeVar("T")


def check_batch(model: Any, tokenizer: Any, prompts: Any) -> None:
    check_model(model)
    if not isinstance(tokenizer, TokenizerWrapper):
        check_tokenizer(tokenizer)
    if not isinstance(prompts, list | tuple):
        raise InputError(f"prompts is a {type(prompts).__name__}; it must be a list of prompts")


@dataclass
class Entry:
    """What is asked for one prompt, and what comes of it."""

    prompt: mx.array
    max_tokens: int
    sampler: SamplerFunction
    processors: list[LogitsProcessor]
    seed: int | None
    given: list[Any] | None  # prompt cache, which is not changed
    draft_filter: DraftFilter | None
    speed: Speed = field(default_factory=lambda: Speed(None))
    statistics: Statistics = field(default_factory=Statistics)
    caches: list[Any] = field(default_factory=list)  # at the end, if they are returned

    def __post_init__(self) -> None:
        check_max_tokens(self.max_tokens)
        check_function("sampler", self.sampler)
        check_function("draft_filter", self.draft_filter)
        self.sampler = user_sampler(self.sampler)
        self.processors = user_processors(self.processors)
        if self.seed is not None:
            check_seed(self.seed)
            if isinstance(self.sampler, Sampler):
                self.sampler = replace(self.sampler, seeded=True)

    @property
    def budget(self) -> float:
        return float("inf") if self.max_tokens < 0 else self.max_tokens


@dataclass
class Generation:
    """The texts of several prompts, decoded together where the target can."""

    drafter: Drafter
    tokenizer: TokenizerWrapper
    entries: list[Entry]
    verify_length: int | str
    most: int  # texts at once
    step: int  # of prefill
    max_kv_size: int | None
    stream: mx.Stream
    lookup: bool = True
    return_caches: bool = False
    work: Work = field(default_factory=Work)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        prompts: Prompts,
        drafter: Drafter,
        *,
        prompt_caches: list[list[Any]] | None = None,
        max_tokens: int | list[int] = 128,
        sampler: SamplerFunction | list[SamplerFunction] | None = None,
        logits_processors: list[Any] | None = None,
        seeds: list[int] | None = None,
        draft_filter: DraftFilter | list[DraftFilter] | None = None,
        verify_length: int | str = "auto",
        completion_batch_size: int = 32,
        prefill_step_size: int = 2048,
        max_kv_size: int | None = None,
        lookup: bool = True,
        stream: mx.Stream = generation_stream,
    ) -> "Generation":
        """See `batch_generate`."""
        check_batch(model, tokenizer, prompts)
        bound = drafter_of(drafter, None, model)
        if bound is None:
            raise InputError("the drafter is None; give one from load or load_drafter")
        check_verify_length(verify_length)
        if not isinstance(verify_length, int | str):
            raise InputError("verify_length is a policy for one text; give an int or 'auto'")
        check_whole("completion_batch_size", completion_batch_size, 1)
        check_cache_sizes(prefill_step_size, max_kv_size)
        if not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        count, vocabulary = len(prompts), bound.target.vocab_size
        columns = (
            [to_token_ids(tokenizer, prompt, vocabulary) for prompt in prompts],
            each("max_tokens", max_tokens, count),
            each("sampler", sampler, count),
            processors_of(logits_processors, count),
            each("seeds", seeds, count),
            each("prompt_caches", prompt_caches, count),
            each("draft_filter", draft_filter, count),
        )
        entries = [Entry(*row) for row in zip(*columns, strict=True)]
        for entry in entries:
            if isinstance(entry.sampler, Sampler):
                check_top_k(entry.sampler.top_k, vocabulary)
        limits = (verify_length, completion_batch_size, prefill_step_size, max_kv_size)
        check_flag("lookup", lookup)
        check_stream(stream)
        return cls(bound, tokenizer, entries, *limits, stream, lookup)

    def responses(self) -> Generator[Response, None, None]:
        alone = self.refusal() is not None
        return self.guarded(self.one_by_one() if alone else self.together())

    def tokens(self) -> Generator[tuple[int, Token], None, None]:
        """A prompt's index and its next token, which nobody reads as text yet."""
        if self.refusal() is None:
            return self.guarded(self.indexed())
        pairs = self.guarded(self.one_by_one())
        return ((i, (r.token, r.logprobs, r.from_draft)) for i, r in pairs)

    def guarded(self, answers: Generator[T, None, None]) -> Generator[T, None, None]:
        """The answers, with the models' memory wired while they are made."""
        model = self.drafter.target.model
        with wired_limit([model, self.drafter.network], [self.stream]), closing(answers):
            yield from answers

    def refusal(self) -> str | None:
        return why_alone(self.drafter, self.max_kv_size)

    def indexed(self) -> Generator[tuple[int, Token], None, None]:
        policy = batch_policy(self.verify_length, self.drafter)
        decoding = Decoding(self.drafter, policy, self.most, self.stream, self.work)
        requests = [self.request(entry) for entry in self.entries]
        places = {request: index for index, request in enumerate(requests)}
        with closing(decoding.run(requests)) as run:
            for request, token in run:
                index = places[request]
                self.entries[index].caches = request.caches or []
                yield index, token

    def together(self) -> Generator[Response, None, None]:
        tokens = [deque[Token]() for _ in self.entries]
        streams = [
            to_responses(popped(queue), self.tokenizer, entry.prompt.size, *own)
            for queue, entry in zip(tokens, self.entries, strict=True)
            for own in [(entry.max_tokens, entry.statistics, entry.speed)]
        ]
        with closing(self.indexed()) as run:
            for index, token in run:
                tokens[index].append(token)
                yield index, next(streams[index])

    def request(self, entry: Entry) -> Request:
        prefill = Prefill(self.step, {}, entry.speed.progress)
        make_text = partial(self.make_text, entry)
        budget, seed = entry.budget, entry.seed
        return Request(entry.prompt, budget, make_text, prefill, seed, self.return_caches)

    def make_text(self, entry: Entry) -> Text:
        stops = frozenset(self.tokenizer.eos_token_ids)
        return Text(
            self.drafter,
            self.own_caches(entry),
            entry.sampler,
            entry.processors,
            stops=stops,
            statistics=entry.statistics,
            draft_filter=entry.draft_filter,
            lookup=Lookup(stops) if self.lookup else None,
        )

    def own_caches(self, entry: Entry) -> list[Any]:
        """Caches to prefill in: new ones, or a copy of what was given."""
        given, model = copy.deepcopy(entry.given), self.drafter.target.model
        return make_caches(model, self.drafter, given, self.max_kv_size)

    def one_by_one(self) -> Generator[Response, None, None]:
        model, started = self.drafter.target.model, time.perf_counter()
        for index, entry in enumerate(self.entries):
            with seeded(entry.seed):
                caches = self.own_caches(entry)
                for response in stream_generate(
                    model,
                    self.tokenizer,
                    entry.prompt,
                    self.drafter,
                    max_tokens=entry.max_tokens,
                    sampler=entry.sampler,
                    logits_processors=entry.processors,
                    prompt_cache=caches,
                    verify_length=self.verify_length,
                    draft_filter=entry.draft_filter,
                    lookup=self.lookup,
                    max_kv_size=self.max_kv_size,
                    prefill_step_size=self.step,
                    prompt_progress_callback=entry.speed.progress,
                    stream=self.stream,
                ):
                    entry.statistics = response.statistics
                    yield index, response
            entry.caches = caches if self.return_caches else []
            done = entry.statistics
            self.work.steps += done.rounds + done.plain
        self.work.seconds = time.perf_counter() - started - self.prompt_seconds

    @property
    def prompt_seconds(self) -> float:
        return sum(entry.speed.prefilled - entry.speed.started for entry in self.entries)

    def stats(self, tokens: int, seconds: float) -> BatchStats:
        """mlx-lm's, of texts of so many tokens in all."""
        return BatchStats(
            prompt_tokens=sum(entry.prompt.size for entry in self.entries),
            prompt_time=self.prompt_seconds,
            generation_tokens=tokens,
            generation_steps=self.work.steps,
            decode_time=self.work.seconds,
            wall_time=seconds,
            peak_memory=mx.get_peak_memory() / 1e9,
        )


def why_alone(drafter: Drafter, max_kv_size: int | None = None) -> str | None:
    """Why a pair's texts are decoded one after another; None if they are not."""
    model, network = drafter.target.model, drafter.network
    if drafter.config.num_proposals and not method_of(network).several_texts:
        return f"{type(network).__name__} drafters propose for one text at a time"
    if math.isfinite(drafter.target.verify_kernels.width_limit):
        return "kernels in exact mode were checked for one text at a time"
    return refusal(model, make_prompt_cache(model, max_kv_size))


def popped(tokens: deque[Token]) -> Iterator[Token]:
    """Tokens as they are asked for: each is there by then."""
    while True:
        yield tokens.popleft()


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """With `mx.random`'s state as `mx.random.seed` leaves it; the present one comes back."""
    before = mx.array(mx.random.state[0])
    if seed is not None:
        mx.random.seed(seed)
    try:
        yield
    finally:
        if seed is not None:
            mx.random.state[0][:] = before


def each(name: str, given: Any, count: int) -> list[Any]:
    """One per prompt."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise InputError(f"{name} has {len(given)} entries for {count} prompts; give one for each")
    return given


def processors_of(given: list[Any] | None, count: int) -> list[list[LogitsProcessor]]:
    """A list per prompt, of one list for all or a list of lists."""
    if isinstance(given, list) and given and all(isinstance(own, list) for own in given):
        lists = each("logits_processors", given, count)
    else:
        lists = [given for _ in range(count)]
    for own in lists:
        check_processors(own)
    return [list(own or []) for own in lists]

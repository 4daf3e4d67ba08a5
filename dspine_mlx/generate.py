"""The round: propose, verify, accept, roll back, yield."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, generation_stream, maybe_quantize_kv_cache, wired_limit
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import LogitsProcessor, greedy_sampler
from mlx_lm.sample_utils import Sampler as SamplerFunction
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.dflash import DFlash
from dspine_mlx.errors import InputError
from dspine_mlx.response import GenerationResponse, Statistics
from dspine_mlx.rollback import Rollback
from dspine_mlx.sampling import Sampler
from dspine_mlx.schedule import Policy, policy_for
from dspine_mlx.selection import NO_DRAFT, Draft, select
from dspine_mlx.verification import accept

Token = tuple[int, mx.array, bool]  # id, logprobs [V], whether the drafter proposed it
Checkpoints = Mapping[int, Callable[[list[Any]], None]]  # by the number of prompt tokens
BACKLOG = 64  # plain decoding: positions whose features wait to enter the drafter's cache together


@dataclass
class KVQuantization:
    """mlx-lm's kv_bits, kv_group_size and quantized_kv_start."""

    bits: int | None = None
    group_size: int = 64
    start: int = 5000

    def check(self, cache: list[Any]) -> None:
        if self.bits is not None and any(isinstance(c, RotatingKVCache) for c in cache):
            raise InputError(
                f"kv_bits is {self.bits}, but mlx-lm can't quantise rotating caches, which this "
                "target's sliding windows or max_kv_size need; leave kv_bits out"
            )

    def width_limit(self, position: int) -> float:
        """Rows one forward at this position may feed, so that quantising starts where plain
        decoding starts it."""
        if self.bits is None or position >= self.start:
            return float("inf")
        return self.start - position


@dataclass
class Decoder:
    """One text in the making: its caches, and the rule that picks tokens.

    While tokens are yielded the caches may be ahead of the text: `rows` of the rows fed since the
    last checkpoint belong to it, and `pending` is a yielded token that has no row yet. From these
    `settle` brings every cache to the yielded text, whenever the generator ends.
    """

    drafter: DFlash
    prompt_cache: list[Any]  # the target's caches, then the drafter's
    sampler: SamplerFunction = greedy_sampler
    processors: list[LogitsProcessor] = field(default_factory=list)
    kv: KVQuantization = field(default_factory=KVQuantization)
    stop: frozenset[int] = frozenset()
    statistics: Statistics = field(default_factory=Statistics)

    def __post_init__(self) -> None:
        layers, self.slots = len(self.drafter.layers), self.drafter.config.num_proposals
        self.cache, self.draft_cache = self.prompt_cache[:-layers], self.prompt_cache[-layers:]
        self.kv.check(self.cache)
        self.rollback = Rollback(self.cache, self.drafter.target.model)
        self.history = mx.array([], mx.uint32)  # tokens fed so far, kept for the processors only
        self.backlog: list[mx.array] = []  # features of the text that the drafter has not seen
        self.pending: mx.array | None = None
        self.begin()

    def begin(self) -> None:
        """A checkpoint: all rows in the caches belong to the text."""
        self.rollback.checkpoint()
        self.features = self.drafter.no_features()  # of the rows fed since
        self.rows = self.draft_rows = 0

    def prefill(self, prompt: mx.array, step: int, checkpoints: Checkpoints) -> Iterator[int]:
        """Feed all but the prompt's last token, which stays pending; yields each chunk's size."""
        last = prompt.size - 1
        borders = sorted({0, *range(step, last, step), *checkpoints, last})
        for start, end in pairwise(borders):
            chunk = prompt[start:end]
            self.feed(chunk)
            self.drafter.extend(self.features, self.draft_cache)
            self.quantize()
            self.begin()
            mx.eval([c.state for c in self.prompt_cache])
            mx.clear_cache()
            if end in checkpoints:
                checkpoints[end](self.prompt_cache)
            yield chunk.size
        self.history = prompt[:-1]
        self.pending = prompt[-1:]

    def feed(self, tokens: mx.array) -> mx.array:
        """The target's logits [n, V] after each of the tokens [n]."""
        self.fed = tokens
        taps = self.drafter.config.target_layer_ids
        logits, self.features = self.drafter.target.forward(tokens, self.cache, taps)
        return logits

    def logprobs(self, logits: mx.array) -> mx.array:
        """Logprobs [n, V] under the user's processors, each row with the tokens up to it."""
        if self.processors:
            context, rows = mx.concatenate([self.history, self.fed]), []
            for i in range(len(logits)):
                seen, row = context[: self.history.size + i + 1], logits[i : i + 1]
                for processor in self.processors:
                    row = processor(seen, row)
                rows.append(row)
            logits = mx.concatenate(rows)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def tokens(self, policy: Policy, budget: float) -> Iterator[Token]:
        """Rounds while drafting pays, plain decoding while it does not, until `budget` tokens or a
        stop token."""
        while budget > 0:
            for token in (self.plain if policy.parked else self.speculate)(policy, budget):
                budget = 0 if token[0] in self.stop else budget - 1
                yield token

    def speculate(self, policy: Policy, budget: float) -> Iterator[Token]:
        """Rounds of drafted tokens, until the policy parks."""
        block: list[Token] = []  # verified in the last round, not yet yielded
        anchor = self.pending
        while True:
            budget -= len(block)
            ended = budget < 1 or policy.parked or (bool(block) and block[-1][0] in self.stop)
            position = self.rollback.position + self.features.shape[1]
            limit = int(min(self.slots, budget - 1, self.kv.width_limit(position) - 1))
            started, draft = time.perf_counter(), NO_DRAFT
            if not ended and limit > 0:
                draft = self.propose(anchor)
            drafting = time.perf_counter() - started
            yield from self.emit(block)
            if ended:
                return
            self.commit()
            if draft is NO_DRAFT:
                block, anchor, _ = self.verify(anchor, draft, 0)
                continue
            length = policy.length(draft, limit, self.rollback.position, drafting)
            block, anchor, n = self.verify(anchor, draft, length)
            policy.learn(n)
            self.statistics.record(length, sum(drafted for *_, drafted in block))

    def propose(self, anchor: mx.array) -> Draft:
        """Start drafting after the anchor; it runs while tokens are yielded."""
        law = self.sampler if isinstance(self.sampler, Sampler) else None
        features = mx.concatenate([*self.backlog, self.features], axis=1)
        proposal = self.drafter.propose(anchor, features, self.draft_cache)
        self.backlog, self.draft_rows = [], self.features.shape[1]
        draft = select(proposal, law, self.drafter.kernels)
        mx.async_eval(draft.tokens, draft.evidence)
        return draft

    def verify(
        self, anchor: mx.array, draft: Draft, length: int
    ) -> tuple[list[Token], mx.array, int]:
        """One target forward over the anchor and `length` drafted tokens: the tokens that follow,
        the next anchor, and how many drafted tokens stood."""
        fed = mx.concatenate([anchor, draft.tokens[:length].astype(anchor.dtype)])
        with self.rollback.verifying(fed):
            logits = self.feed(fed)
        self.rows, self.pending = 1, None
        logprobs = self.logprobs(logits)
        tested = length if draft.q is None else length + 1  # the last row can test one more
        n, following = accept(draft.first(tested), logprobs, self.sampler)
        tokens = [*draft.tokens.tolist()[:n], following]
        end = next((i for i, token in enumerate(tokens) if token in self.stop), n)
        block = [(token, logprobs[i], i < n) for i, token in enumerate(tokens[: end + 1])]
        self.features = self.features[:, : 1 + n]
        return block, mx.array([following], anchor.dtype), n

    def emit(self, block: list[Token]) -> Iterator[Token]:
        for token, logprobs, drafted in block:
            if drafted:
                self.rows += 1
            else:
                self.pending = mx.array([token], self.fed.dtype)
            yield token, logprobs, drafted

    def plain(self, policy: Policy, budget: float) -> Iterator[Token]:
        """One token a forward, the next forward always running while a token is yielded, until the
        policy drafts again. A probe's draft runs along, its cache kept up from the backlog."""
        self.commit()
        token, logprobs = self.step(self.pending)
        self.rows, self.pending = 1, None
        while budget > 0:
            self.commit()
            if not policy.parked:
                self.pending = token
                yield token.item(), logprobs, False
                return
            if policy.probing(self.rollback.position):
                policy.watch(self.propose(token))
            following = self.step(token)
            self.rows = 1
            waiting = time.perf_counter()
            policy.plain(token.item(), logprobs, waiting, self.rollback.position)
            yield token.item(), logprobs, False
            if token.item() in self.stop:
                return
            budget -= 1
            token, logprobs = following

    def step(self, token: mx.array) -> tuple[mx.array, mx.array]:
        logprobs = self.logprobs(self.feed(token))
        sampled = self.sampler(logprobs)
        mx.async_eval(sampled, logprobs, self.features)
        return sampled, logprobs[0]

    def commit(self) -> None:
        """Bring the caches to the rows that belong to the text, and start from there."""
        self.rollback.accept(self.rows)
        if self.draft_rows:
            for c in self.draft_cache:
                c.trim(self.draft_rows - self.rows)
        elif self.rows:
            self.backlog.append(self.features[:, : self.rows])
        if sum(f.shape[1] for f in self.backlog) >= BACKLOG:
            self.catch_up()
        if self.processors and self.rows:
            self.history = mx.concatenate([self.history, self.fed[: self.rows]])
        self.quantize()
        self.begin()

    def catch_up(self) -> None:
        """Take the backlog into the drafter's cache."""
        if self.backlog:
            self.drafter.extend(mx.concatenate(self.backlog, axis=1), self.draft_cache)
            self.backlog = []

    def quantize(self) -> None:
        maybe_quantize_kv_cache(self.cache, self.kv.start, self.kv.group_size, self.kv.bits)
        self.prompt_cache[: len(self.cache)] = self.cache

    def settle(self) -> None:
        """Bring all caches to the yielded text, also after an error or an early close."""
        self.commit()
        if self.pending is not None:
            self.feed(self.pending)
            self.rows, self.pending = 1, None
            self.commit()
        self.catch_up()
        mx.async_eval([c.state for c in self.prompt_cache])


def decode(
    prompt: mx.array,
    decoder: Decoder,
    stream: mx.Stream,
    *,
    max_tokens: int,
    verify_length: int | str,
    prefill_step_size: int,
    checkpoints: Checkpoints,
    progress: Callable[[int, int], None],
) -> Generator[Token, None, None]:
    """mlx-lm's generate_step with a drafter: prefill, then rounds or plain decoding.

    On every exit the prompt cache holds the prompt and exactly the yielded tokens; an exit from
    prefill leaves the chunks that were done.
    """
    budget = float("inf") if max_tokens < 0 else max_tokens
    with mx.stream(stream):
        policy = policy_for(verify_length, decoder.drafter, decoder.sampler)
        try:
            done = 0
            progress(done, prompt.size)
            for n in decoder.prefill(prompt, prefill_step_size, checkpoints):
                done += n
                progress(done, prompt.size)
            policy.begin(decoder.statistics, decoder.sampler, decoder.rollback.position)
            for count, token in enumerate(decoder.tokens(policy, budget)):
                if count == 0:
                    progress(prompt.size, prompt.size)
                yield token
                if count % 256 == 0:
                    mx.clear_cache()
        finally:
            decoder.settle()
            decoder.statistics.verdict = policy.verdict(decoder.rollback.position)


def make_caches(
    model: nn.Module, drafter: DFlash, given: list[Any] | None, max_kv_size: int | None
) -> list[Any]:
    """The target's caches, then the drafter's, in the caller's list if there is one.

    A list with the target's caches only gets new ones for the drafter appended: rotary positions
    are relative, so a drafter that has not seen the cached tokens still drafts, from less context.
    """
    own = make_prompt_cache(model, max_kv_size)
    if given is None:
        return own + drafter.make_cache()
    if len(given) == len(own):
        given.extend(drafter.make_cache())
    if len(given) != len(own) + len(drafter.layers):
        raise InputError(
            f"prompt_cache has {len(given)} entries; this pair needs {len(own)} for the target and "
            f"{len(drafter.layers)} for the drafter"
        )
    return given


def encode(tokenizer: TokenizerWrapper, prompt: str | mx.array | list[int]) -> mx.array:
    """Token ids of a prompt; a string gets special tokens unless it starts with them."""
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        prompt = tokenizer.encode(prompt, add_special_tokens=not (bos and prompt.startswith(bos)))
    prompt = mx.array(prompt)
    if prompt.size == 0:
        raise InputError("the prompt is empty; give at least one token")
    return prompt


def inside(prompt: mx.array, checkpoints: Checkpoints) -> Checkpoints:
    """The checkpoints, if each lies before the prompt's last token, which prefill does not feed."""
    wrong = [n for n in checkpoints if not 0 < n < prompt.size]
    if wrong:
        raise InputError(
            f"prompt_checkpoints has {wrong}; the places must lie between 1 and {prompt.size - 1}, "
            "the prompt's tokens but the last"
        )
    return checkpoints


def plain_tokens(
    prompt: mx.array, model: nn.Module, **options: Any
) -> Generator[Token, None, None]:
    """mlx-lm's own decoding, for a model without a drafter."""
    for token, logprobs in generate_step(prompt, model, **options):
        yield token, logprobs, False


def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | mx.array | list[int],
    drafter: DFlash | None = None,
    *,
    max_tokens: int = 256,
    sampler: SamplerFunction | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    prompt_cache: list[Any] | None = None,
    prompt_checkpoints: Checkpoints | None = None,
    verify_length: int | str = "auto",
    max_kv_size: int | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    stream: mx.Stream = generation_stream,
) -> Generator[GenerationResponse, None, None]:
    """mlx_lm.stream_generate with a drafter: the target's own text, one response per token.

    Args: mlx-lm's, and
        drafter: from `load` or `load_drafter`, bound to this model. None: plain mlx-lm decoding.
        sampler: greedy when None. A `dspine_mlx.Sampler` lets drafts be sampled and tested by
            ratio; any other callable is sampled from row by row and compared with the drafted
            tokens, so that a seeded run gives the very tokens of seeded plain decoding.
        prompt_cache: as mlx-lm's, with the drafter's caches after the target's (appended if
            missing). On every exit it holds the prompt and the yielded tokens.
        prompt_checkpoints: {n: f}: when n tokens of the prompt are in the caches, f gets their
            list (to copy it; see `dspine_mlx.prefix`). Ignored without a drafter.
        verify_length: drafted tokens offered to the target per round: an int, or "auto".
            0 is plain decoding.
    """
    if max_tokens == 0 or max_tokens < -1:
        raise InputError(f"max_tokens is {max_tokens}; it must be at least 1, or -1 for no limit")
    if verify_length != "auto" and not (isinstance(verify_length, int) and verify_length >= 0):
        raise InputError(f"verify_length is {verify_length!r}; it must be 'auto' or 0 or above")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    prompt = encode(tokenizer, prompt)
    if sampler is None or (isinstance(sampler, Sampler) and sampler.temp == 0):
        sampler = greedy_sampler
    statistics = Statistics()
    if drafter is None:
        tokens = plain_tokens(
            prompt,
            model,
            stream=stream,
            max_tokens=max_tokens,
            sampler=sampler,
            logits_processors=logits_processors,
            prompt_cache=prompt_cache,
            max_kv_size=max_kv_size,
            prefill_step_size=prefill_step_size,
            kv_bits=kv_bits,
            kv_group_size=kv_group_size,
            quantized_kv_start=quantized_kv_start,
            prompt_progress_callback=prompt_progress_callback,
        )
    else:
        decoder = Decoder(
            drafter,
            make_caches(model, drafter, prompt_cache, max_kv_size),
            sampler,
            list(logits_processors or []),
            KVQuantization(kv_bits, kv_group_size, quantized_kv_start),
            frozenset(tokenizer.eos_token_ids),
            statistics,
        )
        tokens = decode(
            prompt,
            decoder,
            stream,
            max_tokens=max_tokens,
            verify_length=verify_length,
            prefill_step_size=prefill_step_size,
            checkpoints=inside(prompt, prompt_checkpoints or {}),
            progress=prompt_progress_callback or (lambda *_: None),
        )
    with wired_limit([model, drafter], [stream]), closing(tokens):
        yield from respond(tokens, tokenizer, prompt.size, max_tokens, statistics)


def respond(
    tokens: Iterator[Token],
    tokenizer: TokenizerWrapper,
    prompt_tokens: int,
    max_tokens: int,
    statistics: Statistics,
) -> Iterator[GenerationResponse]:
    """Text of the tokens, up to and including a stop token or the last one allowed."""
    detokenizer = tokenizer.detokenizer
    start, prompt_tps = time.perf_counter(), 0.0
    for n, (token, logprobs, drafted) in enumerate(tokens, 1):
        if n == 1:
            now = time.perf_counter()
            prompt_tps, start = prompt_tokens / (now - start), now
        stopped = token in tokenizer.eos_token_ids
        if not stopped:
            detokenizer.add_token(token)
        if stopped or n == max_tokens:
            detokenizer.finalize()
        yield GenerationResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=logprobs,
            from_draft=drafted,
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tps,
            generation_tokens=n,
            generation_tps=n / (time.perf_counter() - start),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason="stop" if stopped else "length" if n == max_tokens else None,
            statistics=statistics,
        )
        if stopped or n == max_tokens:
            return


def generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | mx.array | list[int],
    drafter: DFlash | None = None,
    **options: Any,
) -> str:
    """The whole text of `stream_generate`, which takes the same options."""
    return "".join(r.text for r in stream_generate(model, tokenizer, prompt, drafter, **options))

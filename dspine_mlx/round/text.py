"""The round: propose, verify, accept, roll back, yield."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.sample_utils import LogitsProcessor, greedy_sampler
from mlx_lm.sample_utils import Sampler as SamplerFunction

from dspine_mlx.drafters.chain import AnyProposal
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.round.accept import TargetLogits, accept, normalised
from dspine_mlx.round.policy import Policy
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft, Stops, select
from dspine_mlx.round.statistics import Statistics
from dspine_mlx.target.rollback import Rollback

Token = tuple[int, mx.array, bool]  # id, logprobs [V], whether the drafter proposed it
Checkpoints = Mapping[int, Callable[[list[Any]], None]]  # by the number of prompt tokens
DraftFilter = Callable[[mx.array, list[int]], int]  # tokens so far, draft -> how many to verify
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

    def apply(self, cache: list[Any]) -> None:
        try:
            maybe_quantize_kv_cache(cache, self.start, self.group_size, self.bits)
        except ValueError as error:
            raise InputError(
                f"kv_bits {self.bits} in groups of {self.group_size} don't suit this target's "
                f"heads: {error}"
            ) from error

    def width_limit(self, position: int) -> float:
        """Rows one forward at this position may feed, so that quantising starts where plain
        decoding starts it."""
        if self.bits is None or position >= self.start:
            return float("inf")
        return self.start - position


def always() -> bool:
    return True


class DraftContext:
    """The drafter's side of a text: its caches, and features of the text it has not taken in.

    While `wanted` says that no draft can pay, features are dropped rather than taken in, and the
    caches stay behind the text: rotary positions are relative, so drafts only lose context.
    """

    def __init__(self, drafter: Drafter, cache: list[KVCache]):
        self.drafter, self.cache = drafter, cache
        self.wanted: Callable[[], bool] = always
        self.backlog: list[mx.array] = []
        self.waiting = 0  # rows of the backlog
        self.begin()

    def begin(self) -> None:
        self.marks = [c.offset for c in self.cache]
        self.taken: int | None = None  # rows of the backlog that a proposal took in

    def propose(self, anchor: mx.array, features: mx.array) -> AnyProposal:
        """Take in the backlog and the newest features, and propose tokens after the anchor."""
        rows = mx.concatenate([*self.backlog, features], axis=1)
        proposal = self.drafter.propose(anchor, rows, self.cache)
        self.taken, self.backlog, self.waiting = self.waiting, [], 0
        return proposal

    def commit(self, features: mx.array, rows: int) -> None:
        """The first rows of the newest features belong to the text; what a proposal took in
        beyond them goes, and all of it if the proposal failed."""
        keep = 0 if self.taken is None else self.taken + rows
        for c, mark in zip(self.cache, self.marks, strict=True):
            c.trim(c.offset - mark - keep)
        taken = self.taken
        self.begin()
        if taken is None and rows:
            self.add(features[:, :rows] if rows < features.shape[1] else features)

    def add(self, features: mx.array) -> None:
        """Features of rows of the text, to be taken in later."""
        self.backlog.append(features)
        self.waiting += features.shape[1]
        if self.waiting >= BACKLOG:
            self.catch_up()

    def catch_up(self) -> None:
        """Take in the backlog without a proposal."""
        if self.backlog and self.wanted():
            self.drafter.extend(mx.concatenate(self.backlog, axis=1), self.cache)
            mx.async_eval([c.state for c in self.cache])
        self.backlog, self.waiting = [], 0
        self.begin()


@dataclass
class Decoder:
    """One text in the making: its caches, and the rule that picks tokens.

    While tokens are yielded the caches may be ahead of the text: `rows` of the rows fed since the
    last checkpoint belong to it, and `pending` is a yielded token that has no row yet. From these
    `settle` brings caches that are kept to the yielded text, whenever the generation ends.
    """

    drafter: Drafter
    prompt_cache: list[Any]  # the target's caches, then the drafter's
    sampler: SamplerFunction = greedy_sampler
    processors: list[LogitsProcessor] = field(default_factory=list)
    kv: KVQuantization = field(default_factory=KVQuantization)
    stops: Stops = frozenset()
    statistics: Statistics = field(default_factory=Statistics)
    draft_filter: DraftFilter | None = None
    kept: bool = True  # somebody goes on with the caches after the text

    def __post_init__(self) -> None:
        layers = len(self.drafter.layers)
        self.cache = self.prompt_cache[:-layers]
        self.kv.check(self.cache)
        self.own(id(self.prompt_cache[-1]))
        self.context = DraftContext(self.drafter, self.prompt_cache[-layers:])
        self.rollback = Rollback(self.cache, self.drafter.target.model)
        self.none = self.drafter.no_features()
        self.history = mx.array([], mx.uint32)  # tokens fed so far, for processors and filter
        self.pending: mx.array | None = None
        self.settled = False
        self.begin()

    def own(self, cache: int) -> None:
        """A prompt cache has one text in the making: an unfinished one is brought to its end."""
        earlier = OWNERS.get(cache)
        if earlier is not None:
            earlier.settle()
        OWNERS[cache] = self

    def begin(self) -> None:
        """A checkpoint: all rows in the target's caches belong to the text."""
        self.rollback.checkpoint()
        self.features = self.none  # of the rows fed since
        self.rows = 0

    def prefill(
        self, prompt: mx.array, step: int, checkpoints: Checkpoints | None = None
    ) -> Iterator[int]:
        """Feed all but the prompt's last token, which stays pending; yields each chunk's size."""
        last, checkpoints = prompt.size - 1, checkpoints or {}
        borders = sorted({0, *range(step, last, step), *checkpoints, last})
        for start, end in pairwise(borders):
            self.feed(prompt[start:end])
            self.drafter.extend(self.features, self.context.cache)
            self.kv.apply(self.cache)
            self.prompt_cache[: len(self.cache)] = self.cache
            self.begin()
            self.context.begin()
            mx.eval([c.state for c in self.prompt_cache])
            mx.clear_cache()
            if end in checkpoints:
                checkpoints[end](self.prompt_cache)
            yield end - start
        self.history, self.pending = prompt[:-1], prompt[-1:]

    def feed(self, tokens: mx.array, eager_taps: bool = False) -> mx.array:
        """The target's logits [n, V] after each of the tokens [n]."""
        self.fed = tokens
        self.rollback.feeding(tokens.size)
        taps = self.drafter.config.target_layer_ids
        logits, self.features = self.drafter.target.forward(tokens, self.cache, taps, eager_taps)
        return logits

    def processed(self, logits: mx.array) -> mx.array:
        """Logits [n, V] under the user's processors, each row with the tokens up to it."""
        if not self.processors:
            return logits
        context, rows = mx.concatenate([self.history, self.fed]), []
        for i in range(len(logits)):
            seen, row = context[: self.history.size + i + 1], logits[i : i + 1]
            for processor in self.processors:
                row = processor(seen, row)
            rows.append(row)
        return mx.concatenate(rows)

    def tokens(self, policy: Policy, budget: float) -> Iterator[Token]:
        """Rounds while drafting pays, plain decoding while it does not, until `budget` tokens or a
        stop token."""
        self.context.wanted = lambda: not policy.hopeless(self.rollback.position)
        while budget > 0:
            for token in (self.plain if policy.parked else self.speculate)(policy, budget):
                budget = 0 if token[0] in self.stops else budget - 1
                yield token

    def speculate(self, policy: Policy, budget: float) -> Iterator[Token]:
        """Rounds of drafted tokens, until the policy parks."""
        block: list[Token] = []  # verified in the last round, not yet yielded
        anchor = self.pending
        while True:
            budget -= len(block)
            ended = budget < 1 or policy.parked or (bool(block) and block[-1][0] in self.stops)
            limit = int(min(self.drafter.config.num_proposals, budget - 1, self.width_limit()))
            started = time.perf_counter()
            draft = None if ended or limit < 1 else self.propose(anchor, policy)
            drafting = time.perf_counter() - started
            yield from self.emit(block)
            if ended:
                return
            self.commit()
            if draft is None:
                block, anchor, _ = self.verify(anchor, None, 0)
                self.statistics.plain += 1
                continue
            length = policy.length(draft, limit, self.rollback.position, drafting)
            length = self.permitted(anchor, draft, length)
            block, anchor, n = self.verify(anchor, draft, length)
            policy.learn(n, length)
            self.statistics.record(length, block)

    def width_limit(self) -> float:
        """Drafted tokens that the next forward may feed beside its anchor."""
        return self.kv.width_limit(self.rollback.position + self.features.shape[1]) - 1

    def propose(self, anchor: mx.array, policy: Policy) -> Draft:
        """Start drafting after the anchor; it runs while tokens are yielded."""
        sampled = isinstance(self.sampler, Sampler) and self.draft_filter is None
        proposal = self.context.propose(anchor, self.features)
        sampler = self.sampler if sampled else None
        draft = select(proposal, sampler, self.drafter.kernels, self.stops, policy.needs_evidence)
        mx.async_eval(draft.tokens, draft.evidence, draft.greedy_path)
        return draft

    def permitted(self, anchor: mx.array, draft: Draft, length: int) -> int:
        """Drafted tokens that the filter lets through. Exact because filtered drafts are one-hot:
        a cut that looks at the tokens it drops would bias sampled ones."""
        if self.draft_filter is None:
            return length
        tokens = draft.tokens.tolist()[:length]
        return self.draft_filter(mx.concatenate([self.history, anchor]), tokens)

    def verify(
        self, anchor: mx.array, draft: Draft | None, length: int
    ) -> tuple[list[Token], mx.array, int]:
        """One target forward over the anchor and `length` drafted tokens: the tokens that follow,
        the next anchor, and how many drafted tokens stood, up to one that ends the text."""
        drafted = [] if draft is None else [draft.tokens[:length].astype(anchor.dtype)]
        fed = mx.concatenate([anchor, *drafted])
        with self.rollback.verifying(fed):
            rows = TargetLogits(self.processed(self.feed(fed, eager_taps=True)))
        self.rows, self.pending = 1, None
        if draft is None:
            n, tokens = 0, [self.sampler(rows.logprobs(1)).item()]
        else:
            tested = length if draft.q is None else length + 1  # the last row can test one more
            n, following = accept(draft.first(tested), rows, self.sampler)
            tokens = [*draft.tokens.tolist()[:n], following]
        end = next((i for i, token in enumerate(tokens) if token in self.stops), n)
        logprobs = rows.logprobs(end + 1)
        copies = [mx.take(logprobs, mx.array(i), axis=0) for i in range(end + 1)]
        mx.async_eval(copies)  # a kept response must not keep the whole block's logprobs
        block = [(tokens[i], row, i < n) for i, row in enumerate(copies)]
        self.features = self.features[:, : 1 + n]
        return block, mx.array(tokens[-1:], anchor.dtype), min(n, end + 1)

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
        self.rows, self.pending, depth = 1, None, self.rollback.position
        while budget > 0:
            self.advance()
            depth += 1
            if not policy.parked:
                self.pending = token
                yield token.item(), logprobs, False
                return
            if policy.probe_due(depth):
                policy.start_probe(self.propose(token, policy))
                self.context.begin()  # what it took in belongs to the text
            started = time.perf_counter()
            following = self.step(token)
            self.rows = 1
            read = token.item()
            policy.plain_token(read, logprobs, started, depth)
            yield read, logprobs, False
            if read in self.stops:
                return
            budget -= 1
            token, logprobs = following

    def step(self, token: mx.array) -> tuple[mx.array, mx.array]:
        """The features are left to whoever takes them in: their layers are evaluated anyway."""
        logprobs = normalised(self.processed(self.feed(token)))
        sampled, row = self.sampler(logprobs), logprobs.squeeze(0)
        mx.async_eval(sampled, row)
        return sampled, row

    def advance(self) -> None:
        """Plain decoding's commit: the one row fed belongs to the text."""
        if self.kv.bits is not None or self.processors or self.draft_filter:
            self.commit()
            return
        self.rollback.advance()
        self.context.add(self.features)
        self.features, self.rows = self.none, 0

    def commit(self) -> None:
        """Bring the caches to the rows that belong to the text, and start from there."""
        self.rollback.accept(self.rows)
        self.context.commit(self.features, self.rows)
        if self.rows and (self.processors or self.draft_filter):
            self.history = mx.concatenate([self.history, self.fed[: self.rows]])
        self.kv.apply(self.cache)
        self.prompt_cache[: len(self.cache)] = self.cache
        self.begin()

    def settle(self) -> None:
        """Bring all caches to the yielded text if they are kept, also after an error or an early
        close; the text can't be continued then."""
        if self.settled:
            return
        self.settled = True
        if self.kept:
            self.commit()
            if self.pending is not None:
                self.feed(self.pending)
                self.rows, self.pending = 1, None
                self.commit()
            self.context.catch_up()
            mx.async_eval([c.state for c in self.prompt_cache])
        self.context.wanted = always  # it holds this decoder: no cycle may keep the caches alive


OWNERS: WeakValueDictionary[int, Decoder] = WeakValueDictionary()  # by the id of their last cache

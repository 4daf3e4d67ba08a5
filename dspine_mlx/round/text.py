"""A text being generated: its caches, its newest token, and the user's rule that picks tokens."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor, greedy_sampler
from mlx_lm.sample_utils import Sampler as SamplerFunction

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.round.accept import TargetLogits
from dspine_mlx.round.draft_context import DraftContext
from dspine_mlx.round.lookup import Lookup
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft, Stops
from dspine_mlx.round.statistics import Statistics
from dspine_mlx.round.user_code import permitted
from dspine_mlx.target.kv_quantization import KVQuantization

Token = tuple[int, mx.array, bool]  # id, logprobs [V], whether the drafter proposed it
Checkpoints = Mapping[int, Callable[[list[Any]], None]]  # by the number of prompt tokens
DraftFilter = Callable[[mx.array, list[int]], int]  # tokens so far, draft -> how many to verify


@dataclass
class Text:
    """One text: what a round reads and changes.

    While tokens are yielded the caches may be ahead of the text: `rows` of the rows fed since the
    last checkpoint belong to it, and `pending` is a yielded token that has no row yet. From these
    `settle` brings caches that are kept to the yielded text, whenever the generation ends. Both
    change only when nothing of the user's can run before the yield that they belong to.
    """

    drafter: Drafter
    prompt_cache: list[Any]  # the target's caches, then the drafter's
    sampler: SamplerFunction = greedy_sampler
    processors: list[LogitsProcessor] = field(default_factory=list)
    kv: KVQuantization = field(default_factory=KVQuantization)
    stops: Stops = frozenset()
    statistics: Statistics = field(default_factory=Statistics)
    draft_filter: DraftFilter | None = None
    lookup: Lookup | None = None  # holds the text's tokens; None: nothing is copied
    kept: bool = True  # the caches are used after the text

    def __post_init__(self) -> None:
        own = len(self.prompt_cache) - len(self.drafter.layers)
        self.cache = self.prompt_cache[:own]
        self.kv.check(self.cache)
        self.claim_cache()
        self.context = DraftContext(self.drafter, self.prompt_cache[own:])
        self.ranks = self.drafter.verifier.ranks
        self.rollback = self.drafter.verifier.rollback(self.cache, self.kv, self.drafter.taps)
        self.no_features = self.drafter.no_features()
        self.history = mx.array([], mx.uint32)  # tokens fed so far, for processors and filter
        self.pending: mx.array | None = None
        self.closed = False
        self.checkpoint()

    def claim_cache(self) -> None:
        """End another generation's unfinished text in the same prompt cache."""
        cache = id(self.prompt_cache[-1])
        earlier = OWNERS.get(cache)
        if earlier is not None:
            earlier.settle()
        OWNERS[cache] = self

    @property
    def position(self) -> int:
        """Rows in the target's caches at the last checkpoint."""
        return self.rollback.position

    @property
    def anchor(self) -> mx.array:
        """The newest token [1] of the text, which has no row yet."""
        assert self.pending is not None
        return self.pending

    @property
    def draft_sampler(self) -> Sampler | None:
        """The sampler to draw drafts with, or to foresee; None: drafts are greedy.

        A filtered draft may not be sampled: a cut that looks at sampled tokens would bias them.
        """
        sampler = self.sampler
        if not isinstance(sampler, Sampler) or (self.draft_filter and not sampler.seeded):
            return None
        return sampler

    def checkpoint(self) -> None:
        """Mark all rows in the target's caches as the text's."""
        self.rollback.checkpoint()
        self.features = self.no_features  # of the rows fed since
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
            self.checkpoint()
            self.context.checkpoint()
            mx.eval([c.state for c in self.prompt_cache])
            self.ranks.arrived()
            mx.clear_cache()
            if end in checkpoints:
                checkpoints[end](self.prompt_cache)
            yield end - start
        self.history, self.pending = prompt[:-1], prompt[-1:]
        self.note(prompt.tolist())

    def note(self, tokens: list[int]) -> None:
        """The text grows by these tokens: copies may come from them."""
        if self.lookup is not None:
            self.lookup.add(tokens)

    def feed(self, tokens: mx.array, eager_taps: bool = False, more: bool = False) -> mx.array:
        """The target's logits [n, V] after each of the tokens [n]. more: the token after them will
        be fed alone."""
        self.fed = tokens
        self.rollback.feeding(tokens.size, more)
        taps = self.drafter.taps
        logits, self.features = self.drafter.target.forward(tokens, self.cache, taps, eager_taps)
        return logits

    def processed(self, logits: mx.array) -> mx.array:
        """Apply the user's processors to logits [n, V], each row with the tokens up to it."""
        if not self.processors:
            return logits
        context, rows = mx.concatenate([self.history, self.fed]), []
        for i in range(len(logits)):
            seen, row = context[: self.history.size + i + 1], logits[i : i + 1]
            for processor in self.processors:
                row = processor(seen, row)
            rows.append(row)
        return mx.concatenate(rows)

    def width_limit(self) -> float:
        """Rows that the next forward may feed, its anchor included."""
        limit = self.drafter.target.verify_kernels.width_limit
        return min(self.kv.width_limit(self.cache, self.position), limit)

    def permitted(self, anchor: mx.array, draft: Draft, length: int) -> int:
        """How many of the draft's first `length` tokens the user's filter lets through."""
        if self.draft_filter is None:
            return length
        tokens = draft.tokens.tolist()[:length]
        return permitted(self.draft_filter, mx.concatenate([self.history, anchor]), tokens)

    def verify(self, anchor: mx.array, drafted: mx.array) -> TargetLogits:
        """One target forward over the anchor [1] and drafted tokens [l]: l + 1 rows of logits."""
        fed = mx.concatenate([anchor, drafted.astype(anchor.dtype)])
        kernels = self.drafter.target.verify_kernels
        with self.rollback.verifying(fed), kernels.verifying(fed.size):
            logits = TargetLogits(self.processed(self.feed(fed, eager_taps=True)))
        self.fed_pending()
        return logits

    def fed_pending(self) -> None:
        """Note that the pending token has a row now, the first one fed since the checkpoint."""
        self.rows, self.pending = 1, None

    def keep(self, accepted: mx.array, following: int, logits: TargetLogits) -> list[Token]:
        """Take in the block that a round made: accepted tokens [n] and the one that follows, up to
        one that ends the text. Features are cut to the rows of the anchor and the n tokens."""
        self.ranks.arrived()
        n, tokens = len(accepted), [*accepted.tolist(), following]
        end = next((i for i, token in enumerate(tokens) if token in self.stops), n)
        logprobs = logits.logprobs(end + 1)
        copies = [mx.take(logprobs, mx.array(i), axis=0) for i in range(end + 1)]
        mx.async_eval(copies)  # a kept response must not keep the whole block's logprobs
        self.features = self.features[:, : 1 + n]
        self.note(tokens[: end + 1])
        return [(tokens[i], row, i < n) for i, row in enumerate(copies)]

    def ends_with(self, block: list[Token]) -> bool:
        return block[-1][0] in self.stops

    def emit(self, block: list[Token]) -> Iterator[Token]:
        for token, logprobs, drafted in block:
            if drafted:
                self.rows += 1
            else:
                self.pending = mx.array([token], self.fed.dtype)
            yield token, logprobs, drafted

    def advance(self) -> None:
        """Roll back after plain decoding: the one row fed belongs to the text."""
        if self.kv.bits is not None or self.processors or self.draft_filter:
            self.roll_back()
            return
        self.rollback.advance()
        self.context.add(self.features, self.position)
        self.features, self.rows = self.no_features, 0

    def roll_back(self) -> None:
        """Bring the caches to the rows that belong to the text, and go on from there."""
        self.rollback.accept(self.rows)
        self.context.roll_back(self.features, self.rows, self.position)
        if self.rows and (self.processors or self.draft_filter):
            self.history = mx.concatenate([self.history, self.fed[: self.rows]])
        if self.rows:  # without a forward mlx-lm would not quantise either
            self.kv.apply(self.cache)
            self.prompt_cache[: len(self.cache)] = self.cache
        self.checkpoint()

    def settle(self) -> None:
        """Bring all caches to the yielded text if they are kept, also after an error or an early
        close; the text can't be continued then."""
        if self.closed:
            return
        self.closed = True
        if self.kept and not self.ranks.lost:
            self.bring_caches_to_text()
        self.rollback.end()

    def bring_caches_to_text(self) -> None:
        self.roll_back()
        if self.pending is not None:
            self.feed(self.pending)
            self.fed_pending()
            self.roll_back()
        self.context.catch_up()
        mx.async_eval([c.state for c in self.prompt_cache])


OWNERS: WeakValueDictionary[int, Text] = WeakValueDictionary()  # by the id of their last cache

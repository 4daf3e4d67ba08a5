"""Where a round's time goes: a pass of its own that waits for the result at every seam.

MLX runs what it is given while Python builds what comes next, so parts of a normal round overlap.
Waiting for each part tells what it takes, and serialises the round: the sum may exceed a normal
one.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.sample_utils import greedy_sampler

from dspine_mlx.drafters.chain import AnyProposal, ChainProposal
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.proposal import SlotwiseProposal
from dspine_mlx.errors import InputError
from dspine_mlx.generate import make_caches
from dspine_mlx.measure.compare import Pair
from dspine_mlx.round.policy import Fixed, Policy
from dspine_mlx.round.select import Draft
from dspine_mlx.round.text import Decoder, DraftContext, Token

HOST = "host"  # what is left: policy, Python between the parts, the reader of the text
PHASES = ("draft", "select", "verify", "accept", "rollback", HOST)
PREFILL = 2048
Kind = TypeVar("Kind", bound=Decoder)


class Stopwatch:
    """Seconds by phase; an inner phase's time does not count for the outer one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.start()

    def start(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phase, self.since = HOST, self.clock()

    def turn(self, phase: str) -> str:
        """Begin a phase; the one before it."""
        before, now = self.phase, self.clock()
        self.seconds[before] += now - self.since
        self.phase, self.since = phase, now
        return before

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        before = self.turn(phase)
        try:
            yield
        finally:
            self.turn(before)


def parts(proposal: AnyProposal) -> Any:
    """The arrays that a proposal comes with."""
    if isinstance(proposal, ChainProposal):
        return proposal.arrays()
    return proposal.logits if isinstance(proposal, SlotwiseProposal) else proposal


class TimedContext(DraftContext):
    def __init__(self, drafter: Drafter, cache: list[Any], watch: Stopwatch):
        super().__init__(drafter, cache)
        self.watch = watch

    def propose(self, anchor: mx.array, features: mx.array) -> AnyProposal:
        with self.watch.timing("draft"):
            proposal = super().propose(anchor, features)
            mx.eval(parts(proposal))
        return proposal


class TimedDecoder(Decoder):
    """A decoder that waits for the result of each part of a round."""

    def __post_init__(self) -> None:
        self.watch = Stopwatch()
        super().__post_init__()
        self.context = TimedContext(self.drafter, self.context.cache, self.watch)

    def propose(self, anchor: mx.array, policy: Policy) -> Draft:
        with self.watch.timing("select"):
            draft = super().propose(anchor, policy)
            mx.eval(draft.tokens, draft.evidence)
        return draft

    def feed(self, tokens: mx.array, eager_taps: bool = False) -> mx.array:
        with self.watch.timing("verify"):
            logits = super().feed(tokens, eager_taps)
            mx.eval(logits, self.features)
        return logits

    def verify(
        self, anchor: mx.array, draft: Draft | None, length: int
    ) -> tuple[list[Token], mx.array, int]:
        with self.watch.timing("accept"):
            block, following, n = super().verify(anchor, draft, length)
            mx.eval([row for _, row, _ in block], following, self.features)
        return block, following, n

    def commit(self) -> None:
        with self.watch.timing("rollback"):
            super().commit()
            mx.eval([c.state for c in self.prompt_cache])

    def tokens(self, policy: Policy, budget: float) -> Iterator[Token]:
        self.watch.start()
        yield from super().tokens(policy, budget)
        self.watch.turn(HOST)


@dataclass(frozen=True)
class Split:
    """Seconds of a round that offers `length` drafted tokens, by phase, and of the same round
    left alone."""

    length: int
    rounds: int
    phases: dict[str, float]
    normal: float


def split(pair: Pair, prompt: list[int], length: int, max_tokens: int = 64) -> Split:
    """The mean round of one text, decoded twice: left alone, and waited for at every seam.

    A last token that no draft fits before is decoded alone, and its time counts with the rounds.
    """
    if pair.drafter is None or length < 1:
        raise InputError(f"a round needs a drafter and an offer of at least 1 token, not {length}")
    length = min(length, pair.drafter.config.num_proposals)
    undisturbed, seconds = decode(Decoder, pair, pair.drafter, prompt, Fixed(length), max_tokens)
    timed, _ = decode(TimedDecoder, pair, pair.drafter, prompt, Fixed(length), max_tokens)
    rounds = max(1, timed.statistics.rounds)
    phases = {phase: s / rounds for phase, s in timed.watch.seconds.items()}
    return Split(length, rounds, phases, seconds / max(1, undisturbed.statistics.rounds))


def decode(
    kind: type[Kind], pair: Pair, drafter: Drafter, prompt: list[int], policy: Policy, tokens: int
) -> tuple[Kind, float]:
    """A text by one kind of decoder: the decoder, and seconds after the prefill."""
    cache = make_caches(pair.model, drafter, None, None)
    sampler = pair.sampler if pair.sampler.temp > 0 else greedy_sampler
    stops = frozenset(pair.tokenizer.eos_token_ids)
    modules = [pair.model, drafter.network]
    with wired_limit(modules, [generation_stream]), mx.stream(generation_stream):
        decoder = kind(drafter, cache, sampler, stops=stops)
        for _ in decoder.prefill(mx.array(prompt), PREFILL):
            pass
        started = time.perf_counter()
        for _ in decoder.tokens(policy, tokens):
            pass
        seconds = time.perf_counter() - started
    return decoder, seconds

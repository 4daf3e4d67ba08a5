"""Where a round's time goes: a separate pass that waits for the result of each part.

MLX runs one part while Python builds the next, so parts of a normal round overlap. Waiting for each
part shows its time, and serialises the round: the sum may exceed a normal one.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.sample_utils import greedy_sampler

from dspine_mlx.drafters.chain import AnyProposal, ChainProposal
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.proposal import SlotwiseProposal
from dspine_mlx.errors import InputError
from dspine_mlx.generate import make_caches
from dspine_mlx.measure.compare import Models
from dspine_mlx.round.accept import accept
from dspine_mlx.round.decode import decode_text
from dspine_mlx.round.policy import Fixed
from dspine_mlx.round.select import select
from dspine_mlx.round.text import Text

HOST = "host"  # the rest: policy, Python between the parts, the reader of the text
PHASES = ("draft", "select", "verify", "accept", "rollback", HOST)
PREFILL = 2048


class Stopwatch:
    """Seconds by phase; an inner phase's time is not counted in the outer one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.start()

    def start(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phase, self.since = HOST, self.clock()

    def turn(self, phase: str) -> str:
        """Begin a phase; returns the previous one."""
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
    """The arrays of a proposal."""
    if isinstance(proposal, ChainProposal):
        return proposal.arrays()
    return proposal.logits if isinstance(proposal, SlotwiseProposal) else proposal


def timed_rounds(text: Text, length: int, budget: int, watch: Stopwatch) -> None:
    """Run the rounds of `speculate` at a fixed length, waiting for each part under the watch."""
    while budget > 1:
        with watch.timing("draft"):
            proposal = text.context.propose(text.anchor, text.features)
            mx.eval(parts(proposal))
        with watch.timing("select"):
            draft = select(
                proposal, text.draft_sampler, text.drafter.kernels, text.stops, with_evidence=False
            )
            mx.eval(draft.tokens)
        offered = min(length, len(draft.tokens), budget - 1)
        with watch.timing("verify"):
            logits = text.verify(text.anchor, draft.tokens[:offered])
            mx.eval(logits.logits, text.features)
        with watch.timing("accept"):
            n, following = accept(draft, logits, text.sampler)
            block = text.keep(draft.tokens[:n], following, logits)
            mx.eval([row for _, row, _ in block], text.features)
        text.statistics.record(offered, block)
        budget -= sum(1 for _ in text.emit(block))
        with watch.timing("rollback"):
            text.roll_back()
            mx.eval([c.state for c in text.prompt_cache])
        if text.ends_with(block):
            return


@dataclass(frozen=True)
class Split:
    """Seconds of a round that offers `length` drafted tokens, by phase, and of the same round
    without waits."""

    length: int
    rounds: int
    phases: dict[str, float]
    normal: float


def split(models: Models, prompt: list[int], length: int, max_tokens: int = 64) -> Split:
    """Split the mean round of one text, decoded twice: without waits, and waiting for each part.

    A last token before which no draft fits is decoded alone: its time counts in the normal round
    and not in the phases.
    """
    if models.drafter is None or length < 1:
        raise InputError(f"a round needs a drafter and an offer of at least 1 token, not {length}")
    length = min(length, models.drafter.config.num_proposals)
    with prefilled(models, models.drafter, prompt) as text:
        started = time.perf_counter()
        for _ in decode_text(text, Fixed(length), max_tokens):
            pass
        normal = (time.perf_counter() - started) / max(1, text.statistics.rounds)
    with prefilled(models, models.drafter, prompt) as text:
        watch = Stopwatch()
        timed_rounds(text, length, max_tokens, watch)
        watch.turn(HOST)
    rounds = max(1, text.statistics.rounds)
    phases = {phase: seconds / rounds for phase, seconds in watch.seconds.items()}
    return Split(length, rounds, phases, normal)


@contextmanager
def prefilled(models: Models, drafter: Drafter, prompt: list[int]) -> Iterator[Text]:
    """A text after its prefill, on the stream of generation."""
    cache = make_caches(models.model, drafter, None, None)
    sampler = models.sampler if models.sampler.temp > 0 else greedy_sampler
    stops = frozenset(models.tokenizer.eos_token_ids)
    modules = [models.model, drafter.network]
    with wired_limit(modules, [generation_stream]), mx.stream(generation_stream):
        text = Text(drafter, cache, sampler, stops=stops)
        for _ in text.prefill(mx.array(prompt), PREFILL):
            pass
        yield text
        text.rollback.end()

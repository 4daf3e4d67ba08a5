"""How many drafted tokens of each text a round offers, and whether the batch is drafted for."""

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

from dspine_mlx.batch.costs import BatchCosts
from dspine_mlx.batch.schedule import best, padded
from dspine_mlx.batch.text import BatchText
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.round.select import Draft
from dspine_mlx.verify_length.budget import Budget
from dspine_mlx.verify_length.calibration import mode_of
from dspine_mlx.verify_length.chances import Chances
from dspine_mlx.verify_length.schedule import Schedule, prepare

CHECK = 3  # plain steps that are timed before texts are drafted for in a new number
MEMORY = 16  # rounds over which tokens and seconds fade


class BatchPolicy(Protocol):
    needs_evidence: bool

    def join(self, text: BatchText, texts: int, depth: int) -> None:
        """A text joins; there are so many now."""

    def plainly(self, texts: int, depth: int) -> bool:
        """Whether the next step is plain decoding of all texts."""

    def stays_plain(self, texts: int, depth: int) -> bool:
        """During a plain step: whether the next one will be plain, too, as far as is known."""

    def lengths(self, texts: list[BatchText], drafts: list[Draft], depth: int) -> list[int]:
        """Drafted tokens to offer, of each text."""

    def learn(
        self,
        texts: list[BatchText],
        lengths: list[int],
        accepted: list[int],
        drafting: float,
        verifying: float,
    ) -> None:
        """A round is over, and took so many seconds."""

    def plain_step(self, texts: int, seconds: float | None, depth: int) -> None:
        """A step of plain decoding is over; None: its time could not be told."""


@dataclass
class FixedLength:
    """The same length for every text; 0 is plain decoding."""

    tokens: int
    needs_evidence: bool = False

    def join(self, text: BatchText, texts: int, depth: int) -> None: ...

    def plainly(self, texts: int, depth: int) -> bool:
        return self.tokens == 0

    def stays_plain(self, texts: int, depth: int) -> bool:
        return self.tokens == 0

    def lengths(self, texts: list[BatchText], drafts: list[Draft], depth: int) -> list[int]:
        pairs = zip(texts, drafts, strict=True)
        return [max(0, min(self.tokens, text.limit(draft))) for text, draft in pairs]

    def learn(
        self,
        texts: list[BatchText],
        lengths: list[int],
        accepted: list[int],
        drafting: float,
        verifying: float,
    ) -> None: ...

    def plain_step(self, texts: int, seconds: float | None, depth: int) -> None: ...


class Scheduled:
    """Lengths by each text's own chances under measured costs, and parking of the whole batch.

    `budget` counts plain steps that drafting may still lose, as for one text. While it is spent all
    texts are decoded plainly, and a round now and then shows whether drafting pays again.
    """

    needs_evidence = True

    def __init__(self, schedule: Schedule):
        self.calibrations = schedule.calibrations
        self.costs, self.budget = BatchCosts(schedule.costs), Budget()
        self.check = 0  # plain steps left to be timed
        self.probing = False  # the next round is to show whether drafting pays
        self.tokens = self.seconds = 0.0  # of recent rounds, fading
        self.known: list[list[float]] = []  # chances of each text's slots in this round
        self.depth = 0

    def join(self, text: BatchText, texts: int, depth: int) -> None:
        calibration = self.calibrations.get(mode_of(text.text.sampler))
        if calibration is not None:
            text.chances = Chances(calibration)
        self.budget.start_text(self.costs.draft(texts, depth) / self.costs.plain(texts, depth))
        if not self.costs.plain_known(texts):
            self.check = CHECK

    def plainly(self, texts: int, depth: int) -> bool:
        if self.check:
            return True
        self.probing = self.probe_due(texts, depth)
        return self.budget.spent and not self.probing

    def stays_plain(self, texts: int, depth: int) -> bool:
        if self.check:
            return self.check > 1
        return self.budget.spent and not self.probe_due(texts, depth)

    def probe_due(self, texts: int, depth: int) -> bool:
        draft = self.costs.draft(texts, depth) / self.costs.plain(texts, depth)
        return self.budget.spent and self.budget.probe_due(draft)

    def lengths(self, texts: list[BatchText], drafts: list[Draft], depth: int) -> list[int]:
        self.known, self.depth = [], depth
        survival = []
        for text, draft in zip(texts, drafts, strict=True):
            evidence = draft.greedy_path or draft.evidence
            assert evidence is not None
            odds = text.chances.calibration.block_log_odds(evidence.log_odds())
            self.known.append(text.chances.of(odds))
            survival.append(list(accumulate(self.known[-1], mul))[: max(0, text.limit(draft))])
        plain = self.costs.plain(len(texts), depth) / len(texts)
        value = min(plain, self.seconds / self.tokens) if self.tokens else plain
        lengths, _, _ = best(padded(survival), lambda rows: self.costs.verify(rows, depth), value)
        return lengths

    def learn(
        self,
        texts: list[BatchText],
        lengths: list[int],
        accepted: list[int],
        drafting: float,
        verifying: float,
    ) -> None:
        for text, known, length, n in zip(texts, self.known, lengths, accepted, strict=True):
            for slot in range(min(length, n + 1)):
                text.chances.update(slot, known[slot], float(slot < n))
            text.chances.round_over()
        B, rows, depth = len(texts), len(texts) * (1 + max(lengths)), self.depth
        self.costs.learn_round(B, rows, depth, drafting, verifying)
        seconds = self.costs.draft(B, depth) + self.costs.verify(rows, depth)
        tokens = B + sum(accepted)
        self.tokens = (1 - 1 / MEMORY) * self.tokens + tokens
        self.seconds = (1 - 1 / MEMORY) * self.seconds + seconds
        self.book(tokens / B - seconds / self.costs.plain(B, depth))

    def book(self, gain: float) -> None:
        """A round won so many plain steps, or lost them."""
        if self.probing:
            self.probing, self.budget.since = False, 0
            self.budget.probe_over(gain)
        else:
            self.budget.round_over(gain)

    def plain_step(self, texts: int, seconds: float | None, depth: int) -> None:
        if seconds is not None:
            self.costs.learn_plain(texts, depth, seconds)
        self.check = max(0, self.check - 1)
        self.budget.since += 1


def batch_policy(verify_length: int | str, drafter: Drafter) -> BatchPolicy:
    """The policy that `verify_length` names: a number of tokens, or "auto"."""
    if isinstance(verify_length, int):
        return FixedLength(min(verify_length, drafter.config.num_proposals))
    schedule = drafter.schedule or prepare(drafter)
    schedule.batch = schedule.batch or Scheduled(schedule)
    return schedule.batch

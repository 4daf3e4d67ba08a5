"""The policy that chooses for several texts: whether to draft, how much, and what to verify."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import median
from weakref import WeakKeyDictionary

import numpy as np

from dspine_mlx.batch.costs import BatchCosts, BatchCurve, guess
from dspine_mlx.batch.policy import BatchPolicy, FixedLength
from dspine_mlx.batch.profile import batch_curves
from dspine_mlx.batch.prospects import Average, Prospects
from dspine_mlx.batch.schedule import Plan, best, padded, planned
from dspine_mlx.batch.text import BatchText
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.round.select import Draft
from dspine_mlx.verify_length.budget import Budget
from dspine_mlx.verify_length.calibration import mode_of, uncalibrated
from dspine_mlx.verify_length.chances import Chances
from dspine_mlx.verify_length.schedule import Schedule, schedule_of

SPAN = 4  # plain steps timed together: one of them alone may be early or late
FLOOR = 0.88  # speed of plain decoding that rounds leave every text, at least
CREDIT, CAP = 0.0, 4.0  # tokens that a text may be behind that, at first and at most
AGAIN = 8  # plain steps after which the next round is planned anew
HOPE = 1.1  # gain that perfect drafts must reach for probes to be made


@dataclass
class Record:
    """One text: its prospects, and how it fares."""

    prospects: Prospects
    credit: float = CREDIT  # tokens that it may still fall behind FLOOR
    saved: float = 0.0  # plain steps that its rounds saved
    rounds: int = 0
    plain: int = 0  # steps

    def advance(self, tokens: int, steps: float) -> None:
        """It got so many tokens in the time of so many plain steps."""
        self.credit = min(CAP, self.credit + tokens - FLOOR * steps)


class Scheduled:
    """Width and lengths by each text's own chances under measured costs, and parking.

    A round is drafted where it is expected to gain, while `budget`, which counts plain steps as for
    one text, is not spent, and where it leaves every text FLOOR of its plain speed; a text that
    gets fewer tokens than the others so sets how often they are drafted for. While the batch is
    parked, a round now and then shows whether drafting pays again.
    """

    needs_evidence = True

    def __init__(
        self,
        schedule: Schedule,
        slots: int,
        curves: Sequence[BatchCurve] = (),
        shortens: bool = True,
        keep: Callable[[BatchCosts], None] = lambda costs: None,
    ):
        """slots: tokens that the drafter proposes at most; shortens: whether its blocks may be
        narrower; keep: called when a text is over."""
        self.calibrations, self.keep = schedule.calibrations, keep
        self.costs, self.budget = (
            BatchCosts(curves or [guess(schedule.costs.curve, slots)]),
            Budget(),
        )
        self.widest = slots
        self.least = 1 if shortens else self.widest
        self.average = dict[str, Average]()  # by mode
        self.records: WeakKeyDictionary[BatchText, Record] = WeakKeyDictionary()
        self.check = 0  # plain steps left to be timed
        self.times = list[float]()  # of plain steps of as many texts
        self.started = False  # whether the next plain step may be running
        self.plan: Plan | None = None  # of the next round; None: to be made
        self.since = 0  # plain steps since it was made
        self.gain = 1.0  # of the plan, over plain decoding
        self.probing = False  # the next round is to show whether drafting pays
        self.wider = 0  # its block
        self.known: list[list[float]] = []  # chances of each text's slots in this round
        self.odds: list[list[float]] = []  # what they come from
        self.depth = 0

    def join(self, text: BatchText, texts: int, depth: int) -> None:
        mode = mode_of(text.text.sampler)
        calibration = self.calibrations.get(mode) or uncalibrated(self.widest)
        text.chances = Chances(calibration)
        average = self.average.setdefault(mode, Average(self.widest))
        self.records[text] = Record(Prospects(average))
        self.plan = None
        draft = self.costs.draft(texts, self.least, depth)
        self.budget.start_text(draft / self.costs.plain(texts, depth))
        self.times.clear()
        self.started = False
        self.check = 0 if self.costs.plain_known(texts) else 1 + SPAN

    def probe(self, texts: list[BatchText], depth: int) -> tuple[int, float]:
        """A wider block than planned, as chances may have improved, and the plain steps that its
        round is expected to lose; infinite where even perfect drafts would gain too little."""
        plain, draft, verify = self.costs.steps(len(texts), depth)
        steps = (draft + verify[1:]) / plain
        gains = (np.arange(2, len(verify) + 1) / steps)[self.least - 1 :]
        wider = max(self.least, 2 * self.planned(texts, depth).slots)
        slots = min(self.least + int(gains.argmax()), wider)
        tokens = 1 + self.survival(texts).mean(axis=(0, 1))[:slots].sum()
        lost = max(0.0, float(steps[slots - 1] - tokens))
        return slots, lost if gains.max() > HOPE else float("inf")

    def survival(self, texts: list[BatchText]) -> np.ndarray:
        """[B, R, M] of the texts' last rounds, as far as their next ones may go."""
        limits = [min(text.left - 1, text.most) for text in texts]
        own = [self.records[text].prospects for text in texts]
        return np.stack([p.within(n) for p, n in zip(own, limits, strict=True)])

    def plainly(self, texts: list[BatchText], depth: int) -> bool:
        if self.started:  # a plain step runs already: drafting now would waste it
            self.started = self.probing = False
            return True
        self.probing = not self.check and self.probe_due(texts, depth)
        if self.probing:
            self.wider = self.probe(texts, depth)[0]
        return self.check > 0 or not (self.probing or self.drafts(texts, depth, 0.0))

    def stays_plain(self, texts: list[BatchText], depth: int) -> bool:
        if self.check:
            self.started = self.check > 1
        else:
            drafts = self.probe_due(texts, depth) or self.drafts(texts, depth, 1 - FLOOR)
            self.started = not drafts
        return self.started

    def probe_due(self, texts: list[BatchText], depth: int) -> bool:
        self.planned(texts, depth)
        if not self.parked:
            return False
        return self.budget.probe_due(self.probe(texts, depth)[1])

    def drafts(self, texts: list[BatchText], depth: int, more: float) -> bool:
        """Whether to draft now, if each text has so much more credit."""
        plan = self.planned(texts, depth)
        if self.parked:
            return False
        steps = plan.seconds / self.costs.plain(len(texts), depth)
        credits = np.array([self.records[text].credit for text in texts])
        return bool((credits + more + plan.tokens >= FLOOR * steps).all())

    @property
    def parked(self) -> bool:
        """Whether rounds have lost too much, or the next one is expected to lose."""
        return self.budget.spent or self.gain <= 1

    def planned(self, texts: list[BatchText], depth: int) -> Plan:
        """The next round: planned after each round, when texts come or go, and now and then."""
        if self.plan is None or len(self.plan.tokens) != len(texts) or self.since >= AGAIN:
            plain, draft, verify = self.costs.steps(len(texts), depth)
            survival, value = self.survival(texts), plain / len(texts)
            for _ in range(2):  # a token is worth what tokens take, by the plan itself
                plan = planned(survival, draft, verify, value, self.least)
                value = min(value, plan.seconds_per_token)
            self.gain = plain / len(texts) / plan.seconds_per_token
            self.plan, self.since = plan, 0
        return self.plan

    def slots(self, texts: list[BatchText], depth: int) -> int:
        plan = self.planned(texts, depth)
        return self.wider if self.probing else plan.slots

    def lengths(self, texts: list[BatchText], drafts: list[Draft], depth: int) -> list[int]:
        self.known, self.odds, self.depth = [], [], depth
        survival = []
        for text, draft in zip(texts, drafts, strict=True):
            if self.probing:
                (text.chances.forget_half if self.budget.spent else text.chances.doubt)()
            evidence = draft.greedy_path or draft.evidence
            assert evidence is not None
            odds = text.chances.calibration.block_log_odds(evidence.log_odds())
            self.odds.append(odds)
            self.known.append(text.chances.of(odds))
            survival.append(list(accumulate(self.known[-1], mul))[: max(0, text.limit(draft))])
        B, (plain, _, verify) = len(texts), self.costs.steps(len(texts), depth)
        value = min(plain / B, self.planned(texts, depth).seconds_per_token)
        choices = list(padded(survival))
        if self.probing:  # something has to be offered
            choices = choices[1:] or choices
        return best(choices, lambda rows: verify[rows // B - 1], value)[0]

    def learn(
        self,
        texts: list[BatchText],
        lengths: list[int],
        accepted: list[int],
        drafting: float,
        verifying: float,
    ) -> None:
        rows = zip(texts, self.known, self.odds, lengths, accepted, strict=True)
        for text, known, odds, length, n in rows:
            for slot in range(min(length, n + 1)):
                text.chances.update(slot, known[slot], float(slot < n))
            text.chances.round_over()
            self.records[text].prospects.learn(
                list(accumulate(text.chances.of(odds), mul)), self.probing
            )
        B, depth, slots = len(texts), self.depth, max(map(len, self.known))
        self.costs.learn_round(B, slots, 1 + max(lengths), drafting, verifying, depth)
        plain = self.costs.plain(B, depth)
        seconds = self.costs.draft(B, slots, depth)
        steps = (seconds + self.costs.verify(B, 1 + max(lengths), depth)) / plain
        for text, n in zip(texts, accepted, strict=True):
            record = self.records[text]
            record.advance(1 + n, steps)
            record.rounds, record.saved = record.rounds + 1, record.saved + 1 + n - steps
        self.book(1 + sum(accepted) / B - steps)
        self.plan = None

    def book(self, gain: float) -> None:
        """A round won so many plain steps, or lost them."""
        if self.probing:
            self.probing, self.budget.since = False, 0
            self.budget.probe_over(gain)
        else:
            self.budget.round_over(gain)

    def plain_step(self, texts: list[BatchText], seconds: float | None, depth: int) -> None:
        if self.plan is None or len(self.plan.tokens) != len(texts):
            self.times.clear()
        if seconds is not None:
            self.times.append(seconds)
        if len(self.times) == SPAN or (self.check == 1 and self.times):
            self.costs.learn_plain(len(texts), median(self.times), depth)
            self.times.clear()
        for text in texts:
            self.records[text].plain += 1
            self.records[text].advance(1, 1.0)
        self.check = max(0, self.check - 1)
        self.budget.since += 1
        self.since += 1

    def plain_seconds(self, texts: int, depth: int) -> float | None:
        return self.costs.plain(texts, depth)

    def verdict(self, text: BatchText) -> str:
        self.keep(self.costs)
        record = self.records[text]
        saved = "saved" if record.saved >= 0 else "lost"
        sums = f"its rounds {saved} the time of {abs(record.saved):.1f} plain tokens"
        if not record.rounds:
            return "not drafted: among so many texts plain decoding was expected to be faster"
        if not record.plain:
            return f"drafted throughout, with others: {sums}"
        return f"drafted with others but for {record.plain} tokens: {sums}"


def batch_policy(verify_length: int | str, drafter: Drafter) -> BatchPolicy:
    """The policy that `verify_length` names: a number of tokens, or "auto"."""
    if isinstance(verify_length, int):
        return FixedLength(min(verify_length, drafter.config.num_proposals))
    schedule = schedule_of(drafter)
    if schedule.batch is None:
        curves, keep = batch_curves(drafter, schedule)
        slots, shortens = drafter.config.num_proposals, drafter.config.causal_block
        schedule.batch = Scheduled(schedule, slots, curves, shortens, keep)
    return schedule.batch

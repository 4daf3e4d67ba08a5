"""The policy that chooses for several texts: whether to draft, how much, and what to verify."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import accumulate
from operator import mul
from statistics import median
from weakref import WeakKeyDictionary

import numpy as np

from dspine_mlx.batch.copies import Copies
from dspine_mlx.batch.costs import BatchCosts, BatchCurve, guess
from dspine_mlx.batch.prospects import FLOOR, Average, Prospects, Record
from dspine_mlx.batch.schedule import Plan, best, padded, planned
from dspine_mlx.batch.text import BatchText
from dspine_mlx.round.draft_context import BACKLOG
from dspine_mlx.round.select import Draft
from dspine_mlx.verify_length.budget import SHARE, Budget
from dspine_mlx.verify_length.calibration import mode_of, uncalibrated
from dspine_mlx.verify_length.chances import Chances
from dspine_mlx.verify_length.schedule import Schedule

SPAN = 8  # plain steps timed together: one of them alone may be early or late
CHECK = 4  # plain steps timed at first where their cost is not known
AGAIN = 16  # plain steps after which the next round is planned anew
HOPE = 1.1  # gain that perfect drafts must reach for probes to be made


class Scheduled:
    """Whom to draft for, width and lengths, by each text's own chances under measured costs; and
    parking, of single texts and of the whole batch.

    A round is drafted where it is expected to gain, while `budget`, which counts plain steps as for
    one text, is not spent, and where it leaves every text FLOOR of its plain speed; a text that
    gets fewer tokens than the others so sets how often they are drafted for. Now and then a round
    shows whether drafting pays again for a batch that is parked, or for a text that is left out.
    """

    needs_evidence = True

    def __init__(
        self,
        schedule: Schedule,
        slots: int,
        curves: Sequence[BatchCurve] = (),
        shortens: bool = True,
        keep: Callable[[BatchCosts], None] = lambda costs: None,
        drafter: bool = True,
    ):
        """slots: tokens that the drafter proposes at most; shortens: whether its blocks may be
        narrower; keep: called when a text is over; drafter: whether there is one, beside
        copies."""
        self.calibrations, self.keep = schedule.calibrations, keep
        self.costs = BatchCosts(curves or [guess(schedule.costs.curve, slots)])
        self.budget = Budget()
        self.widest = slots
        self.least = 1 if shortens else self.widest
        self.average = dict[str, Average]()  # by mode
        self.history = dict[str, Chances]()  # by mode, of the last text
        self.records: WeakKeyDictionary[BatchText, Record] = WeakKeyDictionary()
        self.check = 0  # plain steps left to be timed
        self.times = list[float]()  # of plain steps
        self.timed = 0  # texts of each
        self.started = False  # whether the next plain step may be running
        self.plan: Plan | None = None  # of the next round; None: to be made
        self.since = 0  # plain steps since it was made
        self.unread = 0  # plain steps since the last round
        self.chosen: list[bool] = []  # whom this round drafts for
        self.copies, self.copies_only, self.drafter = Copies(slots), False, drafter
        self.own: list[list[float]] = []  # survival of the drafts of this round
        self.gain = 1.0  # of the plan, over plain decoding
        self.probe_cost: float | None = None  # in plain steps; None: to be found
        self.keeping: bool | None = None  # the drafter's context; None: to be found
        self.probing = False  # the next round is to show whether drafting pays
        self.wider = 0  # its block
        self.failed = False  # the last one did
        self.known: list[list[float]] = []  # chances of each text's slots in this round
        self.odds: list[list[float]] = []  # what they come from
        self.depth = 0

    def join(self, text: BatchText, texts: int, depth: int) -> None:
        mode = mode_of(text.text.sampler)
        calibration = self.calibrations.get(mode) or uncalibrated(self.widest)
        text.chances = deepcopy(self.history.get(mode) or Chances(calibration))
        text.chances.doubt()
        average = self.average.setdefault(mode, Average(self.widest))
        self.records[text] = Record(Prospects(average))
        self.copies.join(text)
        self.plan = None
        draft = self.costs.draft(texts, self.least, depth)
        self.budget.start_text(draft / self.costs.plain(texts, depth))
        self.times.clear()
        self.keeping, self.started = None, False
        self.check = 0 if self.costs.plain_known(texts) else 1 + CHECK

    def probe(self, texts: list[BatchText], depth: int) -> tuple[int, float]:
        """A wider block than planned, as chances may have improved, and the plain steps that its
        round is expected to lose; infinite where even perfect drafts would gain too little."""
        plain, draft, verify = self.costs.steps(len(texts), depth)
        steps = (draft + verify[1:]) / plain
        gains = (np.arange(2, len(verify) + 1) / steps)[self.least - 1 :]
        wider = max(self.least, 2 * self.planned(texts, depth).slots)
        slots = min(self.least + int(gains.argmax()), wider)
        hope = 0.0 if self.failed else self.survival(texts).mean(axis=(0, 1))[:slots].sum()
        lost = max(0.0, float(steps[slots - 1] - 1 - hope)) + self.behind(len(texts), depth)
        return slots, lost if gains.max() > HOPE else float("inf")

    def behind(self, texts: int, depth: int) -> float:
        """Plain steps that it takes the drafter to take in what it has not read; a full backlog is
        about a draft."""
        rows = min(BACKLOG, self.unread) if self.unread > self.widest else 0
        draft = self.costs.draft(texts, self.widest, depth)
        return rows / BACKLOG * draft / self.costs.plain(texts, depth)

    def reads(self, texts: list[BatchText], depth: int) -> bool:
        """Whether a probe may come while these features are among the newest rows."""
        budget = self.budget
        if not (budget.spent and self.drafter):
            return self.drafter
        if self.probe_cost is None:
            self.probe_cost = self.probe(texts, depth)[1]
        wait = max(0 if budget.eager else budget.wait, self.probe_cost / SHARE) - budget.since
        return wait <= min(BACKLOG, max(text.left for text in texts))

    def keeps_context(self, texts: list[BatchText], depth: int) -> bool:
        """Whether taking a full backlog in takes SHARE of its plain steps' time at most."""
        if self.keeping is None:
            draft = self.costs.draft(len(texts), self.widest, depth)
            self.keeping = draft <= SHARE * BACKLOG * self.costs.plain(len(texts), depth)
        return self.keeping and not self.budget.spent

    def survival(self, texts: list[BatchText]) -> np.ndarray:
        """[B, R, M] of the texts' last rounds, as far as their next ones may go."""
        limits = [min(text.left - 1, text.most) for text in texts]
        own = [self.records[text].prospects for text in texts]
        return np.stack([p.within(n) for p, n in zip(own, limits, strict=True)])

    def plainly(self, texts: list[BatchText], depth: int) -> bool:
        self.copies.look_up(texts)
        self.copies_only = False
        if self.started:  # a plain step runs already: drafting now would waste it
            self.started = self.probing = False
            return True
        self.probing = not self.check and self.probe_due(texts, depth)
        if self.probing:
            self.wider = self.probe(texts, depth)[0]
            return False
        drafts = not self.check and self.drafts(texts, depth, 0.0)
        self.copies_only = not self.check and self.copies_pay(texts, depth, 0.0, drafts)
        return not (drafts or self.copies_only)

    def copies_pay(
        self, texts: list[BatchText], depth: int, more: float, drafts: bool, running: int = 0
    ) -> bool:
        """Whether copies gain over a draft, or else over plain steps, with so much more credit."""
        if not self.copies.found:
            return False
        steps = self.costs.steps(len(texts), depth)
        value = self.planned(texts, depth).seconds_per_token if drafts else steps.plain / len(texts)
        credit = [self.records[text].credit + more for text in texts]
        return self.copies.pay(texts, steps, value, credit, running)

    def stays_plain(self, texts: list[BatchText], depth: int) -> bool:
        if self.check:
            self.started = self.check > 1
        else:
            drafts = self.probe_due(texts, depth) or self.drafts(texts, depth, 1 - FLOOR)
            drafts = drafts or self.copies_pay(texts, depth, 1 - FLOOR, drafts, running=1)
            self.started = not drafts
        return self.started

    def probe_due(self, texts: list[BatchText], depth: int) -> bool:
        budget = self.budget
        if not self.drafter or not (budget.eager or budget.since >= budget.wait):
            return False
        self.planned(texts, depth)
        if not self.parked:
            return False
        if self.probe_cost is None:
            self.probe_cost = self.probe(texts, depth)[1]
        return budget.probe_due(self.probe_cost)

    def drafts(self, texts: list[BatchText], depth: int, more: float) -> bool:
        """Whether to draft now, if each text has so much more credit."""
        if self.budget.spent:
            return False
        plan = self.planned(texts, depth)
        if self.parked:
            return False
        steps = plan.seconds / self.costs.plain(len(texts), depth)
        credits = np.array([self.records[text].credit for text in texts])
        return bool((credits + more + plan.tokens >= FLOOR * steps).all())

    @property
    def parked(self) -> bool:
        """Whether rounds have lost too much, or the next one is expected to lose."""
        return self.budget.spent or self.gain <= 1 or not self.drafter

    def planned(self, texts: list[BatchText], depth: int) -> Plan:
        """The next round: planned after each round, when texts come or go, and now and then."""
        if self.plan is None or len(self.plan.tokens) != len(texts) or self.since >= AGAIN:
            B, (plain, _, verify) = len(texts), self.costs.steps(len(texts), depth)
            survival, draft = self.survival(texts), self.costs.drafts_for(B, depth)
            survival[[self.records[text].left_out for text in texts]] = 0.0
            value = plain / B
            for _ in range(2):  # a token is worth what tokens take, by the plan itself
                plan = planned(survival, draft, verify, value, self.least)
                if plan.seconds_per_token >= value:
                    break
                value = plan.seconds_per_token
            self.gain = plain / B / plan.seconds_per_token
            self.plan, self.since, self.probe_cost, self.keeping = plan, 0, None, None
            if self.gain > 1:
                self.leave_out(texts, plan)
        return self.plan

    def leave_out(self, texts: list[BatchText], plan: Plan) -> None:
        """Take note of whom the plan drafts for. A text about to end is not moved any more."""
        for text, drafted in zip(texts, plan.drafted, strict=True):
            record = self.records[text]
            if not record.left_out:
                record.judge(bool(drafted) or text.left <= self.widest)

    def drafted(self, texts: list[BatchText], depth: int) -> list[bool]:
        self.planned(texts, depth)
        records = [self.records[text] for text in texts]
        self.chosen = [
            text.most > 0 and (self.probing or not record.left_out)
            for text, record in zip(texts, records, strict=True)
        ]
        out = [record for record in records if record.left_out]
        if out and not self.probing:
            n, plain = len(texts) - len(out), self.costs.plain(len(texts), depth)
            draft = self.costs.drafts_for(len(texts), depth)[:, self.slots(texts, depth) - 1]
            more = draft[n] - draft[n - 1] if n else draft[0]
            for i, record in enumerate(records):
                record.tried = record.due(len(out) * float(more) / plain)
                self.chosen[i] |= record.tried and texts[i].most > 0
        return self.chosen

    def slots(self, texts: list[BatchText], depth: int) -> int:
        return self.wider if self.probing else self.planned(texts, depth).slots

    def lengths(self, texts: list[BatchText], drafts: list[Draft], depth: int) -> list[int]:
        self.known, self.odds, self.depth = [], [], depth
        survival = []
        for text, draft, drafted in zip(texts, drafts, self.chosen, strict=True):
            odds = list[float]()
            if drafted:
                if self.probing or self.records[text].tried:
                    (text.chances.forget_half if self.budget.spent else text.chances.doubt)()
                evidence = draft.greedy_path or draft.evidence
                assert evidence is not None
                odds = text.chances.calibration.block_log_odds(evidence.log_odds())
            self.odds.append(odds)
            self.known.append(text.chances.of(odds))
            own = list(accumulate(self.known[-1], mul))[: max(0, text.limit(draft))]
            survival.append(own)
        self.own = survival
        survival = [self.copies.beside(*own) for own in zip(texts, survival, strict=True)]
        B, (plain, _, verify) = len(texts), self.costs.steps(len(texts), depth)
        value = min(plain / B, self.planned(texts, depth).seconds_per_token)
        choices = list(padded(survival))
        if self.probing:  # something has to be offered
            choices = choices[1:] or choices
        return best(choices, lambda rows: verify[rows // B - 1], value)[0]

    def choose(
        self, texts: list[BatchText], drafts: list[Draft], depth: int
    ) -> tuple[list[Draft], list[int]]:
        if self.copies_only:
            self.chosen = [False] * len(texts)
        return self.copies.put_in(texts, drafts, self.lengths(texts, drafts, depth), self.own)

    def learn(
        self,
        texts: list[BatchText],
        lengths: list[int],
        accepted: list[int],
        drafting: float,
        verifying: float,
    ) -> None:
        B, depth, width = len(texts), self.depth, 1 + max(lengths)
        slots, drafted = max(map(len, self.known)), sum(self.chosen)
        self.costs.learn_verify(B, width, verifying, depth)
        seconds = self.costs.verify(B, width, depth)
        if drafted:
            self.costs.learn_draft(drafted, slots, drafting, depth)
            seconds += float(self.costs.drafts_for(B, depth)[drafted - 1, slots - 1])
        steps, own = seconds / self.costs.plain(B, depth), list(zip(lengths, accepted, strict=True))
        for i, text in enumerate(texts):
            record = self.records[text]
            record.saved += 1 + accepted[i] - steps
            record.advance(1 + accepted[i], steps)
            if self.copies.has(text):
                self.copies.learn(text, lengths[i], accepted[i])
                own[i] = 0, 0
            if self.chosen[i]:
                self.learn_chances(text, i, *own[i])
                record.waited, record.left_out = 0.0, False  # the next plan decides
            took_part = self.chosen[i] or self.copies.has(text)
            record.rounds, record.plain = record.rounds + took_part, record.plain + (not took_part)
        if drafted:  # the drafter answers for its own tokens
            self.book(1 + sum(n for _, n in own) / B - steps - self.behind(B, depth))
        self.plan, self.unread = None, 0

    def learn_chances(self, text: BatchText, i: int, length: int, accepted: int) -> None:
        known, odds, chances = self.known[i], self.odds[i], text.chances
        for slot in range(min(length, accepted + 1)):
            chances.update(slot, known[slot], float(slot < accepted))
        chances.round_over()
        record = self.records[text]
        survival = list(accumulate(chances.of(odds), mul))
        record.prospects.learn(survival, anew=self.probing or record.tried)
        self.history[mode_of(text.text.sampler)] = chances

    def book(self, gain: float) -> None:
        """A round won so many plain steps, or lost them."""
        if self.probing:
            self.probing, self.failed, self.budget.since = False, gain <= 0, 0
            self.budget.probe_over(gain)
        else:
            self.budget.round_over(gain)

    def plain_step(self, texts: list[BatchText], seconds: float | None, depth: int) -> None:
        if self.timed != len(texts):
            self.timed = len(texts)
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
        self.unread += 1

    def plain_seconds(self, texts: int, depth: int) -> float | None:
        return self.costs.plain(texts, depth)

    def verdict(self, text: BatchText) -> str:
        self.keep(self.costs)
        return self.records[text].verdict()

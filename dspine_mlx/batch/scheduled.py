"""The policy that chooses for several texts: whether to draft, how much, and what to verify."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary

import numpy as np

from dspine_mlx.batch.copies import Copies
from dspine_mlx.batch.costs import BatchCosts, BatchCurve, PlainTimes, guess
from dspine_mlx.batch.prospects import FLOOR, Average, Prospects, Record
from dspine_mlx.batch.schedule import Plan, best, padded, planned
from dspine_mlx.batch.text import BatchText
from dspine_mlx.batch.trials import Trials, shown
from dspine_mlx.round.draft_context import BACKLOG
from dspine_mlx.round.select import Draft
from dspine_mlx.round.text import Token
from dspine_mlx.verify_length.budget import FIRST_WAIT, SHARE
from dspine_mlx.verify_length.calibration import mode_of, uncalibrated
from dspine_mlx.verify_length.chances import Chances
from dspine_mlx.verify_length.schedule import Schedule

AGAIN = 16  # plain steps after which the next round is planned anew


class Scheduled:
    """Whom to draft for, width and lengths, by each text's own chances under measured costs; and
    parking, of texts and of the whole batch.

    A round is drafted where it is expected to gain, while `budget`, which counts plain steps as for
    one text, is not spent, and where it leaves every text FLOOR of its plain speed. Others may show
    that drafting pays again: see `dspine_mlx.batch.trials`.
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
        narrower; keep: called when a text is over; drafter: whether there is one."""
        self.calibrations, self.keep = schedule.calibrations, keep
        self.costs = BatchCosts(curves or [guess(schedule.costs.curve, slots)])
        self.widest, self.least = slots, 1 if shortens else slots
        self.trials = Trials(self.costs, self.least, shown(schedule))
        self.budget = self.trials.budget
        self.average = dict[str, Average]()  # by mode
        self.history = dict[str, Chances]()  # by mode, of the last text
        self.records: WeakKeyDictionary[BatchText, Record] = WeakKeyDictionary()
        self.times = PlainTimes(self.costs)
        self.started = False  # whether the next plain step may be running
        self.plan: Plan | None = None  # of the next round; None: to be made
        self.since = 0  # plain steps since it was made
        self.chosen: list[bool] = []  # whom this round drafts for
        self.copies, self.copies_only, self.drafter = Copies(slots), False, drafter
        self.own: list[list[float]] = []  # survival of the drafts of this round
        self.gain = 1.0  # of the plan, over plain decoding
        self.probe_cost: float | None = None  # in plain steps; None: to be found
        self.keeping: bool | None = None  # the drafter's context; None: to be found
        self.trying = 0  # tokens of a round that is to show whether drafting pays; 0: none is
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
        self.trials.text_joins()
        self.times.restart(texts)
        self.keeping, self.started = None, False

    def probe(self, texts: list[BatchText], depth: int) -> tuple[int, float]:
        """A wider block than planned, as chances may have improved, and the plain steps that its
        round is expected to lose."""
        B, trials = len(texts), self.trials
        rounds = trials.rounds(B, depth)
        slots = trials.best_if_right(rounds, 2 * self.planned(texts, depth).slots)
        hope = 0.0 if trials.failed else self.survival(texts).mean(axis=(0, 1))[:slots].sum()
        lost = max(0.0, float(rounds[slots - 1] - 1 - hope)) + trials.behind(B, depth)
        return slots, lost if trials.hopeful(rounds) else float("inf")

    def reads(self, texts: list[BatchText], depth: int) -> bool:
        """Whether a draft may come while these features are among the newest rows."""
        if not (self.budget.spent and self.drafter):
            return self.drafter
        steps = self.trials.steps_to_watch(len(texts), depth)
        return steps <= min(BACKLOG, max(text.left for text in texts))

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
            self.started, self.trying = False, 0
            return True
        due = not self.times.check and self.probe_due(texts, depth)
        self.trying = self.probe(texts, depth)[0] if due else 0
        if self.trying:
            return False
        drafts = not self.times.check and self.drafts(texts, depth, 0.0)
        self.copies_only = not self.times.check and self.copies_pay(texts, depth, 0.0, drafts)
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
        if self.times.check:
            self.started = self.times.check > 1
        else:
            drafts = self.probe_due(texts, depth) or self.drafts(texts, depth, 1 - FLOOR)
            drafts = drafts or self.copies_pay(texts, depth, 1 - FLOOR, drafts, running=1)
            self.started = not drafts
        return self.started

    def probe_due(self, texts: list[BatchText], depth: int) -> bool:
        if not (self.drafter and self.budget.spent and self.trials.promising):
            return False
        self.planned(texts, depth)
        if self.probe_cost is None:
            self.probe_cost = self.probe(texts, depth)[1]
        return self.trials.round_due(self.probe_cost)

    def drafts(self, texts: list[BatchText], depth: int, more: float) -> bool:
        """Whether to draft now, if each text has so much more credit."""
        if self.budget.spent:
            return False
        plan = self.planned(texts, depth)
        if self.parked:
            return False
        steps = plan.seconds / self.costs.plain(len(texts), depth)
        records = [self.records[text] for text in texts]
        own = np.minimum(plan.tokens, [r.prospects.shown(plan.slots) for r in records])
        return bool((more + own + [r.credit for r in records] >= FLOOR * steps).all())

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
            self.trials.new_plan()
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
            text.most > 0 and (self.trying > 0 or not record.left_out)
            for text, record in zip(texts, records, strict=True)
        ]
        out = [record for record in records if record.left_out]
        if out and not self.trying:
            n, plain = len(texts) - len(out), self.costs.plain(len(texts), depth)
            draft = self.costs.drafts_for(len(texts), depth)[:, self.slots(texts, depth) - 1]
            more = draft[n] - draft[n - 1] if n else draft[0]
            for i, record in enumerate(records):
                record.tried = record.due(len(out) * float(more) / plain)
                self.chosen[i] |= record.tried and texts[i].most > 0
        return self.chosen

    def slots(self, texts: list[BatchText], depth: int) -> int:
        return self.trying or self.planned(texts, depth).slots

    def lengths(self, texts: list[BatchText], drafts: list[Draft], depth: int) -> list[int]:
        self.known, self.odds, self.depth = [], [], depth
        survival = []
        for text, draft, drafted in zip(texts, drafts, self.chosen, strict=True):
            odds = list[float]()
            if drafted:
                if self.trying or self.records[text].tried:
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
        value = plain / B
        if not self.parked:  # else the plan is not followed
            value = min(value, self.planned(texts, depth).seconds_per_token)
        choices = list(padded(survival))
        if self.trying:  # something has to be offered
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
                record.tries += 1
            took_part = self.chosen[i] or self.copies.has(text)
            record.rounds, record.plain = record.rounds + took_part, record.plain + (not took_part)
        if drafted:  # the drafter answers for its own tokens
            gain = 1 + sum(n for _, n in own) / B - steps
            self.trials.round_over(gain, self.trials.behind(B, depth), tried=self.trying > 0)
        self.plan, self.trials.watch, self.trying = None, None, 0

    def learn_chances(self, text: BatchText, i: int, length: int, accepted: int) -> None:
        known, odds, chances = self.known[i], self.odds[i], text.chances
        for slot in range(min(length, accepted + 1)):
            chances.update(slot, known[slot], float(slot < accepted))
        chances.round_over()
        record = self.records[text]
        survival = list(accumulate(chances.of(odds), mul))
        record.prospects.learn(survival, anew=self.trying > 0 or record.tried)
        self.history[mode_of(text.text.sampler)] = chances

    def plain_step(
        self, texts: list[BatchText], tokens: list[Token], seconds: float | None, depth: int
    ) -> None:
        self.times.step(len(texts), seconds, depth)
        for text in texts:
            self.records[text].plain += 1
            self.records[text].advance(1, 1.0)
        self.trials.plain_step()
        self.since += 1
        if self.trials.watch is not None:
            self.compare(texts, tokens, self.trials.watch.text, depth)

    def watch(self, texts: list[BatchText], depth: int) -> int | None:
        self.planned(texts, depth)
        parked = self.drafter and self.parked and not self.times.check
        if not (parked and self.trials.watch_due(len(texts), depth)):
            return None
        long = [i for i, text in enumerate(texts) if min(text.left - 1, text.most) >= self.least]
        return min(long, key=lambda i: self.records[texts[i]].turn, default=None)

    def watched(self, text: BatchText, draft: Draft, texts: int, depth: int) -> None:
        self.records[text].tries += 1
        self.trials.start_watch(text, draft, texts, depth)

    def compare(
        self, texts: list[BatchText], tokens: list[Token], watched: BatchText, depth: int
    ) -> None:
        """The watched text's next token, if it is still there."""
        if watched not in texts:
            self.trials.watch = None
            return
        token, logprobs, _ = tokens[texts.index(watched)]
        survival = self.trials.compare(token, logprobs, len(texts), depth)
        if survival is None:
            return
        self.history[mode_of(watched.text.sampler)] = watched.chances
        own, self.plan = self.records[watched], None
        own.prospects.learn(survival, anew=True)
        own.waited = 0.0
        for record in (self.records[text] for text in texts if text is not watched):
            fresh = record.tries and record.waited < FIRST_WAIT
            if self.trials.promising and not fresh:
                record.prospects.expect(survival)
                record.left_out = False
            elif not record.tries:
                record.prospects.expect([])

    def plain_seconds(self, texts: int, depth: int) -> float | None:
        return self.costs.plain(texts, depth)

    def verdict(self, text: BatchText) -> str:
        self.keep(self.costs)
        return self.records[text].verdict()

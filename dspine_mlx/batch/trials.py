"""Whether drafting pays again, for a batch that is decoded plainly.

A round would show it, but all texts pay for one. So one text's next draft is made beside plain
steps and only compared with the tokens that they bring. If it would have paid for a round, rounds
follow.
"""

from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from operator import mul

import mlx.core as mx
import numpy as np

from dspine_mlx.batch.costs import BatchCosts
from dspine_mlx.batch.text import BatchText
from dspine_mlx.round.draft_context import BACKLOG
from dspine_mlx.round.select import Draft
from dspine_mlx.verify_length.budget import SHARE, START, Budget
from dspine_mlx.verify_length.records import Probe
from dspine_mlx.verify_length.schedule import Schedule

LENT = 1.2  # plain steps' time for watched drafts, saved up at most; given to a new pair
HOPE = 1.1  # gain that perfect drafts must reach for trials to be made


def shown(schedule: Schedule) -> Budget | None:
    """A batch's first budget, by what the pair has shown in single texts, or else when it was
    calibrated; None: nothing yet."""
    budgets = schedule.budgets.values()
    if any(budget.balance > START for budget in budgets):
        return Budget()
    if any(budget.credit < START for budget in budgets):
        return Budget(balance=0.0)
    return Budget() if schedule.calibrations else None


@dataclass
class Watch:
    """A text's draft, as far as its tokens have been compared with it."""

    text: BatchText
    probe: Probe

    def compare(self, token: int, logprobs: mx.array) -> bool:
        """Whether the draft goes on agreeing."""
        return self.probe.compare(token, logprobs, self.text.chances, self.text.text.draft_sampler)

    def survival(self) -> list[float]:
        """Of its tokens, by the drafter's evidence and all outcomes so far."""
        return list(accumulate(self.text.chances.of(self.probe.evidence.odds), mul))

    def tokens(self, length: int) -> float:
        """What a round offering so many of its tokens would have brought. Evidence that has never
        been calibrated is not counted."""
        came = 1 + min(self.probe.slot, length)
        if not self.text.chances.calibration.rounds:
            return came
        return (came + 1 + sum(self.survival()[:length])) / 2


class Trials:
    """The budget of rounds, and when a draft is watched, or a round tried.

    Watched drafts take SHARE of the time; a drafter that has shown nothing is given LENT. One that
    would have paid for its round starts drafting with what is left of the credit. Once that is
    spent, rounds are tried: they may lose SHARE of the time.
    """

    def __init__(self, costs: BatchCosts, least: int, budget: Budget | None = None):
        """least: tokens that a draft has at least; budget: what the pair has shown; None: nothing
        yet."""
        self.costs, self.least, self.widest = costs, least, len(costs.known[0].shares)
        self.budget = budget or Budget(balance=0.0)
        self.saved = 0.0 if budget else LENT  # plain steps' time for watched drafts
        self.watch: Watch | None = None
        self.promising = False  # whether the last one, or a round since, paid
        self.failed = False  # whether the last round that was tried lost
        self.unread = 0  # plain steps since the last round
        self.new_plan()

    def new_plan(self) -> None:
        """Costs or texts are others."""
        self.watch_cost: float | None = None  # in plain steps; None: to be found

    def text_joins(self) -> None:
        """It gets no credit of its own: others pay for its rounds, too."""
        self.budget.start_text(float("inf"))

    def rounds(self, texts: int, depth: int) -> np.ndarray:
        """[M] plain steps that rounds of 1 .. M tokens take."""
        plain, draft, verify = self.costs.steps(texts, depth)
        return (draft + verify[1:]) / plain

    def hopeful(self, rounds: np.ndarray) -> bool:
        """Whether perfect drafts would gain enough."""
        return bool((np.arange(2, len(rounds) + 2) > HOPE * rounds)[self.least - 1 :].any())

    def best_if_right(self, rounds: np.ndarray, most: int) -> int:
        """Tokens of the round that gains most if all are right, at most so many."""
        gains = np.arange(2, len(rounds) + 2) / rounds
        return int(min(self.least + gains[self.least - 1 :].argmax(), max(self.least, most)))

    def behind(self, texts: int, depth: int) -> float:
        """Plain steps that it takes the drafter to take in what it has not read; a full backlog is
        about a draft."""
        rows = min(BACKLOG, self.unread) if self.unread > self.widest else 0
        draft = self.costs.draft(texts, self.widest, depth)
        return rows / BACKLOG * draft / self.costs.plain(texts, depth)

    def cost_of_watch(self, texts: int, depth: int) -> float:
        """Plain steps that a draft for one text takes; infinite where nothing could come of it."""
        if self.watch_cost is None:
            hopeful = self.hopeful(self.rounds(texts, depth))
            draft = self.costs.draft(1, self.widest, depth)
            self.watch_cost = draft / self.costs.plain(texts, depth) if hopeful else float("inf")
        return self.watch_cost

    def watch_due(self, texts: int, depth: int) -> bool:
        return self.watch is None and self.saved >= self.cost_of_watch(texts, depth)

    def steps_to_watch(self, texts: int, depth: int) -> float:
        """Plain steps until the next draft is watched, at least."""
        return (self.cost_of_watch(texts, depth) - self.saved) / SHARE

    def start_watch(self, text: BatchText, draft: Draft, texts: int, depth: int) -> None:
        self.saved -= self.cost_of_watch(texts, depth)
        self.watch = Watch(text, Probe(draft))
        text.chances.forget_half()
        text.text.statistics.probes += 1

    def compare(self, token: int, logprobs: mx.array, texts: int, depth: int) -> list[float] | None:
        """The watched text's next token. The draft's survival, if that ends the watch: a token was
        wrong or the last, or those so far would have paid."""
        watch = self.watch
        assert watch is not None
        agrees, rounds = watch.compare(token, logprobs), self.rounds(texts, depth)
        right = watch.probe.slot
        paid = right >= self.least and 1 + right > float(rounds[right - 1])
        if agrees and not paid:
            return None
        watch.text.text.statistics.own_drafts[right] += 1
        survival, self.watch = watch.survival(), None
        net = 1 + np.cumsum(survival) - rounds[: len(survival)]
        length = self.least + int(net[self.least - 1 :].argmax())
        self.watched(paid or watch.tokens(length) > float(rounds[length - 1]))
        return survival

    def watched(self, paid: bool) -> None:
        """A draft would have paid for its round, or not."""
        self.promising = paid
        if paid and self.budget.spent and self.budget.credit >= 1:
            self.budget.balance = self.budget.credit

    def round_due(self, cost: float) -> bool:
        """Whether to try a round that is expected to lose so many plain steps."""
        return self.budget.spent and self.promising and self.budget.affords(cost)

    def round_over(self, gain: float, behind: float, tried: bool) -> None:
        """A round won so many plain steps, or lost them. It took `behind` more to take in what the
        drafter had not read, as the next one will not."""
        self.watch, self.unread = None, 0
        if tried:
            gain -= behind
            self.failed, self.promising, self.budget.since = gain <= 0, gain > 0, 0
            self.budget.probe_over(gain)
            return
        self.budget.balance = max(0.0, self.budget.balance - behind)
        self.budget.round_over(gain)
        if self.budget.spent:
            self.promising = False

    def plain_step(self) -> None:
        self.budget.since += 1
        self.unread += 1
        cost = self.watch_cost
        if cost is None or self.saved < max(LENT, cost if isfinite(cost) else 0.0):
            self.saved += SHARE

"""The policy that chooses: how many drafted tokens each round offers, and whether to draft at all.

Plain decoding is one more choice: drafting is parked while it wins. The rules, which are lossless,
are in `dspine_mlx.verify_length.rules`.
"""

import time
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import Sampler as SamplerFunction

from dspine_mlx.round.draft_context import BACKLOG
from dspine_mlx.round.lookup import Copy, Lookup
from dspine_mlx.round.policy import Policy
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft
from dspine_mlx.round.statistics import Statistics
from dspine_mlx.verify_length.budget import SHARE, Budget
from dspine_mlx.verify_length.calibration import Calibration
from dspine_mlx.verify_length.chances import expected_tokens
from dspine_mlx.verify_length.constant_length import ConstantLength
from dspine_mlx.verify_length.copying import Copying
from dspine_mlx.verify_length.costs import Costs
from dspine_mlx.verify_length.explain import Account
from dspine_mlx.verify_length.forecast import MEMORY, Forecast
from dspine_mlx.verify_length.records import Evidence, Probe, Round

CHECK = 3  # plain tokens decoded while drafting, to time them; MEMORY rounds apart at least
SPAN = 8  # while parked, one plain token in so many is timed
OFF = 1.5  # costs are learnt before a round is booked if its time is off by this factor


class Auto(Policy):
    """Length and parking from measured costs and calibrated chances.

    What a user can be told: `budget.balance`, the plain tokens that drafting may still lose;
    `forecast.rate`, the tokens per second of recent rounds; `budget.wait`, the plain tokens between
    drafts made while parked.

    The first tokens of a process are decoded plainly, and a few more now and then, so that the cost
    of plain decoding is known rather than assumed. While parked, a draft is made now and then and
    only compared with the plain tokens that follow, so a probe costs one proposal.
    """

    def __init__(
        self,
        costs: Costs,
        calibration: Calibration,
        explain: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        budget: Budget | None = None,
        text_over: Callable[[], None] = lambda: None,
    ):
        self.costs, self.forecast = costs, Forecast(costs, calibration)
        self.chances, self.budget = self.forecast.chances, budget or Budget()
        self.explain, self.clock, self.text_over = explain, clock, text_over
        self.constant, self.copying = ConstantLength(self.forecast.slots), Copying(self.forecast)
        self.copies = self.copying.chances
        self.newest: Round | None = None  # until it has been learnt from
        self.rounds_left = MEMORY  # before plain decoding is timed again
        self.parked, self.check = False, 0  # check: plain tokens left of one
        self.probe: Probe | None = None
        # Clocks at the last token, and when a draft was asked for; how long tokens waited for it.
        self.last = self.asked = self.waited = 0.0
        self.take_text(Statistics(), None)

    def take_text(self, statistics: Statistics, sampler: Sampler | None) -> None:
        self.statistics, self.sampler = statistics, sampler
        self.account = Account(self.forecast, statistics, self.explain)
        self.forget_probe()

    @property
    def needs_evidence(self) -> bool:
        return self.parked or self.constant.reading_due or self.copying.contest is not None

    def start_text(self, statistics: Statistics, sampler: SamplerFunction, depth: int) -> None:
        self.digest()
        drawn = isinstance(sampler, Sampler) and sampler.temp > 0 and not sampler.seeded
        self.take_text(statistics, sampler if drawn else None)
        if self.budget.spent:
            self.chances.forget_half()
        self.budget.start_text(self.costs.probe_share(depth))
        self.check = 0
        self.unpark(depth)
        if not self.parked and not self.costs.seen["plain"]:
            self.check_plain(depth)

    def unpark(self, depth: int) -> None:
        """Draft again, if the budget allows it and drafting is not hopeless."""
        self.parked = self.budget.spent or self.forecast.hopeless(depth)

    def keeps_context(self, depth: int) -> bool:
        """Whether a full backlog is worth taking in while parked. It takes a draft's time at most,
        which may be SHARE of the time that its plain tokens took."""
        affordable = self.costs.probe_share(depth) <= SHARE * BACKLOG
        return affordable and not self.forecast.hopeless(depth)

    # ---- rounds

    def copy_pays(self, copy: Copy, depth: int, running: int = 0) -> bool:
        return not self.check and self.copying.pays(copy, depth, self.parked, running)

    def choose(
        self, draft: Draft, lookup: Lookup | None, limit: int, depth: int, seconds: float
    ) -> tuple[Copy | None, int]:
        started = self.clock()
        self.digest()  # the previous round's, while the device drafts
        if draft.copied is not None:
            this = self.copying.alone(draft.copied, depth, self.parked)
        else:
            this = self.drafted(draft, lookup, limit, depth)
        self.newest, this.begun = this, self.clock()
        this.drafting = seconds + this.begun - started
        return this.copy, min(this.chosen, limit)

    def drafted(self, draft: Draft, lookup: Lookup | None, limit: int, depth: int) -> Round:
        """The best round with the draft, whose evidence is read if it comes with any."""
        self.constant.rounds += 1
        if draft.evidence is None:
            return Round(depth, chosen=self.constant.length)
        known, count = Evidence.of(draft, self.chances.calibration), len(draft.tokens)
        if lookup is not None:
            greedy = self.chances.of(known.greedy)
            spliced = self.copying.splice(draft, greedy, lookup, limit, depth)
            if spliced is not None:
                return spliced
        this = self.forecast.choose(known, min(limit, count), depth, self.sampler is not None)
        if lookup is not None and draft.q is not None and this.chosen == count < limit:
            self.copying.extend(this, draft.tokens.tolist(), lookup, limit)
        return this

    def learn(self, accepted: int, offered: int) -> None:
        assert self.newest is not None
        this, depth = self.newest, self.newest.depth
        this.verifying, this.accepted, this.offered = self.clock() - this.begun, accepted, offered
        off = (this.drafting + this.verifying) / this.seconds(self.costs)
        if this.values and not (self.costs.seen["draft"] and 1 / OFF < off < OFF):
            self.digest()
        seconds, plain = this.seconds(self.costs), self.costs.plain(depth)
        if this.drafted:  # the drafter answers for its own tokens
            own = this.own
            self.budget.round_over(1 + min(accepted, own) - self.costs.round(own, depth) / plain)
        self.forget_probe()  # none goes on across a round
        if not self.parked:
            tokens = expected_tokens(this.chances[:offered]) if this.chances else 1 + accepted
            self.forecast.count(tokens, seconds)
        self.account.round_over(this, 1 + accepted - seconds / plain)
        if not self.parked:
            self.go_on(depth)

    def go_on(self, depth: int) -> None:
        """After a round, draft again, or park, or time plain decoding."""
        self.rounds_left -= 1
        self.unpark(depth)
        if self.parked:
            if not self.budget.spent:
                self.budget.close()
            self.account.parking(depth)
        elif self.rounds_left <= 0:
            self.check_plain(depth)
        if self.parked:
            self.digest()

    def digest(self) -> None:
        """Learn costs and chances from the newest round, if it was completed."""
        this, self.newest = self.newest, None
        if this is None or this.offered < 0 or not this.chances:
            return
        for slot in range(min(this.offered, this.accepted + 1)):
            of, first = (self.chances, 0) if slot < this.own else (self.copying.offered, this.own)
            of.update(slot - first, this.chances[slot], float(slot < this.accepted))
        if this.own:
            self.chances.round_over()
        self.costs.observe("verify", this.verifying, this.depth, 1 + this.offered)
        if this.drafted:
            self.costs.observe("draft", this.drafting, this.depth)
        if this.copy is not None:
            self.copying.offered.round_over()
        elif len(this.values) == len(self.constant.values):
            self.constant.round_over(this.values, this.chosen)

    # ---- plain tokens, some of them timed

    def check_plain(self, depth: int) -> None:
        """Time a few plain tokens, seldom enough to lose at most a quarter of SHARE."""
        lost = CHECK * (self.forecast.rate(depth) * self.costs.plain(depth) - 1)
        tokens = self.forecast.tokens / MEMORY  # per round
        self.rounds_left = max(MEMORY, int(lost / (SHARE / 4) / tokens)) if tokens else MEMORY
        self.parked, self.check = True, CHECK

    def plain_token(self, token: int, logprobs: mx.array, waiting: float, depth: int) -> None:
        self.budget.since += 1
        self.time_token(waiting, depth)
        if self.check:
            self.check -= 1
            if not self.check:
                self.unpark(depth)
        else:
            self.account.parked += 1
        if self.probe is not None:
            self.compare(self.probe, token, logprobs, depth)

    def time_token(self, waiting: float, depth: int) -> None:
        """Learn what plain decoding costs; and a draft, from the two plain tokens that waited for
        it, if it is much: a cheap one is lost in their scatter."""
        now, plain, last = self.clock(), self.costs.plain(depth), self.last
        due = last > 0 and (self.check > 0 or self.budget.since % SPAN == 0)
        self.last = now
        if self.late:
            self.waited += now - (self.asked if self.late == 2 else waiting)
            self.late -= 1
            if not self.late and self.waited > 3 * plain:
                self.costs.observe("draft", self.waited - 2 * plain, depth)
        elif due and now - waiting > 0.5 * (now - last):  # else the reader was slow
            self.costs.observe("plain", now - last, depth)

    # ---- drafts that are only watched

    def probe_due(self, depth: int) -> bool:
        if not self.parked or self.check or self.probe is not None:
            return False
        self.asked = self.clock()
        share = self.costs.probe_share(depth)
        return self.budget.probe_due(share) and not self.forecast.hopeless(depth)

    def start_probe(self, draft: Draft) -> None:
        self.probe, self.late, self.waited = Probe(draft), 2, 0.0
        self.chances.forget_half()
        self.budget.since, self.budget.eager = 0, False
        self.statistics.probes += 1

    def forget_probe(self) -> None:
        self.probe = None
        self.last, self.late = 0.0, 0  # clock at the last token; tokens that wait for the draft

    def compare(self, probe: Probe, token: int, logprobs: mx.array, depth: int) -> None:
        """Compare a plain token with the watched draft; the first that differs ends the probe."""
        if not probe.compare(token, logprobs, self.chances, self.sampler):
            self.probe = None
            self.finish_probe(probe, depth)

    def finish_probe(self, probe: Probe, depth: int) -> None:
        """Book what a round with the watched draft would have won: the mean of expected and actual
        tokens, less its time."""
        sampled = self.sampler is not None
        if not sampled:  # else a good draft is often another one than was drawn
            self.statistics.own_drafts[probe.slot] += 1
        this = self.forecast.choose(probe.evidence, len(probe.tokens), depth, sampled)
        seconds = self.costs.round(this.chosen, depth)
        tokens = expected_tokens(this.chances[: this.chosen])
        self.forecast.count(tokens, seconds, fading=1 / 3)
        tokens = (tokens + 1 + min(probe.slot, this.chosen)) / 2
        self.budget.probe_over(tokens - seconds / self.costs.plain(depth))
        self.unpark(depth)
        self.account.probing(self.budget.balance, self.parked, depth)

    def verdict(self, depth: int) -> str:
        """Why this text was drafted or not, for the summary; the text is over."""
        self.digest()
        self.text_over()
        return self.account.verdict(self.parked, depth)

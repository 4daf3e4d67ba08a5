"""The policy that chooses: how many drafted tokens each round offers, and whether to draft at all.

Plain decoding is one more choice: drafting is parked while it wins. The rules, which are lossless,
are in `dspine_mlx.verify_length.rules`.
"""

import time
from collections.abc import Callable
from statistics import median

import mlx.core as mx
from mlx_lm.sample_utils import Sampler as SamplerFunction

from dspine_mlx.round.draft_context import BACKLOG
from dspine_mlx.round.lookup import Copy, CopyChances, Lookup
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft
from dspine_mlx.round.statistics import Statistics
from dspine_mlx.verify_length import copy_rounds
from dspine_mlx.verify_length import explain as words
from dspine_mlx.verify_length.budget import SHARE, Budget
from dspine_mlx.verify_length.calibration import Calibration
from dspine_mlx.verify_length.chances import Chances, expected_tokens
from dspine_mlx.verify_length.copying import Copying
from dspine_mlx.verify_length.costs import Costs
from dspine_mlx.verify_length.reading import Reading
from dspine_mlx.verify_length.records import Evidence, Probe, Round
from dspine_mlx.verify_length.rules import (
    length_values,
    sampled_verify_length,
    token_values,
)

HOPE = 1.1  # speed that perfect drafts must reach for drafting to be tried
MEMORY = 16  # rounds over which tokens and seconds fade; also the fewest between two checks
CHECK = 3  # plain tokens decoded while drafting, to time them
SPAN = 8  # plain tokens timed together while parked
OFF = 1.5  # costs are learnt before a round is booked if its time is off by this factor


class Auto:
    """Length and parking from measured costs and calibrated chances.

    What a user can be told: `budget.balance`, the plain tokens that drafting may still lose;
    `gain`, the speed of recent rounds over that of plain decoding; `budget.wait`, the plain tokens
    between drafts made while parked.

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
        self.costs, self.chances, self.budget = costs, Chances(calibration), budget or Budget()
        self.explain, self.clock, self.text_over = explain, clock, text_over
        self.reading = Reading(len(calibration.biases))
        self.slots = len(calibration.biases)
        self.copying = Copying()
        self.known: tuple[Draft, Evidence] | None = None  # the newest draft that was read
        self.tokens = self.seconds = 0.0  # of recent rounds, fading
        self.newest: Round | None = None  # until it has been learnt from
        self.rounds_left = MEMORY  # before plain decoding is timed again
        self.parked, self.check = False, 0  # check: plain tokens left of one
        self.statistics, self.account = Statistics(), words.Account()
        self.sampler: Sampler | None = None
        self.probe: Probe | None = None
        self.time_plain()

    @property
    def needs_evidence(self) -> bool:
        return self.parked or self.reading.due or self.copying.contest is not None

    @property
    def copies(self) -> CopyChances:
        return self.copying.chances

    def start_text(self, statistics: Statistics, sampler: SamplerFunction, depth: int) -> None:
        self.digest()
        self.statistics, self.account = statistics, words.Account()
        sampled = isinstance(sampler, Sampler) and sampler.temp > 0 and not sampler.seeded
        self.sampler = sampler if sampled else None
        self.probe = None
        if self.budget.spent:
            self.chances.forget_half()
        self.budget.start_text(self.costs.probe_share(depth))
        self.check = 0
        self.unpark(depth)
        self.time_plain()
        if not self.parked and not self.costs.seen["plain"]:
            self.check_plain(depth)

    def unpark(self, depth: int) -> None:
        """Draft again, if the budget allows it and drafting is not hopeless."""
        self.parked = self.budget.spent or self.hopeless(depth)

    def rate(self, depth: int) -> float:
        """Tokens per second of recent rounds, or of plain decoding where that is faster."""
        plain = 1 / self.costs.plain(depth)
        return max(plain, self.tokens / self.seconds) if self.seconds else plain

    def gain(self, depth: int) -> float:
        """Speed of recent rounds over that of plain decoding."""
        return self.tokens / self.seconds * self.costs.plain(depth) if self.seconds else 1.0

    def hopeless(self, depth: int) -> bool:
        """Whether plain decoding wins even if every drafted token is accepted."""
        return self.costs.hopeless(depth, HOPE, self.slots)

    def keeps_context(self, depth: int) -> bool:
        """Whether a full backlog is worth taking in while parked. It takes a draft's time at most,
        which may be SHARE of the time that its plain tokens took."""
        affordable = self.costs.probe_share(depth) <= SHARE * BACKLOG
        return affordable and not self.hopeless(depth)

    def choose(self, known: Evidence, limit: int, depth: int) -> Round:
        """The length for this round; `limit` is smaller near max_tokens."""
        chances = self.chances.of(known.odds)
        greedy = chances if known.greedy is known.odds else self.chances.of(known.greedy)
        seconds, w = self.costs.verify(depth), self.seconds_saved(greedy, limit, depth)
        values = length_values(chances[:limit], seconds, w)
        if self.sampler is None:
            length = values.index(max(values))
        else:
            length = sampled_verify_length(chances[:limit], greedy, seconds, w)
        return Round(depth, 0.0, chances=chances[:limit], values=values, chosen=length)

    def seconds_saved(self, chances: list[float], limit: int, depth: int) -> list[float]:
        """Seconds that each of the next `limit` tokens saves, if they have these chances."""
        plain, draft = self.costs.plain(depth), self.costs.draft(depth)
        # No block goes on beyond the text's last tokens.
        rate = self.rate(depth) if limit >= len(chances) else 1 / plain
        return token_values(chances[:limit], self.costs.verify(depth), draft, plain, rate)

    def copy_pays(self, copy: Copy, depth: int, running: int = 0) -> bool:
        if self.check:
            return False
        rate = None if self.parked else self.rate(depth)
        return self.copying.pays(copy, running, self.costs, depth, rate) is not None

    def splice(self, draft: Draft, lookup: Lookup, limit: int, depth: int) -> Copy | None:
        if draft.evidence is None:
            return None
        self.digest()
        return copy_rounds.splice(self, draft, lookup, limit, depth)

    def extend(self, draft: Draft, lookup: Lookup, limit: int, depth: int) -> Copy | None:
        return copy_rounds.extend(self, draft, lookup, limit, depth)

    def length(self, draft: Draft, limit: int, depth: int, seconds: float) -> int:
        started = self.clock()
        if draft.copied is not None:
            return copy_rounds.start(self, draft.copied, limit, depth)
        self.digest()  # the previous round's, while the device drafts
        self.reading.rounds += 1
        if draft.evidence is None:
            self.newest = Round(depth, self.clock())
            return min(self.reading.constant, limit)
        known = self.read(draft)
        now = self.clock()
        self.newest = self.choose(known, limit, depth)
        self.newest.begun, self.newest.drafting = now, seconds + now - started
        return self.newest.chosen

    def read(self, draft: Draft) -> Evidence:
        if self.known is None or self.known[0] is not draft:
            self.known = draft, Evidence.of(draft, self.chances.calibration)
        return self.known[1]

    def learn(self, accepted: int, offered: int) -> None:
        assert self.newest is not None
        this, depth = self.newest, self.newest.depth
        this.verifying, this.accepted, this.offered = self.clock() - this.begun, accepted, offered
        if this.copied is not None:
            copy_rounds.learn(self, this)
            return
        seconds = self.costs.round(offered, depth)
        off = (this.drafting + this.verifying) / seconds
        unforeseen = not self.costs.seen["draft"] or not 1 / OFF < off < OFF
        if this.chances and unforeseen:
            self.digest()
            seconds = self.costs.round(offered, depth)
        tokens = expected_tokens(this.chances[:offered]) if this.chances else 1 + accepted
        self.count(tokens, seconds, fading=1 / MEMORY)
        gain = 1 + accepted - seconds / self.costs.plain(depth)
        self.budget.round_over(gain)
        self.end_round(this, gain)

    def end_round(self, this: Round, gain: float) -> None:
        """Account for a round's gain, in plain tokens, and decide whether to draft again."""
        depth = this.depth
        self.account.round_over(gain)
        if self.explain:
            self.explain(words.round_line(this, self.costs, self.rate(depth)))
        if self.parked:
            return
        self.rounds_left -= 1
        if self.budget.spent or self.hopeless(depth):
            self.park(depth)
        elif self.rounds_left <= 0:
            self.check_plain(depth)
        if self.parked:
            self.digest()

    def digest(self) -> None:
        """Learn costs and chances from the newest round, if it was completed."""
        this, self.newest = self.newest, None
        if this is None or this.offered < 0 or not this.chances:
            return
        before = this.offered if this.copied is None else this.copied
        for slot in range(min(this.offered, this.accepted + 1)):
            own, first = (self.chances, 0) if slot < before else (self.copying.offered, before)
            own.update(slot - first, this.chances[slot], float(slot < this.accepted))
        if before:
            self.chances.round_over()
        if this.copied is not None:
            self.copying.offered.round_over()
            self.costs.observe("verify", 1 + this.offered, this.verifying, this.depth)
            return
        self.costs.observe_round(this.drafting, this.verifying, 1 + this.offered, this.depth)
        if len(this.values) == len(self.reading.values):
            self.reading.round_over(this.values, this.chosen)

    def count(self, tokens: float, seconds: float, fading: float) -> None:
        """Take a round into the running sums."""
        self.tokens = (1 - fading) * self.tokens + tokens
        self.seconds = (1 - fading) * self.seconds + seconds

    def check_plain(self, depth: int) -> None:
        """Time a few plain tokens, seldom enough to lose at most a quarter of SHARE."""
        lost = CHECK * (self.gain(depth) - 1)
        distance = lost / (SHARE / 4) * MEMORY / self.tokens if self.tokens else 0.0
        self.rounds_left = max(MEMORY, int(distance))
        self.parked, self.check = True, CHECK
        self.time_plain()

    def park(self, depth: int) -> None:
        if not self.budget.spent:
            self.budget.close()
        self.parked = True
        self.time_plain()
        if self.explain:
            self.explain(f"parked at {depth}: {words.parking(self, depth)}")

    def probe_due(self, depth: int) -> bool:
        if not self.parked or self.check or self.probe is not None:
            return False
        self.asked = self.clock()
        return self.budget.probe_due(self.costs.probe_share(depth)) and not self.hopeless(depth)

    def start_probe(self, draft: Draft) -> None:
        self.probe = Probe(draft)
        self.chances.forget_half()
        self.budget.since, self.budget.eager = 0, False
        self.last, self.late, self.waited = 0.0, 2, 0.0
        self.statistics.probes += 1

    def time_plain(self) -> None:
        """Start timing plain tokens."""
        self.last, self.times = 0.0, list[float]()  # clock at the last token; 0: not usable
        # Tokens still to come that wait for a probe's draft, and the time that they took.
        self.late, self.waited = 0, 0.0

    def plain_token(self, token: int, logprobs: mx.array, waiting: float, depth: int) -> None:
        now = self.clock()
        self.budget.since += 1
        if self.last > 0 and now - waiting > 0.5 * (now - self.last):  # else the reader was slow
            self.times.append(now - self.last)
            if len(self.times) == SPAN:
                self.costs.scattered(self.times)
                self.times = [median(self.times)]
                self.observe_plain(depth)
        if self.late:
            self.waited += now - (self.asked if self.late == 2 else waiting)
            self.late -= 1
            if not self.late:
                self.observe_probe(depth)
        self.last = now if not self.late else 0.0
        if self.check:
            self.check -= 1
            if not self.check:
                self.observe_plain(depth)
                self.unpark(depth)
        else:
            self.account.parked += 1
        if self.probe is not None:
            self.compare(self.probe, token, logprobs, depth)

    def observe_plain(self, depth: int) -> None:
        """Learn from the plain tokens timed so far."""
        for seconds in self.times:
            self.costs.observe_plain(seconds, depth)
        self.times.clear()

    def observe_probe(self, depth: int) -> None:
        """Learn what a draft costs from the two plain tokens that waited for it, if it is much: a
        cheap one is lost in their scatter."""
        draft, plain = self.waited - 2 * self.costs.plain(depth), self.costs.plain(depth)
        if draft > plain:
            self.costs.observe_draft(draft, depth)

    def compare(self, probe: Probe, token: int, logprobs: mx.array, depth: int) -> None:
        """Compare a plain token with the watched draft; the first that differs ends the probe."""
        if probe.slot == 0:
            probe.evidence, probe.tokens = self.read(probe.draft), probe.draft.tokens.tolist()
        slot, agrees = probe.slot, probe.tokens[probe.slot] == token
        accepted = float(agrees)
        if self.sampler is not None and probe.draft.q is not None:
            accepted = probe.acceptance(self.sampler.probs(logprobs[None]))
        self.chances.update(slot, self.chances.of(probe.evidence.odds)[slot], accepted)
        probe.slot += agrees
        if not agrees or probe.slot == len(probe.tokens):
            self.probe = None
            self.finish_probe(probe, depth)

    def finish_probe(self, probe: Probe, depth: int) -> None:
        """Book what a round with the watched draft would have won."""
        this = self.choose(probe.evidence, len(probe.tokens), depth)
        seconds = self.costs.round(this.chosen, depth)
        tokens = expected_tokens(this.chances[: this.chosen])
        self.count(tokens, seconds, fading=1 / 3)
        tokens = (tokens + 1 + min(probe.slot, this.chosen)) / 2  # mean of expected and actual
        self.budget.probe_over(tokens - seconds / self.costs.plain(depth))
        self.unpark(depth)
        if self.explain:
            self.explain(f"probe at {depth}: {words.probing(self, depth)}")

    def verdict(self, depth: int) -> str:
        """Why this text was drafted or not, for the summary; the text is over."""
        self.digest()
        self.text_over()
        return words.verdict(self, depth)

"""The policy that chooses: how many drafted tokens each round offers, and whether to draft at all.

Plain decoding is one more choice: drafting is parked while it wins. The rules, which are lossless,
are in `dspine_mlx.verify_length.rules`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from statistics import median

import mlx.core as mx
from mlx_lm.sample_utils import Sampler as SamplerFunction

from dspine_mlx.round.accept import acceptance
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft
from dspine_mlx.round.statistics import Statistics
from dspine_mlx.verify_length.budget import FIRST, LEAST, Ledger
from dspine_mlx.verify_length.calibration import Calibration
from dspine_mlx.verify_length.chances import Belief
from dspine_mlx.verify_length.constant import Constant
from dspine_mlx.verify_length.costs import Costs
from dspine_mlx.verify_length.rules import length_values, sampled_verify_length, token_values

LOSING = 0.7  # expected speed over plain decoding below which no more is to be lost to find out
RESUME = 1.02  # expected speed over plain decoding above which parked drafting starts again
FIRST_PROBE, LAST_PROBE = 16, 256  # plain tokens between probes; doubled by every one that fails
SHARE = 0.01  # of the time, at most, for probes
SPAN = 8  # plain tokens timed together
HOPE = 1.1  # speed that perfect drafts must reach for a probe to be worth it
CHECK, STRETCH = 16, 3  # rounds, at least, before STRETCH plain tokens are timed again
CLEAR = 1.3  # expected speed from which that is not needed
MEMORY = 16  # rounds over which tokens and seconds fade


@dataclass
class Watch:
    """A draft beside plain decoding, and the slot that the next token is compared with."""

    draft: Draft
    tokens: list[int] = field(default_factory=list)
    odds: list[float] = field(default_factory=list)
    greedy_path: list[float] = field(default_factory=list)
    slot: int = 0


@dataclass
class Round:
    """A round in the making, and what came of it; without chances if its evidence isn't read."""

    depth: int
    greedy_path: list[float] = field(default_factory=list)  # log-odds along the greedy path
    chances: list[float] = field(default_factory=list)
    drafting: float = 0.0  # seconds
    begun: float = 0.0  # the clock when verifying began
    values: list[float] = field(default_factory=list)  # seconds that each length is worth
    chosen: int = -1  # the length, which a draft filter may cut
    verifying: float = 0.0  # seconds
    offered: int = -1  # until verified
    accepted: int = 0


class Auto:
    """Length and parking from measured costs and calibrated chances.

    Tokens are counted as expected and time as predicted by the costs, over recent rounds: both have
    less noise than single rounds. When rounds have lost too much to plain decoding (`Ledger`),
    drafting is parked.
    While parked, a draft is made now and then and only compared with the plain tokens that follow,
    so a probe costs one proposal. It is repeated less and less often while it shows no gain. A new
    text is drafted again while the ledger lets it owe more than a token, unless rounds lost far too
    much.
    While drafting, a few plain tokens now and then keep the cost of plain decoding known, and where
    reading evidence loses (`Constant`), one length is offered without it for a while.
    """

    def __init__(
        self,
        costs: Costs,
        calibration: Calibration,
        explain: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.costs, self.belief = costs, Belief(calibration)
        self.explain, self.clock = explain, clock
        self.parked = False
        self.constant = Constant(len(calibration.biases))
        self.tokens = self.seconds = 0.0  # of recent rounds, fading
        self.rounds = 0
        self.ledger = Ledger()
        self.newest: Round | None = None  # until it has been learnt from
        self.stretch = 0  # plain tokens left of a check
        self.rounds_left = CHECK  # before plain decoding is timed again
        self.interval = self.countdown = FIRST_PROBE
        self.sampler: Sampler | None = None
        self.start_text(Statistics(), lambda x: x, 0)

    @property
    def needs_evidence(self) -> bool:
        return self.parked or not self.constant.unread

    def start_text(self, statistics: Statistics, sampler: SamplerFunction, depth: int) -> None:
        self.digest()
        self.statistics = statistics
        sampled = isinstance(sampler, Sampler) and sampler.temp > 0 and not sampler.seeded
        self.sampler = sampler if sampled else None
        self.watched: Watch | None = None
        self.time_plain()
        if self.stretch:  # the last text ended within a check
            self.parked, self.stretch = False, 0
        if self.parked and self.interval < LAST_PROBE:  # the last text may have been a hard one
            self.belief.relax()
            self.tokens, self.seconds, self.countdown = self.tokens / 4, self.seconds / 4, 0
            self.parked = self.ledger.allowance <= LEAST or self.gain(depth) < LOSING
            if self.explain and not self.parked:
                self.explain(f"another text: drafted again at {depth}")
        if self.hopeless(depth):
            self.parked = True

    def pause(self, depth: int) -> None:
        """Until the next probe: `interval` plain tokens, or more where drafts are dear."""
        dear = int(self.costs.draft(depth) / self.costs.plain(depth) / SHARE)
        self.interval = max(self.interval, min(dear, LAST_PROBE // 2))
        self.countdown = max(self.interval, dear)

    def rate(self, depth: int) -> float:
        """Tokens per second reached: of recent rounds, or of plain decoding where that is more."""
        plain = 1 / self.costs.plain(depth)
        return max(plain, self.tokens / self.seconds) if self.rounds else plain

    def gain(self, depth: int) -> float:
        """Speed of recent rounds over that of plain decoding."""
        return self.tokens / self.seconds * self.costs.plain(depth) if self.rounds else 1.0

    def hopeless(self, depth: int) -> bool:
        """Whether plain decoding wins even if every drafted token stands."""
        draft, rows = self.costs.draft(depth), self.costs.verify(depth)
        best = max(tokens / (draft + row) for tokens, row in enumerate(rows, 1))
        return self.costs.curve.measured and best * self.costs.plain(depth) < HOPE

    def choose(self, this: Round, limit: int) -> int:
        """Tokens to feed of a round's draft, whose limit is lower where the text ends."""
        costs, depth, chances = self.costs, this.depth, this.chances[:limit]
        plain, rate = costs.plain(depth), self.rate(depth)
        if limit < len(this.chances):  # no block goes on beyond the text's last tokens
            rate = 1 / plain
        survival, seconds = self.belief.survival(this.greedy_path[:limit]), costs.verify(depth)
        w = token_values(survival, seconds, costs.draft(depth), plain, rate)
        this.values = length_values(chances, seconds, w)
        if self.sampler is None:
            return this.values.index(max(this.values))
        return sampled_verify_length(chances, self.belief.chances(this.greedy_path), seconds, w)

    def length(self, draft: Draft, limit: int, depth: int, seconds: float) -> int:
        started = self.clock()
        self.digest()  # of the round before, while the device drafts
        if draft.evidence is None:
            self.newest = Round(depth, begun=self.clock())
            return min(self.constant.length, limit)
        mx.eval(draft.tokens, draft.evidence, draft.greedy_path)
        now = self.clock()
        odds, greedy_path = self.log_odds(draft)
        chances = self.belief.chances(odds)
        self.newest = Round(depth, greedy_path, chances, seconds + now - started, now)
        self.newest.chosen = self.choose(self.newest, limit)
        return self.newest.chosen

    def log_odds(self, draft: Draft) -> tuple[list[float], list[float]]:
        """Of the draft's tokens, and of those on the greedy path."""
        assert draft.evidence is not None
        of = self.belief.calibration.block_log_odds
        odds = of(draft.evidence.log_odds())
        return odds, odds if draft.greedy_path is None else of(draft.greedy_path.log_odds())

    def learn(self, accepted: int, offered: int) -> None:
        assert self.newest is not None
        this, depth = self.newest, self.newest.depth
        this.verifying, this.accepted, this.offered = self.clock() - this.begun, accepted, offered
        seconds = self.costs.draft(depth) + self.costs.verify(depth)[offered]
        if this.chances:
            self.count(expected(this.chances[:offered]), seconds, fading=1 / MEMORY)
        else:
            self.constant.unread -= 1
            self.count(1 + accepted, seconds, fading=1 / MEMORY)
        self.ledger.round_over(1 + accepted, seconds, self.costs.plain(depth))
        if self.explain:
            self.explain(self.describe(this))
        self.rounds_left -= 1
        losing = self.rounds >= 2 and self.gain(depth) < LOSING
        if self.ledger.overdrawn or (losing and self.ledger.owed > FIRST / 2):
            self.park(depth)
        elif self.rounds_left <= 0 and self.gain(depth) < CLEAR:
            self.check_plain(depth)
        if self.parked:
            self.digest()

    def digest(self) -> None:
        """Learn costs and chances from the newest round, if it came to its end."""
        this, self.newest = self.newest, None
        if this is None or this.offered < 0:
            return
        chances = this.chances or self.belief.chances(self.belief.usual)
        if this.chances:
            self.costs.observe_round(this.drafting, this.verifying, 1 + this.offered, this.depth)
            self.belief.round_over(this.greedy_path)
        for slot in range(min(this.offered, this.accepted + 1)):
            self.belief.update(slot, chances[slot], float(slot < this.accepted))
        if len(this.values) == len(chances) + 1:
            seconds = self.costs.draft(this.depth) + self.costs.verify(this.depth)[this.chosen]
            self.constant.round_over(this.values, this.chosen, seconds)

    def check_plain(self, depth: int) -> None:
        """Time a few plain tokens, so seldom that they lose SHARE of the time at most."""
        lost = STRETCH * (self.gain(depth) - 1)
        self.rounds_left = max(CHECK, int(lost / SHARE * MEMORY / self.tokens))
        self.parked, self.stretch = True, STRETCH
        self.time_plain()

    def count(self, tokens: float, seconds: float, fading: float) -> None:
        """Take a round into the running sums."""
        self.tokens = (1 - fading) * self.tokens + tokens
        self.seconds = (1 - fading) * self.seconds + seconds
        self.rounds += 1

    def park(self, depth: int) -> None:
        self.parked, self.stretch, self.interval = True, 0, FIRST_PROBE
        self.ledger.close()
        self.pause(depth)
        self.time_plain()
        if self.explain:
            self.explain(f"parked at {depth}: {self.comparison(depth)}")

    def probe_due(self, depth: int) -> bool:
        if not self.parked or self.stretch or self.watched is not None or self.countdown > 0:
            return False
        hopeless = self.hopeless(depth)
        if hopeless:  # ask again later, not at every token
            self.countdown = FIRST_PROBE
        return not hopeless

    def start_probe(self, draft: Draft) -> None:
        self.watched = Watch(draft)
        self.last = -1.0  # the draft takes its time from the next two tokens
        self.statistics.probes += 1

    def time_plain(self) -> None:
        """Start timing plain tokens."""
        self.last, self.times = 0.0, list[float]()  # clock at the last token; 0: not usable

    def plain_token(self, token: int, logprobs: mx.array, waiting: float, depth: int) -> None:
        now = self.clock()
        self.countdown -= 1
        if self.last > 0 and now - waiting > 0.5 * (now - self.last):  # else the reader was slow
            self.times.append(now - self.last)
            if len(self.times) == SPAN:
                self.observe_plain(depth)
        self.last = now if self.last >= 0 else 0.0
        if self.stretch:
            self.stretch -= 1
            if not self.stretch:
                self.observe_plain(depth)
                self.parked = False
        if self.watched:
            self.compare(self.watched, token, logprobs, depth)

    def observe_plain(self, depth: int) -> None:
        """Learn from the plain tokens timed so far."""
        if self.times:
            self.costs.observe_plain(median(self.times), depth)
            self.times.clear()

    def compare(self, watch: Watch, token: int, logprobs: mx.array, depth: int) -> None:
        """One plain token against the watched draft; at the first that differs the probe ends."""
        if watch.slot == 0:
            watch.tokens = watch.draft.tokens.tolist()
            watch.odds, watch.greedy_path = self.log_odds(watch.draft)
        slot, agrees = watch.slot, watch.tokens[watch.slot] == token
        stood = float(agrees)
        if self.sampler is not None and watch.draft.q is not None:
            here = slice(slot, slot + 1)
            one = Draft(watch.draft.tokens[here], watch.draft.candidates[here], watch.draft.q[here])
            stood = acceptance(one, self.sampler.probs(logprobs[None])).item()
        self.belief.update(slot, self.belief.chances(watch.odds)[slot], stood)
        watch.slot += 1
        if not agrees or watch.slot == len(watch.tokens):
            self.watched = None
            self.judge(watch, depth)

    def judge(self, watch: Watch, depth: int) -> None:
        """After a probe: resume, look again soon, or wait twice as long."""
        self.belief.round_over(watch.greedy_path)
        this = Round(depth, watch.greedy_path, self.belief.chances(watch.odds))
        length = self.choose(this, len(this.chances))
        tokens = expected(this.chances[:length])
        seconds = self.costs.draft(depth) + self.costs.verify(depth)[length]
        self.count(tokens, seconds, fading=1 / 3)
        promising = tokens / seconds * self.costs.plain(depth) > RESUME
        self.interval = FIRST_PROBE // 2 if promising else min(2 * self.interval, LAST_PROBE)
        self.pause(depth)
        self.parked = self.gain(depth) < RESUME
        if self.explain:
            self.explain(f"probe at {depth}: {self.comparison(depth)}")

    def describe(self, this: Round) -> str:
        """A round in a line: chances that each prefix stands, costs, choice, outcome."""
        if not this.chances:
            return f"at {this.depth}: offered {this.offered} unread, {this.accepted} stood"
        survival = " ".join(f"{a:.2f}" for a in accumulate(this.chances, mul))
        rows = " ".join(f"{1e3 * s:.1f}" for s in self.costs.verify(this.depth))
        return (
            f"at {this.depth}: survival {survival}; ms to draft {1e3 * this.drafting:.1f}, "
            f"to verify 1.. rows {rows}; {self.rate(this.depth):.1f} tokens/s; "
            f"offered {this.offered}, took {1e3 * this.verifying:.1f} ms, {this.accepted} stood"
        )

    def comparison(self, depth: int) -> str:
        """Recent rounds against plain decoding, in words."""
        plain = 1e3 * self.costs.plain(depth)
        if self.hopeless(depth):
            rows = self.costs.verify(depth)
            whole = 1e3 * (self.costs.draft(depth) + rows[-1])
            return (
                f"even if all {len(rows) - 1} drafted tokens stood, a round would take "
                f"{whole:.1f} ms, and plain decoding gives {len(rows)} tokens in "
                f"{len(rows) * plain:.1f} ms"
            )
        if not self.rounds:
            return "no round yet"
        each = 1e3 * self.seconds / self.tokens
        return (
            f"a drafted token is expected to take {each:.1f} ms, a plain one {plain:.1f} ms "
            f"({self.gain(depth):.2f} times the speed)"
        )

    def verdict(self, depth: int) -> str:
        """Why this text was drafted or not, for the summary; the text is over."""
        self.digest()
        done = self.statistics
        if not done.plain:
            return f"drafted throughout: {self.comparison(depth)}"
        if not done.rounds:
            return f"not drafted: {self.comparison(depth)}"
        return (
            f"drafting was parked for {done.plain} tokens, with {done.probes} probes: "
            f"{self.comparison(depth)}"
        )


def expected(chances: Sequence[float]) -> float:
    """Tokens of a round that offers tokens with these chances."""
    return 1 + sum(accumulate(chances, mul))

"""The verify length: how many drafted tokens each round offers, and whether to draft at all.

With a_j the chance that the first j drafted tokens stand, and T(k) the seconds of a forward over k
rows, a round of l drafted tokens emits 1 + a_1 + ... + a_l tokens. The most tokens per second in
the long run come from

    argmax_l  a_1 + ... + a_l - rate * T(1 + l),    rate = tokens per second actually reached,

and plain decoding is one more choice. Every rule here is lossless: `verify_length` is for greedy
targets and one-hot drafts, where any rule is; `admitted` for sampled drafts, where row k may depend
on the tokens up to the one it feeds, because the token after the last row is tested too.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import Sampler as SamplerFunction

from dspine_mlx.belief import Belief
from dspine_mlx.calibration import (
    Calibration,
    fit_temperatures,
    load_calibrations,
    mode_of,
    uncalibrated,
)
from dspine_mlx.costs import Costs, costs_of
from dspine_mlx.dflash import DFlash
from dspine_mlx.errors import InputError
from dspine_mlx.response import Statistics
from dspine_mlx.sampling import Sampler
from dspine_mlx.selection import Draft
from dspine_mlx.verification import acceptance

__all__ = ["Auto", "Fixed", "Policy", "admitted", "fit_temperatures", "policy_for", "verify_length"]

# Expected speed over plain decoding: below PARK drafting stops, above RESUME it starts again.
PARK, RESUME = 1.0, 1.02
FIRST_PROBE, LAST_PROBE = 16, 256  # plain tokens between probes; doubled by every one that fails
HOPE = 1.1  # speed that perfect drafts must reach for a probe to be worth it
CHECK, STRETCH = 16, 3  # rounds before STRETCH plain tokens are timed again; then 4 times as many
CLEAR = 2.0  # expected speed from which that is not needed


def verify_length(chances: np.ndarray, seconds: np.ndarray, rate: float) -> int:
    """argmax_l a_1 + ... + a_l - rate * seconds[l], a the running product of the chances.

    chances: of each drafted token given the ones before; seconds[l]: a forward over 1 + l rows;
    rate: tokens per second that time is worth. Steps in the costs are looked across.
    """
    gains = np.concatenate([[0.0], np.cumsum(np.cumprod(chances))])
    return int(np.argmax(gains - rate * seconds[: len(gains)]))


def admitted(chances: np.ndarray, outlook: np.ndarray, seconds: np.ndarray, rate: float) -> int:
    """Rows admitted one after another, for a draft that was sampled.

    chances[k] is the chance of drafted token k + 1, known from the tokens before it. Whether row k
    is fed may depend on x_1 .. x_k, so on chances[: k + 1]; slots beyond are expected to have the
    chances of the greedy path, `outlook`, which no draw has a part in. The first row that neither
    pays for itself nor leads to rows that pay ends the block. Backward induction over the whole
    table gains less than 0.5 % more (`tests/bench/stopping.py`).
    """
    stands = 1.0
    for k in range(1, len(chances) + 1):
        stands *= chances[k - 1]
        known = chances[k : k + 1]
        ahead = np.concatenate([[1.0], known, outlook[k + 1 : len(chances)]])
        gains = stands * np.cumsum(np.cumprod(ahead))
        if (gains <= rate * (seconds[k : k + len(gains)] - seconds[k - 1])).all():
            return k - 1
    return len(chances)


class Policy(Protocol):
    """What generation asks, and tells."""

    parked: bool  # plain decoding, until further notice

    def begin(self, statistics: Statistics, sampler: SamplerFunction, depth: int) -> None:
        """A new text starts after depth tokens."""

    def length(self, draft: Draft, limit: int, depth: int, seconds: float) -> int:
        """Tokens of the draft to feed, at most limit; seconds were spent on starting it."""

    def learn(self, accepted: int, offered: int) -> None:
        """The round is over; accepted of the offered tokens stood."""

    def probing(self, depth: int) -> bool:
        """Whether to draft now while decoding plainly, only to be watched."""

    def watch(self, draft: Draft) -> None:
        """A draft that the next plain tokens will be compared with."""

    def plain(self, token: int, logprobs: mx.array, waiting: float, depth: int) -> None:
        """A plain token, which the caller has waited for since the clock's reading waiting."""

    def hopeless(self, depth: int) -> bool:
        """Whether plain decoding wins even if every drafted token stands."""

    def verdict(self, depth: int) -> str:
        """In words, how the text was made."""


@dataclass
class Fixed:
    """Always the same length; 0 is plain decoding."""

    tokens: int
    parked: bool = False

    def begin(self, statistics: Statistics, sampler: SamplerFunction, depth: int) -> None:
        self.parked = self.tokens == 0

    def length(self, draft: Draft, limit: int, depth: int, seconds: float) -> int:
        return min(self.tokens, limit)

    def learn(self, accepted: int, offered: int) -> None: ...

    def probing(self, depth: int) -> bool:
        return False

    def watch(self, draft: Draft) -> None: ...

    def plain(self, token: int, logprobs: mx.array, waiting: float, depth: int) -> None: ...

    def hopeless(self, depth: int) -> bool:
        return False

    def verdict(self, depth: int) -> str:
        return ""


@dataclass
class Watch:
    """A draft beside plain decoding, and the slot that the next token is compared with."""

    draft: Draft
    tokens: list[int] = field(default_factory=list)
    log_odds: np.ndarray = field(default_factory=lambda: np.zeros(0))
    slot: int = 0


class Auto:
    """Length and parking from measured costs and calibrated chances.

    Tokens are counted as expected and time as predicted by the costs, over recent rounds: both have
    less noise than single rounds. When that is no faster than plain decoding, drafting is parked.
    While parked, a draft is made now and then and only compared with the plain tokens that follow,
    so a probe costs one proposal. It is repeated less and less often while it shows no gain. While
    drafting, a few plain tokens now and then keep the cost of plain decoding known.
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
        self.tokens = self.seconds = 0.0  # of recent rounds, fading
        self.rounds = 0
        self.check, self.rounds_left = CHECK, CHECK
        self.sampler: Sampler | None = None
        self.begin(Statistics(), lambda x: x, 0)

    def begin(self, statistics: Statistics, sampler: SamplerFunction, depth: int) -> None:
        self.statistics = statistics
        self.sampler = sampler if isinstance(sampler, Sampler) and sampler.temp > 0 else None
        self.interval, self.countdown = FIRST_PROBE, FIRST_PROBE // 2
        self.watched: Watch | None = None
        self.last = 0.0  # clock at the last plain token; 0: not usable
        self.stretch = 0  # plain tokens left of a check
        if self.parked and self.rounds:  # the last text may have been a hard one
            self.belief.relax()
            self.tokens, self.seconds, self.countdown = self.tokens / 4, self.seconds / 4, 0
        if not self.rounds and not self.belief.calibration.rounds:
            self.parked, self.countdown = True, 0  # nothing is known: look at one draft first
        if self.hopeless(depth):
            self.parked = True

    def rate(self, depth: int) -> float:
        """Tokens per second reached: of recent rounds, or of plain decoding where that is more."""
        plain = 1 / self.costs.plain(depth)
        return max(plain, self.tokens / self.seconds) if self.rounds else plain

    def gain(self, depth: int) -> float:
        """Speed of recent rounds over that of plain decoding."""
        return self.tokens / self.seconds * self.costs.plain(depth) if self.rounds else 1.0

    def hopeless(self, depth: int) -> bool:
        """Whether plain decoding wins even if every drafted token stands."""
        rounds = self.costs.draft(depth) + self.costs.verify(depth)
        best = (np.arange(1, len(rounds) + 1) / rounds).max() * self.costs.plain(depth)
        return self.costs.curve.measured and bool(best < HOPE)

    def choose(self, chances: np.ndarray, outlook: np.ndarray, depth: int) -> int:
        seconds, rate = self.costs.verify(depth), self.rate(depth)
        if self.sampler is None:
            return verify_length(chances, seconds, rate)
        return admitted(chances, outlook, seconds, rate)

    def length(self, draft: Draft, limit: int, depth: int, seconds: float) -> int:
        started = self.clock()
        mx.eval(draft.tokens, draft.evidence, draft.outlook)
        self.verifying = self.clock()
        self.drafting = seconds + self.verifying - started
        self.depth = depth
        self.chances = self.belief.chances(self.belief.log_odds(draft.evidence))
        return self.choose(self.chances[:limit], self.outlook(draft), depth)

    def outlook(self, draft: Draft) -> np.ndarray:
        """Chances along the greedy path."""
        odds = draft.evidence if draft.outlook is None else draft.outlook
        return self.belief.chances(self.belief.log_odds(odds))

    def learn(self, accepted: int, offered: int) -> None:
        verifying = self.clock() - self.verifying
        self.costs.observe_round(self.drafting, verifying, 1 + offered, self.depth)
        self.belief.fade()
        for slot in range(min(offered, accepted + 1)):
            self.belief.update(slot, self.chances[slot], float(slot < accepted))
        self.count(*self.expected(self.chances, offered, self.depth), fading=1 / 8)
        if self.explain:
            self.explain(self.describe(accepted, offered, verifying))
        self.rounds_left -= 1
        if self.rounds >= 3 and self.gain(self.depth) < PARK:
            self.park()
        elif self.rounds_left <= 0 and self.gain(self.depth) < CLEAR:
            self.check *= 4
            self.rounds_left = self.check
            self.parked, self.last, self.stretch = True, 0.0, STRETCH

    def expected(self, chances: np.ndarray, length: int, depth: int) -> tuple[float, float]:
        """Tokens and seconds of a round that offers length tokens."""
        tokens = 1 + np.cumprod(chances[:length]).sum()
        return float(tokens), float(self.costs.draft(depth) + self.costs.verify(depth)[length])

    def count(self, tokens: float, seconds: float, fading: float) -> None:
        """Take a round into the running sums."""
        self.tokens = (1 - fading) * self.tokens + tokens
        self.seconds = (1 - fading) * self.seconds + seconds
        self.rounds += 1

    def park(self) -> None:
        self.parked, self.last, self.stretch = True, 0.0, 0
        self.countdown = self.interval
        if self.explain:
            self.explain(f"parked at {self.depth}: {self.comparison(self.depth)}")

    def probing(self, depth: int) -> bool:
        if not self.parked or self.watched is not None or self.countdown > 0:
            return False
        hopeless = self.hopeless(depth)
        if hopeless:  # ask again later, not at every token
            self.countdown = FIRST_PROBE
        return not hopeless

    def watch(self, draft: Draft) -> None:
        self.watched = Watch(draft)
        self.last = -1.0  # the draft takes its time from the next two tokens
        self.statistics.probes += 1

    def plain(self, token: int, logprobs: mx.array, waiting: float, depth: int) -> None:
        now = self.clock()
        self.statistics.plain += 1
        self.countdown -= 1
        if self.last > 0 and now - waiting > 0.2 * (now - self.last):  # else the reader was slow
            self.costs.observe_plain(now - self.last, depth)
        self.last = now if self.last >= 0 else 0.0
        if self.stretch:
            self.stretch -= 1
            self.countdown = self.interval
            self.parked = self.stretch > 0 or self.gain(depth) < PARK
        if self.watched:
            self.compare(self.watched, token, logprobs, depth)

    def compare(self, watch: Watch, token: int, logprobs: mx.array, depth: int) -> None:
        """One plain token against the watched draft; at the first that differs the probe ends."""
        if watch.slot == 0:
            watch.tokens = watch.draft.tokens.tolist()
            watch.log_odds = self.belief.log_odds(watch.draft.evidence)
        slot, agrees = watch.slot, watch.tokens[watch.slot] == token
        stood = float(agrees)
        if self.sampler is not None and watch.draft.q is not None:
            here = slice(slot, slot + 1)
            one = Draft(watch.draft.tokens[here], watch.draft.candidates[here], watch.draft.q[here])
            stood = acceptance(one, self.sampler.law(logprobs[None])).item()
        self.belief.update(slot, self.belief.chances(watch.log_odds)[slot], stood)
        watch.slot += 1
        if not agrees or watch.slot == len(watch.tokens):
            self.watched = None
            self.judge(watch, depth)

    def judge(self, watch: Watch, depth: int) -> None:
        """After a probe: resume, look again soon, or wait twice as long."""
        self.belief.fade()
        chances = self.belief.chances(watch.log_odds)
        tokens, seconds = self.expected(
            chances, self.choose(chances, self.outlook(watch.draft), depth), depth
        )
        self.count(tokens, seconds, fading=1 / 3)
        promising = tokens / seconds * self.costs.plain(depth) > RESUME
        self.interval = FIRST_PROBE // 2 if promising else min(2 * self.interval, LAST_PROBE)
        self.countdown = self.interval
        self.parked = self.gain(depth) < RESUME
        if self.explain:
            self.explain(f"probe at {depth}: {self.comparison(depth)}")

    def describe(self, accepted: int, offered: int, verifying: float) -> str:
        """One round in a line: chances that each prefix stands, costs, choice, outcome."""
        survival = " ".join(f"{a:.2f}" for a in np.cumprod(self.chances))
        rows = " ".join(f"{1e3 * s:.1f}" for s in self.costs.verify(self.depth))
        return (
            f"at {self.depth}: survival {survival}; ms to draft {1e3 * self.drafting:.1f}, "
            f"to verify 1.. rows {rows}; {self.rate(self.depth):.1f} tokens/s; "
            f"offered {offered}, took {1e3 * verifying:.1f} ms, {accepted} stood"
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
        """Why this text was drafted or not, for the summary."""
        done = self.statistics
        if not done.plain:
            return f"drafted throughout: {self.comparison(depth)}"
        if not done.rounds:
            return f"not drafted: {self.comparison(depth)}"
        return (
            f"drafting was parked for {done.plain} tokens, with {done.probes} probes: "
            f"{self.comparison(depth)}"
        )


@dataclass
class Schedule:
    """What outlives one text: a pair's costs, calibrations, and a policy for each serving mode."""

    costs: Costs
    calibrations: dict[str, Calibration]
    explain: Callable[[str], None] | None = None
    policies: dict[str, Auto] = field(default_factory=dict)

    def policy(self, drafter: DFlash, sampler: SamplerFunction) -> Auto:
        mode = mode_of(sampler)
        if mode not in self.policies:
            calibration = self.calibrations.get(mode) or uncalibrated(drafter.config.num_proposals)
            self.policies[mode] = Auto(self.costs, calibration, self.explain)
        return self.policies[mode]


def prepare(
    drafter: DFlash,
    *,
    profile: bool = True,
    calibration: Path | None = None,
    explain: Callable[[str], None] | None = None,
) -> Schedule:
    """Make a bound drafter's schedule now; otherwise the first generation does.

    profile: measure the costs if they are not cached (a few seconds), or start from a guess.
    calibration: a file that `dspine-mlx calibrate` wrote; None: the pair's own, if there is one.
    explain: is given a line for every round and probe.
    """
    calibrations = load_calibrations(drafter, calibration)
    schedule = Schedule(costs_of(drafter, profile), calibrations, explain)
    object.__setattr__(drafter, "schedule", schedule)
    return schedule


def check_length(verify_length: int | str | Policy) -> None:
    wrong = isinstance(verify_length, str) and verify_length != "auto"
    if wrong or (isinstance(verify_length, int | float) and verify_length not in range(1 << 30)):
        raise InputError(f"verify_length is {verify_length!r}; it must be 'auto' or 0 or above")


def policy_for(
    verify_length: int | str | Policy, drafter: DFlash, sampler: SamplerFunction
) -> Policy:
    if isinstance(verify_length, int):
        return Fixed(min(verify_length, drafter.config.num_proposals))
    if isinstance(verify_length, str):
        return (drafter.schedule or prepare(drafter)).policy(drafter, sampler)
    return verify_length

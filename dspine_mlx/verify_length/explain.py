"""Rounds and verdicts in words. Nothing here decides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from dspine_mlx.round.statistics import Statistics
from dspine_mlx.verify_length.forecast import Forecast
from dspine_mlx.verify_length.records import Round


@dataclass
class Account:
    """What one text's rounds gained, in plain tokens' time; `explain` gets a line per event."""

    forecast: Forecast
    statistics: Statistics
    explain: Callable[[str], None] | None = None
    saved: float = 0.0  # by all rounds
    falling: float = 0.0  # lost since the balance was highest
    parked: int = 0  # tokens decoded while parked

    def round_over(self, this: Round, gain: float) -> None:
        self.saved += gain
        self.falling = max(0.0, self.falling - gain)
        if self.explain:
            self.explain(round_line(this, self.forecast))

    def parking(self, depth: int) -> None:
        """Say why drafting stops: what rounds can give, or what they did give."""
        if not self.explain:
            return
        lost = f"its rounds have lost {self.falling:.1f} plain tokens' time"
        why = f"{lost} since the balance was highest, and the balance is spent"
        if self.forecast.hopeless(depth):
            why = hopelessness(self.forecast, depth)
        self.explain(f"parked at {depth}: {why}")

    def probing(self, balance: float, parked: bool, depth: int) -> None:
        """Say what a draft that was only watched has shown."""
        if self.explain:
            self.explain(f"probe at {depth}: {probed(self.forecast, balance, parked, depth)}")

    def verdict(self, parked: bool, depth: int) -> str:
        """Why the text was drafted or not."""
        done, hopeless = self.statistics, parked and self.forecast.hopeless(depth)
        gained = "saved" if self.saved >= 0 else "lost"
        sums = f"{gained} the time of {abs(self.saved):.1f} plain tokens"
        if not self.forecast.slots and not done.rounds:
            return "no drafter, and no copy of earlier text promised a gain"
        if not self.forecast.slots:
            return f"no drafter: {done.rounds} rounds of copies {sums}"
        if hopeless:
            why = hopelessness(self.forecast, depth)
            if not done.rounds:
                return f"drafting can't pay here: {why}"
            return f"drafting stopped, as steps take longer now: {why}"
        probes = f"{done.probes} probe{'' if done.probes == 1 else 's'}"
        if not done.rounds:
            credit = "the credit was spent before" if self.parked else "the text was too short"
            return f"not drafted: {credit}; {probes}"
        if not self.parked:
            return f"drafted throughout: its rounds {sums}"
        if self.saved >= 0:
            sums += f", of which the last ones had lost {self.falling:.1f} again"
        return f"drafting was parked for {self.parked} tokens, with {probes}: its rounds {sums}"


def milliseconds(seconds: Sequence[float]) -> str:
    return " ".join(f"{1e3 * s:.1f}" for s in seconds)


def round_line(this: Round, forecast: Forecast) -> str:
    """A round in a line: each prefix's chance of acceptance, costs, choice, outcome."""
    if not this.chances:
        return f"at {this.depth}: offered {this.offered} unread, {this.accepted} accepted"
    survival = "survival " + " ".join(f"{a:.2f}" for a in accumulate(this.chances, mul))
    took = f"took {milliseconds([this.verifying])} ms, {this.accepted} accepted"
    if this.copy is not None:
        where = f" after {this.copy.after} drafted" if this.copy.after else ""
        return f"at {this.depth}: looked up{where}, {survival}; offered {this.offered}, {took}"
    return (
        f"at {this.depth}: {survival}; ms to draft {milliseconds([this.drafting])}, "
        f"to verify 1.. rows {milliseconds(forecast.costs.verify(this.depth))}; "
        f"{forecast.rate(this.depth):.1f} tokens/s; offered {this.offered}, {took}"
    )


def probed(forecast: Forecast, balance: float, parked: bool, depth: int) -> str:
    """What a draft that was only watched has shown."""
    if forecast.hopeless(depth):
        return hopelessness(forecast, depth)
    plain, token = 1e3 * forecast.costs.plain(depth), 1e3 * forecast.seconds / forecast.tokens
    follows = "below 1: drafting stays parked" if parked else "so drafting goes on"
    return (
        f"drafted, a token would take {token:.1f} ms, a plain one takes {plain:.1f} ms; the "
        f"balance is {balance:.1f} plain tokens, {follows}"
    )


def hopelessness(forecast: Forecast, depth: int) -> str:
    M, costs = forecast.slots, forecast.costs
    return (
        f"even if all {M} drafted tokens were accepted, a round would take "
        f"{1e3 * costs.round(M, depth):.1f} ms, and plain decoding gives {M + 1} tokens "
        f"in {1e3 * (M + 1) * costs.plain(depth):.1f} ms"
    )

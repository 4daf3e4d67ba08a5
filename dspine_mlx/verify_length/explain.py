"""Rounds and verdicts in words. Nothing here decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from dspine_mlx.round.statistics import Statistics
from dspine_mlx.verify_length.costs import Costs

if TYPE_CHECKING:
    from dspine_mlx.verify_length.auto import Auto, Round


@dataclass
class Account:
    """What one text's rounds gained, in plain tokens' time."""

    saved: float = 0.0  # by all rounds
    falling: float = 0.0  # lost since the balance was highest
    parked: int = 0  # tokens decoded while parked

    def round_over(self, gain: float) -> None:
        self.saved += gain
        self.falling = max(0.0, self.falling - gain)


def milliseconds(seconds: Sequence[float]) -> str:
    return " ".join(f"{1e3 * s:.1f}" for s in seconds)


def round_line(this: "Round", costs: Costs, rate: float) -> str:
    """A round in a line: each prefix's chance of acceptance, costs, choice, outcome."""
    if not this.chances:
        return f"at {this.depth}: offered {this.offered} unread, {this.accepted} accepted"
    survival = " ".join(f"{a:.2f}" for a in accumulate(this.chances, mul))
    if this.copied is not None:
        where = f" after {this.copied} drafted" if this.copied else ""
        return (
            f"at {this.depth}: looked up{where}, survival {survival}; offered {this.offered}, "
            f"took {milliseconds([this.verifying])} ms, {this.accepted} accepted"
        )
    return (
        f"at {this.depth}: survival {survival}; ms to draft {milliseconds([this.drafting])}, "
        f"to verify 1.. rows {milliseconds(costs.verify(this.depth))}; {rate:.1f} tokens/s; "
        f"offered {this.offered}, took {milliseconds([this.verifying])} ms, "
        f"{this.accepted} accepted"
    )


def parking(auto: "Auto", depth: int) -> str:
    """Why drafting stops: what rounds can give, or what they did give; expectations were wrong."""
    if auto.hopeless(depth):
        return hopelessness(auto, depth)
    lost = f"its rounds have lost {auto.account.falling:.1f} plain tokens' time"
    return f"{lost} since the balance was highest, and the balance is spent"


def probing(auto: "Auto", depth: int) -> str:
    """What a draft that was only watched has shown."""
    if auto.hopeless(depth):
        return hopelessness(auto, depth)
    plain, token = 1e3 * auto.costs.plain(depth), 1e3 * auto.seconds / auto.tokens
    follows = "below 1: drafting stays parked" if auto.parked else "so drafting goes on"
    return (
        f"drafted, a token would take {token:.1f} ms, a plain one takes {plain:.1f} ms; the "
        f"balance is {auto.budget.balance:.1f} plain tokens, {follows}"
    )


def hopelessness(auto: "Auto", depth: int) -> str:
    M, plain = auto.slots, 1e3 * auto.costs.plain(depth)
    return (
        f"even if all {M} drafted tokens were accepted, a round would take "
        f"{1e3 * auto.costs.round(M, depth):.1f} ms, and plain decoding gives {M + 1} tokens "
        f"in {(M + 1) * plain:.1f} ms"
    )


def without_drafter(done: Statistics, account: Account) -> str:
    """What copies brought a text that has no drafter."""
    if not done.rounds:
        return "no drafter, and no copy of earlier text promised a gain"
    saved = "saved" if account.saved >= 0 else "lost"
    return (
        f"no drafter: {done.rounds} rounds of copies {saved} the time of {abs(account.saved):.1f} "
        "plain tokens"
    )


def verdict(auto: "Auto", depth: int) -> str:
    """Why a text was drafted or not."""
    done, account = auto.statistics, auto.account
    probes = f"{done.probes} probe{'' if done.probes == 1 else 's'}"
    if not auto.slots:
        return without_drafter(done, account)
    if auto.parked and auto.hopeless(depth):
        if not done.rounds:
            return f"drafting can't pay here: {hopelessness(auto, depth)}"
        return f"drafting stopped, as steps take longer now: {hopelessness(auto, depth)}"
    if not done.rounds:
        credit = "the credit was spent before" if account.parked else "the text was too short"
        return f"not drafted: {credit}; {probes}"
    saved = "saved" if account.saved >= 0 else "lost"
    sums = f"its rounds {saved} the time of {abs(account.saved):.1f} plain tokens"
    if not account.parked:
        return f"drafted throughout: {sums}"
    if account.saved >= 0:
        sums += f", of which the last ones had lost {account.falling:.1f} again"
    return f"drafting was parked for {account.parked} tokens, with {probes}: {sums}"

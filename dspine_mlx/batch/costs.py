"""What steps of several texts cost: seconds by texts, rows per text, drafted tokens and depth.

For each number of texts there are a curve and its corrections by real steps, as for one text
(`dspine_mlx.verify_length.costs`). Numbers that were not measured lie between those that were, at
equal rows in all: what a forward costs beside its attention depends on the rows alone, steps
included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from dspine_mlx.cache_folder import restored
from dspine_mlx.verify_length.costs import Costs, Curve

SPAN = 8  # plain steps timed together
CHECK = 4  # of them at first, where their cost is not known
STRIDE = 64  # positions within which a draft is taken to cost the same


@dataclass(frozen=True)
class BatchCurve:
    """Steps of so many texts at once: a curve whose verify widths are rows per text, and what a
    draft of 1 .. M tokens takes as shares of one of all M."""

    texts: int
    curve: Curve
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.texts < 1 or len(self.shares) != len(self.curve.verify[0]) - 1:
            raise ValueError("there must be a text, and a share for each drafted token")
        if not all(math.isfinite(share) and share > 0 for share in self.shares):
            raise ValueError("shares must be above 0")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "BatchCurve":
        """Read from JSON; ValueError, KeyError or TypeError when it is none."""
        shares = tuple(map(float, data["shares"]))
        return cls(int(data["texts"]), restored(Curve, data["curve"]), shares)


class Steps(NamedTuple):
    """Seconds of the steps that some texts may take."""

    plain: float
    draft: np.ndarray  # [M] of 1 .. M tokens for each text
    verify: np.ndarray  # [M + 1] of 1 .. M + 1 rows of each text


def guess(curve: Curve, slots: int) -> BatchCurve:
    """One text, where only a full draft's cost is known, of so many tokens: drafts as steep in rows
    as forwards. The curve may be wider."""
    low, high = (rows[: slots + 1] for rows in curve.verify)
    shares = tuple(row / low[-1] for row in low[1:])
    return BatchCurve(1, replace(curve, verify=(low, high)), shares)


def between(known: Sequence[BatchCurve], texts: int) -> BatchCurve:
    """So many texts' curve, from those of fewer and of more, each where it knows so many rows;
    beyond the most texts known, rows go on as a line."""
    fewer = max((one for one in known if one.texts <= texts), key=lambda one: one.texts)
    if fewer.texts == texts:
        return fewer
    at_least = (one for one in known if one.texts >= texts)
    more = min(at_least, key=lambda one: one.texts, default=fewer)
    share = (texts - fewer.texts) / max(1, more.texts - fewer.texts)
    widths = np.arange(1, len(fewer.shares) + 2)
    weights = np.full(len(widths), share)
    if more is not fewer:
        weights[texts * widths < more.texts] = 0.0
        weights[texts * widths > fewer.texts * widths[-1]] = 1.0
    low, high = (
        Steps(
            (1 - share) * a.plain + share * b.plain,
            (1 - weights[1:]) * a.draft + weights[1:] * b.draft,
            (1 - weights) * a.verify + weights * b.verify,
        )
        for a, b in zip(as_if(fewer, texts), as_if(more, texts), strict=True)
    )
    curve = replace(
        fewer.curve,
        plain=(low.plain, high.plain),
        draft=(float(low.draft[-1]), float(high.draft[-1])),
        verify=(tuple(low.verify.tolist()), tuple(high.verify.tolist())),
    )
    return BatchCurve(texts, curve, tuple((low.draft / low.draft[-1]).tolist()))


def as_if(one: BatchCurve, texts: int) -> list[Steps]:
    """Steps of so many texts if only the rows in all counted, at both depths."""
    curve, widths, found = one.curve, np.arange(1, len(one.shares) + 2), []
    for plain, draft, verify in zip(curve.plain, curve.draft, curve.verify, strict=True):
        forwards = on_line(one.texts * widths, np.array(verify), texts * widths)
        rows, shares = widths[1:], np.array(one.shares)
        drafts = on_line(one.texts * rows, draft * shares, texts * rows)
        found.append(Steps(plain / verify[0] * float(forwards[0]), drafts, forwards))
    return found


def on_line(rows: np.ndarray, seconds: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Seconds at other rows: straight lines between those known, and on beyond both ends, but never
    below a tenth of the least."""
    inside = np.interp(at, rows, seconds)
    if len(rows) == 1:
        return inside
    rise = max(0.0, (seconds[-1] - seconds[0]) / (rows[-1] - rows[0]))
    first = max(0.0, (seconds[1] - seconds[0]) / (rows[1] - rows[0]))
    beyond = rise * np.maximum(0, at - rows[-1]) - first * np.maximum(0, rows[0] - at)
    return np.maximum(inside + beyond, 0.1 * seconds.min())


def drafts_of(one: BatchCurve) -> Curve:
    """Drafts of 1 .. M tokens as a curve of their own, so that each width is corrected by real
    drafts; its first width stands for no tokens."""
    low, high = ([draft * share for share in one.shares] for draft in one.curve.draft)
    first = (low[0], high[0])
    verify = ((low[0], *low), (high[0], *high))
    return replace(one.curve, plain=first, draft=first, verify=verify)


class BatchCosts:
    """Curves by the number of texts, each corrected by the times of real steps."""

    def __init__(self, known: Sequence[BatchCurve]):
        self.known = list(known)
        self.forwards = dict[int, Costs]()  # by the numbers of texts that there have been
        self.drafts = dict[int, Costs]()
        self.newest = 0  # texts that were drafted for last
        self.drafting = list[Curve]()  # drafts for 1, 2, ... texts, as `known` has them
        self.bases = dict[tuple[int, int], np.ndarray]()  # their seconds, by texts and depth

    def of(self, texts: int) -> tuple[Costs, Costs]:
        """Costs of forwards, and of drafts, over so many texts; at first corrected like those of
        the nearest number."""
        if texts not in self.forwards:
            one = between(self.known, texts)
            new = Costs(one.curve), Costs(drafts_of(one))
            if self.forwards:
                nearest = min(self.forwards, key=lambda n: abs(n - texts))
                for costs, like in zip(new, self.of(nearest), strict=True):
                    costs.x[:] = like.x
            self.forwards[texts], self.drafts[texts] = new
        return self.forwards[texts], self.drafts[texts]

    def plain(self, texts: int, depth: int) -> float:
        """Seconds of a step of plain decoding."""
        return self.of(texts)[0].plain(depth)

    def draft(self, texts: int, slots: int, depth: int) -> float:
        """Seconds of a draft of so many tokens for each text."""
        return float(self.drafts_for(texts, depth)[-1, slots - 1])

    def drafts_for(self, texts: int, depth: int) -> np.ndarray:
        """Seconds [texts, M] of drafting 1 .. M tokens for each of 1 .. `texts` texts: corrected
        alike, as only some of these numbers are ever seen, and more texts never cost less."""
        like, depth = self.newest or texts, depth // STRIDE * STRIDE
        key = texts, depth
        if key not in self.bases:
            for n in range(len(self.drafting) + 1, texts + 1):
                self.drafting.append(drafts_of(between(self.known, n)))
            curves = self.drafting[:texts]
            self.bases = {key: np.array([curve.at(depth)[2:-1] for curve in curves])}
        seconds = self.bases[key] * np.exp(self.of(like)[1].x[2:-1])
        fewer, more = seconds[:like][::-1], seconds[like - 1 :]  # both with what was seen
        np.minimum.accumulate(fewer, axis=0, out=fewer)
        np.maximum.accumulate(more, axis=0, out=more)
        return seconds

    def verify(self, texts: int, width: int, depth: int) -> float:
        """Seconds of a forward over `width` rows of each text."""
        forwards, _ = self.of(texts)
        return max(forwards.verify(depth)[width - 1], forwards.plain(depth))

    def steps(self, texts: int, depth: int) -> Steps:
        """A forward is never taken to be faster than a plain step, which runs one, too, ahead."""
        forwards, _ = self.of(texts)
        plain, verify = forwards.plain(depth), np.array(forwards.verify(depth))
        return Steps(plain, self.drafts_for(texts, depth)[-1], np.maximum(verify, plain))

    def plain_known(self, texts: int) -> bool:
        """Whether plain steps of about so many texts were timed, or all that is known is
        measured."""
        if self.known[-1].texts > 1:
            return True
        timed = (n for n, costs in self.forwards.items() if costs.seen["plain"])
        return any(n <= 2 * texts <= 4 * n for n in timed)

    def learn_plain(self, texts: int, seconds: float, depth: int) -> None:
        self.of(texts)[0].observe("plain", seconds, depth)

    def learn_verify(self, texts: int, width: int, seconds: float, depth: int) -> None:
        self.of(texts)[0].observe("verify", seconds, depth, width)

    def learn_draft(self, texts: int, slots: int, seconds: float, depth: int) -> None:
        """Of a draft for so many texts."""
        self.newest = texts
        self.of(texts)[1].observe("verify", seconds, depth, slots + 1)

    @property
    def disturbed(self) -> bool:
        """Whether times scatter so much that they should not be kept."""
        return any(costs.disturbed for costs in self.forwards.values())

    def learnt(self) -> list[BatchCurve]:
        """All curves that are known, corrected where there have been real steps."""
        corrected = [self.corrected(texts) for texts in self.forwards]
        others = [one for one in self.known if one.texts not in self.forwards]
        return sorted([*corrected, *others], key=lambda one: one.texts)

    def corrected(self, texts: int) -> BatchCurve:
        curve, drafts = (costs.learnt() for costs in self.of(texts))
        low, high = drafts.verify
        shares = tuple(seconds / low[-1] for seconds in low[1:])
        return BatchCurve(texts, replace(curve, draft=(low[-1], high[-1])), shares)


class PlainTimes:
    """Plain steps timed together: one of them alone may be early or late."""

    def __init__(self, costs: BatchCosts):
        self.costs, self.seconds = costs, list[float]()
        self.texts = 0  # of each
        self.check = 0  # steps left to be timed, where their cost is not known

    def restart(self, texts: int) -> None:
        """There are so many texts now."""
        self.seconds.clear()
        self.check = 0 if self.costs.plain_known(texts) else 1 + CHECK

    def step(self, texts: int, seconds: float | None, depth: int) -> None:
        if self.texts != texts:
            self.texts = texts
            self.seconds.clear()
        if seconds is not None:
            self.seconds.append(seconds)
        if len(self.seconds) == SPAN or (self.check == 1 and self.seconds):
            self.costs.learn_plain(texts, median(self.seconds), depth)
            self.seconds.clear()
        self.check = max(0, self.check - 1)

"""What a step costs: seconds of plain decoding, drafting and verifying, by width and depth.

A curve comes from a file, a measurement (`profile`) or a guess, and none of them is trusted: the
times of the real steps correct it while text is generated.
"""

import logging
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

log = logging.getLogger(__name__)
NOISE = 0.15  # of one step's log-time
WANDER = 0.03  # of what all steps share (heat, load), from one step to the next
FAR = 3.0  # standard deviations from which a time contradicts the curve
SPREAD = 32  # steps over which the scatter of times is averaged
ALIKE = 0.7  # correlation of the costs of neighbouring widths
CHEAPER = 0.6  # a forward faster than this share of the time of one row fewer was disturbed
APART = 2.5  # a plain token and a forward over one row differ by less than this factor
MOST = 2.0  # factor by which one process changes what is on file
SHORTEST, LONGEST = 1e-12, 1e6  # seconds of a step; drafts of nothing are parts of 1e-9


@dataclass(frozen=True)
class Curve:
    """Seconds at two context depths; linear in the depth between and beyond them."""

    depths: tuple[int, int]
    plain: tuple[float, float]  # a token of pipelined plain decoding
    draft: tuple[float, float]  # one proposal
    verify: tuple[tuple[float, ...], tuple[float, ...]]  # a target forward over 1 .. M + 1 rows
    measured: bool = True

    def __post_init__(self) -> None:
        seconds = [*self.plain, *self.draft, *self.verify[0], *self.verify[1]]
        if len(self.verify[0]) != len(self.verify[1]) or len(self.verify[0]) < 2:
            raise ValueError("verify must name as many widths at both depths, at least 2")
        if not all(SHORTEST <= s <= LONGEST for s in seconds):
            raise ValueError(f"a step takes {SHORTEST} to {LONGEST} seconds")
        if not 0 <= self.depths[0] < self.depths[1]:
            raise ValueError("depths must ascend from 0 on")

    def at(self, depth: int) -> list[float]:
        """[plain, verify 1 row .. M + 1 rows, draft] after depth positions."""
        share = max(0.0, (depth - self.depths[0]) / (self.depths[1] - self.depths[0]))
        return [low + share * max(0.0, high - low) for low, high in self.steps]

    @cached_property
    def steps(self) -> list[tuple[float, float]]:
        """The costs at both depths, in the order of `at`."""
        verify = zip(*self.verify, strict=True)
        return [self.plain, *((low, high) for low, high in verify), self.draft]

    def scaled(self, factors: list[float]) -> "Curve":
        """Multiply the costs [plain, verify 1 row .. M + 1 rows, draft] by a factor each."""
        pairs = zip(self.steps, factors, strict=True)
        plain, *rows, draft = ((low * f, high * f) for (low, high), f in pairs)
        low, high = zip(*rows, strict=True)
        return replace(self, plain=plain, draft=draft, verify=(low, high))

    def contradiction(self) -> str:
        """A sign, in words, of other programs running while the curve was measured; else ""."""
        rows = self.verify[0]
        for n, (less, more) in enumerate(zip(rows, rows[1:], strict=False), 1):
            if more < CHEAPER * less:
                return f"{n + 1} rows took {more / less:.0%} of the time of {n}"
        ratio = self.plain[0] / rows[0]
        if not 1 / APART < ratio < APART:
            return f"a plain token took {ratio:.2g} times a forward over one row"
        return ""


class Costs:
    """A curve, and what real steps have taught since.

    Prediction: curve * exp(x), with one log-correction x per kind of step, in a Kalman filter. All
    kinds share a common part (heat, load), which may wander; each has a smaller part of its own,
    alike for neighbouring widths, of which plain decoding is the narrowest. Each observation
    updates every kind of step, its own most.

    A time far from the prediction means a wrong curve, for this kind of step or altogether, or a
    pause of the machine. Nothing runs faster than it can, so a shorter time is believed at once. A
    longer one is believed only if the next of its kind is long, too.
    """

    def __init__(self, curve: Curve):
        self.curve, self.widths = curve, len(curve.verify[0])
        n = self.widths + 2
        near = ALIKE ** np.abs(np.subtract.outer(np.arange(n - 1), np.arange(n - 1)))
        alike, self.wrong_together = np.eye(n), np.eye(n)
        alike[:-1, :-1] = near
        self.wrong_together[1:-1, 1:-1] = 0.9 + 0.1 * near[1:, 1:]  # all widths, if one is
        common, own = (0.3, 0.1) if curve.measured else (3.0, 0.5)
        self.x, self.covariance = np.zeros(n), common**2 + own**2 * alike
        self.wander = WANDER**2 + (WANDER / 8) ** 2 * alike
        self.seen: dict[str, int] = {"plain": 0, "verify": 0, "draft": 0}
        self.doubted: set[str] = set()
        self.spread = NOISE**2  # mean square of recent surprises
        self.depth, self.seconds = -1, list[float]()  # of the last prediction

    def predict(self, depth: int) -> list[float]:
        """[plain, verify 1 row .. M + 1 rows, draft] after depth positions."""
        if depth != self.depth:
            steps, self.depth = zip(self.curve.at(depth), self.x.tolist(), strict=True), depth
            self.seconds = [step * math.exp(x) for step, x in steps]
        return self.seconds

    def plain(self, depth: int) -> float:
        return self.predict(depth)[0]

    def draft(self, depth: int) -> float:
        return self.predict(depth)[-1]

    def verify(self, depth: int) -> list[float]:
        """Seconds of a forward over 1 .. M + 1 rows."""
        return self.predict(depth)[1:-1]

    def round(self, length: int, depth: int) -> float:
        """Seconds of a round that offers `length` tokens."""
        seconds = self.predict(depth)
        return seconds[-1] + seconds[1 + length]

    def probe_share(self, depth: int) -> float:
        """Seconds of a draft, in plain tokens."""
        return self.draft(depth) / self.plain(depth)

    def observe(self, name: str, seconds: float, depth: int, rows: int = 0) -> None:
        """Learn from the time of a step: "plain", "draft", or "verify" over so many rows."""
        kind = {"plain": 0, "draft": -1}.get(name, rows)
        if not seconds > 0:
            log.warning("a clock went backwards (%s s for a step); this time is ignored", seconds)
            return
        self.seen[name] += 1
        self.covariance += self.wander
        surprise = math.log(seconds / self.predict(depth)[kind])
        noise = max(NOISE**2, self.spread)
        limit = FAR * math.sqrt(self.covariance.item(kind, kind) + noise)
        self.spread += (min(surprise**2, limit**2) - self.spread) / SPREAD
        if abs(surprise) > limit:
            together = self.wrong_together[kind]
            self.covariance += surprise**2 * (0.25 + 0.75 * np.outer(together, together))
            if surprise > 0 and name not in self.doubted:
                self.doubted.add(name)
                return
        self.doubted.discard(name)
        column = self.covariance[kind].copy()
        gain = column / (column.item(kind) + noise)
        self.x += surprise * gain
        self.covariance -= column[:, None] * gain
        self.depth = -1

    @property
    def disturbed(self) -> bool:
        """Whether times scatter so much that they should not be kept."""
        return self.spread > (2 * NOISE) ** 2

    def learnt(self) -> Curve:
        """The curve corrected by real steps, by a factor of MOST at most."""
        limit = math.log(MOST)
        return self.curve.scaled(np.exp(self.x.clip(-limit, limit)).tolist())

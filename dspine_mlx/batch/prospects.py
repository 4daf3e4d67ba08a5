"""What the next round of a text may bring, from its last ones, and how the text fares."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspine_mlx.verify_length.budget import FIRST_WAIT, LAST_WAIT, SHARE

ROUNDS = 8  # rounds of a text that are remembered
FADING = 0.98  # of what is known of an average text, per round
PRIOR, HOPE = 2.0, 0.8  # rounds that a first chance counts for
FLOOR = 0.88  # speed of plain decoding that rounds leave every text, at least
CREDIT, CAP = 0.0, 4.0  # tokens that a text may be behind that, at first and at most


class Average:
    """Chances of a drafter's slots on an average text, each given that the one before is
    accepted."""

    def __init__(self, slots: int):
        self.reached, self.passed = np.zeros(slots), np.zeros(slots)
        self.update()

    def update(self) -> None:
        """A slot about which little is known is like the one before."""
        chances, before = [], HOPE
        for reached, passed in zip(self.reached.tolist(), self.passed.tolist(), strict=True):
            before = (passed + PRIOR * before) / (reached + PRIOR)
            chances.append(before)
        self.chances = np.array(chances)

    def learn(self, survival: Sequence[float]) -> None:
        """A round's first slots had this survival."""
        n = len(survival)
        self.reached *= FADING
        self.passed *= FADING
        self.reached[:n] += np.array([1.0, *survival])[:n]
        self.passed[:n] += survival
        self.update()

    def extended(self, survival: Sequence[float]) -> np.ndarray:
        """Survival [M] of all slots, where a round had some of them: the others as average."""
        n = len(survival)
        last = survival[-1] if n else 1.0
        return np.concatenate([survival, last * self.chances[n:].cumprod()])


class Prospects:
    """Survival [R, M] of a text's last rounds, an average text's at first."""

    def __init__(self, average: Average):
        self.average, self.next, self.own = average, 0, 0  # own: how many are the text's own
        self.rounds = np.tile(average.extended([]), (ROUNDS, 1))

    def learn(self, survival: Sequence[float], anew: bool = False) -> None:
        """A round's chances, corrected by earlier outcomes; anew: earlier rounds are too long
        ago."""
        self.average.learn(survival)
        self.rounds[slice(None) if anew else self.next] = self.average.extended(survival)
        self.next = (self.next + 1) % ROUNDS
        self.own = ROUNDS if anew else min(ROUNDS, self.own + 1)

    def expect(self, survival: Sequence[float]) -> None:
        """The next rounds may be like one with these chances; [] is an average text's."""
        self.rounds[:] = self.average.extended(survival)
        self.own = 0

    def shown(self, slots: int) -> float:
        """Tokens of a round with so many drafted ones, by the text's own last rounds only."""
        own = self.rounds[: self.own, :slots]
        return 1 + float(own.sum() / self.own) if self.own else float("inf")

    def within(self, tokens: float) -> np.ndarray:
        """The same where at most so many drafted tokens may be offered."""
        if tokens >= self.rounds.shape[1]:
            return self.rounds
        return np.where(np.arange(self.rounds.shape[1]) < tokens, self.rounds, 0.0)


@dataclass
class Record:
    """One text: its prospects, whether it is drafted for, and how it fares.

    A text whose drafts do not pay for their share of the drafter's time is left out. After `wait`
    plain steps' time, doubled by each try that fails, it is drafted for once more.
    """

    prospects: Prospects
    credit: float = CREDIT  # tokens that it may still fall behind FLOOR
    saved: float = 0.0  # plain steps that its rounds saved
    rounds: int = 0  # that it was drafted for
    tries: int = 0  # drafts that were made for it
    plain: int = 0  # tokens in steps and rounds that it was not drafted for
    left_out: bool = False
    waited: float = 0.0  # plain steps since it was drafted for
    wait: float = FIRST_WAIT
    tried: bool = False  # in the next round, though it is left out

    def advance(self, tokens: int, steps: float) -> None:
        """It got so many tokens in the time of so many plain steps."""
        self.credit = min(CAP, self.credit + tokens - FLOOR * steps)
        self.waited += steps

    def due(self, cost: float) -> bool:
        """Whether to draft for it once, at the cost of so many plain steps."""
        return self.left_out and self.waited >= self.wait and SHARE * self.waited >= cost

    @property
    def turn(self) -> tuple[int, float]:
        """Least for the text that is tried next."""
        return self.tries, -self.waited

    def judge(self, pays: bool) -> None:
        """Whether the next round should be drafted for it, by what it was like in its last ones."""
        if pays:
            self.wait = FIRST_WAIT
        elif self.tried:
            self.wait = min(2 * self.wait, LAST_WAIT)
        self.left_out, self.tried = not pays, False

    def verdict(self) -> str:
        """How its text was made, in words."""
        saved = "saved" if self.saved >= 0 else "lost"
        sums = f"its rounds {saved} the time of {abs(self.saved):.1f} plain tokens"
        if not self.rounds:
            return "not drafted: among this many texts plain decoding was expected to be faster"
        if not self.plain:
            return f"drafted throughout, with others: {sums}"
        return f"drafted with others but for {self.plain} tokens: {sums}"

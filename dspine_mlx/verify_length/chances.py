"""What a text teaches about a drafter's chances, on top of its calibration."""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from dspine_mlx.verify_length.calibration import Calibration

MEMORY = 64  # rounds over which the usual log-odds are averaged
OWN = 4.0  # information that a slot's being like the others is worth


def sigmoid(x: float) -> float:
    """Of a single number, as `calibration.sigmoid` is of arrays."""
    return 0.5 + 0.5 * math.tanh(0.5 * x)


def against(log_odds: float) -> float:
    """Odds against, exp(-log_odds), kept away from overflow."""
    return math.exp(min(300.0, max(-300.0, -log_odds)))


class Belief:
    """Chances of a drafter's slots: calibrated evidence, corrected by what happened since.

    The log-odds get a shift common to all slots and one of the slot's own, running estimates of a
    logistic regression's intercepts. A slot's own fades, so one that was given up is tried again.
    """

    def __init__(self, calibration: Calibration):
        slots = len(calibration.biases)
        self.calibration = calibration
        self.common, self.own = 0.0, [0.0] * slots
        self.usual, self.rounds = [0.0] * slots, 0  # log-odds of each slot, on average
        self.least = 4.0 if calibration.rounds else 1.0  # information that the start is worth
        self.information, self.own_information = self.least, [OWN] * slots

    def chances(self, log_odds: Sequence[float]) -> list[float]:
        """Of each slot, given that the ones before it stand."""
        return [sigmoid(x + self.common + own) for x, own in zip(log_odds, self.own, strict=False)]

    def update(self, slot: int, chance: float, stood: float) -> None:
        surprise, information = stood - chance, chance * (1 - chance)
        self.information = max(self.least, 0.98 * self.information) + information
        self.common += surprise / self.information
        kept = max(OWN, 0.98 * self.own_information[slot])
        self.own_information[slot] = kept + information
        self.own[slot] += surprise / self.own_information[slot]

    def survival(self, log_odds: Sequence[float]) -> list[list[float]]:
        """Rows j = 1 .. M - 1 of the chances that n = 1 .. M - j tokens stand in a block drafted
        after token j, where each token is as much easier or harder than its slot's usual as it is
        in this block."""
        M = len(log_odds)
        usual = self.usual[:M] if self.rounds else log_odds
        # Odds against: sigmoid(u + e) = 1 / (1 + exp(-u) exp(-e))
        ease = [against(x - u) for x, u in zip(log_odds, usual, strict=True)]
        slots = [against(u + self.common + own) for u, own in zip(usual, self.own, strict=False)]
        return [
            list(accumulate([1 / (1 + u * e) for u, e in zip(slots, ease[j:], strict=False)], mul))
            for j in range(1, M)
        ]

    def round_over(self, log_odds: Sequence[float]) -> None:
        """A block with these log-odds has been tested."""
        self.rounds += 1
        share = 1 / min(self.rounds, MEMORY)
        self.usual = [u + share * (x - u) for u, x in zip(self.usual, log_odds, strict=True)]
        self.own = [0.99 * own for own in self.own]

    def relax(self) -> None:
        """Another text: what was learnt counts for half, and is soon unlearnt."""
        self.common, self.own = self.common / 2, [own / 2 for own in self.own]
        self.information = self.least
        self.own_information = [OWN] * len(self.own)

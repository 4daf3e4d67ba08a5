"""What a text teaches about a drafter's chances, on top of its calibration."""

import mlx.core as mx
import numpy as np

from dspine_mlx.calibration import Calibration, sigmoid

MEMORY = 64  # rounds over which the usual log-odds are averaged
OWN = 4.0  # information that a slot's being like the others is worth


class Belief:
    """Chances of a drafter's slots: calibrated evidence, corrected by what happened since.

    The log-odds get a shift common to all slots and one of the slot's own, running estimates of a
    logistic regression's intercepts. A slot's own fades, so one that was given up is tried again.
    """

    def __init__(self, calibration: Calibration):
        slots = len(calibration.biases)
        self.calibration = calibration
        self.common, self.own = 0.0, np.zeros(slots)
        self.usual, self.rounds = np.zeros(slots), 0  # log-odds of each slot, on average
        self.least = 4.0 if calibration.rounds else 1.0  # information that the start is worth
        self.information, self.own_information = self.least, np.full(slots, OWN)

    def log_odds(self, evidence: mx.array) -> np.ndarray:
        return self.calibration.log_odds(np.array(evidence, np.float64))

    def chances(self, log_odds: np.ndarray) -> np.ndarray:
        return sigmoid(log_odds + self.common + self.own[: log_odds.shape[-1]])

    def update(self, slot: int, chance: float, stood: float) -> None:
        surprise, information = stood - chance, chance * (1 - chance)
        self.information = max(self.least, 0.98 * self.information) + information
        self.common += surprise / self.information
        kept = max(OWN, 0.98 * self.own_information[slot])
        self.own_information[slot] = kept + information
        self.own[slot] += surprise / self.own_information[slot]

    def survival(self, log_odds: np.ndarray) -> np.ndarray:
        """[M, M]: chance that n = 1 .. M tokens stand in a block drafted j = 0 .. M - 1 tokens
        later, where each token is as much easier or harder than its slot's usual as it is in this
        block. What lies beyond this block is as usual.
        """
        M = len(log_odds)
        usual, slots = self.usual[:M] if self.rounds else log_odds, np.arange(M)
        ease = np.append(log_odds - usual, np.zeros(M))
        return np.cumprod(self.chances(ease[slots[:, None] + slots] + usual), axis=1)

    def round_over(self, log_odds: np.ndarray) -> None:
        """A block with these log-odds has been tested."""
        self.rounds += 1
        self.usual += (log_odds - self.usual) / min(self.rounds, MEMORY)
        self.own *= 0.99

    def relax(self) -> None:
        """Another text: what was learnt counts for half, and is soon unlearnt."""
        self.common, self.own = self.common / 2, self.own / 2
        self.information = self.least
        self.own_information[:] = OWN

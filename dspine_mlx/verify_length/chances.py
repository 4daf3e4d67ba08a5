"""What a text teaches about a drafter's chances, on top of its calibration."""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from dspine_mlx.verify_length.calibration import Calibration

SLOT_PRIOR = 4.0  # information in the prior that a slot is like the others
FADING = 0.98  # of what was learnt, per outcome


def sigmoid(x: float) -> float:
    """Sigmoid of a single number; `calibration.sigmoid` takes arrays."""
    return 0.5 + 0.5 * math.tanh(0.5 * x)


def expected_tokens(chances: Sequence[float]) -> float:
    """Expected tokens of a round that offers drafted tokens with these chances."""
    return 1 + sum(accumulate(chances, mul))


class Chances:
    """Chances of a drafter's slots: calibrated evidence, corrected by outcomes.

    The log-odds get a shift common to all slots and one per slot, running estimates of a logistic
    regression's intercepts. A slot's own shift fades, so a slot that was given up is tried again.
    """

    def __init__(self, calibration: Calibration):
        self.calibration = calibration
        self.prior = 4.0 if calibration.rounds else 1.0  # information in the start
        slots = len(calibration.biases)
        self.shift, self.slot_shift = 0.0, [0.0] * slots
        self.information, self.slot_information = self.prior, [SLOT_PRIOR] * slots

    def of(self, log_odds: Sequence[float]) -> list[float]:
        """Chance of each slot, given that the ones before it are accepted."""
        shifted = zip(log_odds, self.slot_shift, strict=False)
        return [sigmoid(x + self.shift + own) for x, own in shifted]

    def promise(self, log_odds: Sequence[float]) -> float | None:
        """The first slot's chance as it was calibrated, whatever was learnt since; None: it was
        not."""
        return sigmoid(log_odds[0]) if self.calibration.rounds else None

    def update(self, slot: int, chance: float, accepted: float) -> None:
        """Learn that a slot with this chance was accepted (1) or not (0)."""
        surprise, information = accepted - chance, chance * (1 - chance)
        self.information = max(self.prior, FADING * self.information) + information
        self.shift += surprise / self.information
        kept = max(SLOT_PRIOR, FADING * self.slot_information[slot])
        self.slot_information[slot] = kept + information
        self.slot_shift[slot] += surprise / self.slot_information[slot]

    def round_over(self) -> None:
        self.slot_shift = [0.99 * shift for shift in self.slot_shift]

    def forget_half(self) -> None:
        """Halve what was learnt and make it easy to unlearn, as another text begins."""
        self.shift, self.slot_shift = self.shift / 2, [shift / 2 for shift in self.slot_shift]
        self.doubt()

    def doubt(self) -> None:
        """Make what was learnt easy to unlearn."""
        self.information = self.prior
        self.slot_information = [SLOT_PRIOR] * len(self.slot_shift)

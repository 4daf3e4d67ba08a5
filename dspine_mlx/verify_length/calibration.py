"""From a drafter's evidence to calibrated chances that its tokens are accepted.

Evidence x_t is the log-odds of slot t, given that slot t - 1 was accepted: from a confidence head,
or of the top entry of the drafter's own row (see `dspine_mlx.round.select`). The chance is

    c_t = sigmoid(x_t / T_t + b_t)    from even odds on, and  sigmoid(s_t x_t + b_t)  for x_t < 0,

with T, b and s fitted per slot and serving mode; a prefix is accepted with the product of its
chances. Below even odds a sampled draft has a slope of its own, which may be negative: where a name
can be chosen freely, drafter and target are equally flat, so the least certain drafts are not those
rejected most.

A calibration also has the weights that decide between a draft and a copy of earlier text
(`dspine_mlx.verify_length.disagreement`).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from mlx_lm.sample_utils import Sampler as SamplerFunction

from dspine_mlx.round.sampler import Sampler
from dspine_mlx.verify_length.disagreement import INDEPENDENT

LIMIT = 20.0  # log-odds beyond are certainty
STEEPEST = 1e3  # what a file may state: far beyond what is ever fitted
BANDS = (0.0, 0.5, 0.9)  # sampled modes: temperatures above 0, from 0.5 and from 0.9 on


@dataclass(frozen=True)
class Calibration:
    """T, b and s of every slot; T = 1 and b = 0 leave the evidence as it is."""

    temperatures: tuple[float, ...]
    biases: tuple[float, ...]
    rounds: int = 0  # rounds it was fitted on
    ece_before: float | None = None  # mean over the slots, on held-out prompts
    ece_after: float | None = None
    slopes: tuple[float, ...] = ()  # s; empty: 1 / T
    copy_weights: tuple[float, ...] = ()  # empty: as if copies and drafts were independent

    def __post_init__(self) -> None:
        slots = len(self.temperatures)
        if len(self.biases) != slots:
            raise ValueError("there must be one bias for each temperature")
        if len(self.slopes) not in (0, slots):
            raise ValueError("there must be one slope for each temperature, or none")
        if len(self.copy_weights) not in (0, len(INDEPENDENT)):
            raise ValueError(f"there must be {len(INDEPENDENT)} copy weights, or none")
        if not all(1 / STEEPEST <= t <= STEEPEST for t in self.temperatures):
            raise ValueError(f"temperatures must lie between {1 / STEEPEST} and {STEEPEST}")
        if not all(abs(x) <= STEEPEST for x in (*self.biases, *self.slopes, *self.copy_weights)):
            raise ValueError(f"biases, slopes and copy weights must lie within {STEEPEST}")

    def log_odds(self, evidence: np.ndarray) -> np.ndarray:
        """Calibrated log-odds [..., M] of the evidence [..., M]."""
        return calibrated(evidence, *np.transpose(self.slots))

    def block_log_odds(self, evidence: list[float]) -> list[float]:
        """The same for the first slots of one block, in the plain floats that a round works
        with."""
        return [calibrated_slot(x, *slot) for x, slot in zip(evidence, self.slots, strict=False)]

    @cached_property
    def slots(self) -> list[tuple[float, float, float]]:
        slopes = self.slopes or [1 / T for T in self.temperatures]
        return list(zip(self.temperatures, self.biases, slopes, strict=True))


def calibrated_slot(evidence: float, temperature: float, bias: float, slope: float) -> float:
    """Log-odds x / T + b, or s x + b for x < 0; -inf, as after a drafted stop token, stays."""
    if evidence == -math.inf:
        return -LIMIT
    x = 0.0 if math.isnan(evidence) else min(max(evidence, -LIMIT), LIMIT)
    return (slope if x < 0 else 1 / temperature) * x + bias


@np.errstate(invalid="ignore")  # NaN says nothing
def calibrated(*arrays: float | np.ndarray) -> np.ndarray:
    """`calibrated_slot` of arrays."""
    return np.vectorize(calibrated_slot, otypes=[float])(*arrays)


def uncalibrated(slots: int) -> Calibration:
    return Calibration((1.0,) * slots, (0.0,) * slots)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def mode_of(sampler: SamplerFunction) -> str:
    """The serving mode: greedy drafts; sampled or seeded ones in a band of temperatures."""
    if not isinstance(sampler, Sampler) or sampler.temp == 0:
        return "greedy"
    kind = "seeded" if sampler.seeded else "sampled"
    return f"{kind} from {max(b for b in BANDS if b <= sampler.temp)}"

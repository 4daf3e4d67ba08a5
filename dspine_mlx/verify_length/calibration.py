"""From a drafter's evidence to calibrated chances that its tokens stand.

Evidence x_t is the log-odds of slot t, given that slot t - 1 stood: from a confidence head, or of
the top entry of the drafter's own row (see `dspine_mlx.round.select`). The chance is

    c_t = sigmoid(x_t / T_t + b_t)    from even odds on, and  sigmoid(s_t x_t + b_t)  for x_t < 0,

with T, b and s fitted per slot and serving mode; a prefix stands with the product of its chances.
Below even odds a sampled draft has a slope of its own, which may be negative: a flat law overlaps
with a flat law, as where a name is free to choose, so the least certain drafts are not those that
fall most.
"""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.sample_utils import Sampler as SamplerFunction

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.verify_length import costs
from dspine_mlx.verify_length.costs import digest, write_json

log = logging.getLogger(__name__)
FORMAT = 2
TEMPERATURES = np.logspace(-1, 1, 41)
BINS = 15
LIMIT = 20.0  # log-odds beyond are certainty
PRIOR = 2.0  # information that b = 0, s = 1 / T and log T = 0 are each worth
STEPS = 6  # of `scoring`, each temperature starting where the one before ended
SHIPPED = "calibration.json"  # in a drafter's folder
BANDS = (0.0, 0.5, 0.9)  # sampled modes: temperatures above 0, from 0.5 and from 0.9 on


@dataclass(frozen=True)
class Calibration:
    """T, b and s of every slot; T = 1 and b = 0 take the evidence at its word."""

    temperatures: tuple[float, ...]
    biases: tuple[float, ...]
    rounds: int = 0  # rounds it was fitted on
    ece_before: float | None = None  # mean over the slots, on held-out prompts
    ece_after: float | None = None
    slopes: tuple[float, ...] = ()  # s; empty: 1 / T

    def __post_init__(self) -> None:
        slots = len(self.temperatures)
        if len(self.biases) != slots or not min(self.temperatures, default=0) > 0:
            raise ValueError("temperatures must be above 0, with one bias for each")
        if len(self.slopes) not in (0, slots):
            raise ValueError("there must be one slope for each temperature, or none")
        if not np.isfinite([*self.temperatures, *self.biases, *self.slopes]).all():
            raise ValueError("temperatures, biases and slopes must be finite")

    def log_odds(self, evidence: np.ndarray) -> np.ndarray:
        """Calibrated log-odds [..., M] of the evidence [..., M]."""
        return calibrated(evidence, *self.arrays)

    def block_log_odds(self, evidence: list[float]) -> list[float]:
        """The same for the M slots of one block, in the plain floats that a round works with."""
        return [calibrated_slot(x, *slot) for x, slot in zip(evidence, self.slots, strict=True)]

    @cached_property
    def slots(self) -> list[tuple[float, float, float]]:
        T, b, s = self.arrays
        return list(zip(T.tolist(), b.tolist(), s.tolist(), strict=True))

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        T = np.array(self.temperatures)
        return T, np.array(self.biases), np.array(self.slopes or 1 / T)


def calibrated(
    evidence: np.ndarray,
    temperature: float | np.ndarray,
    bias: float | np.ndarray,
    slope: float | np.ndarray,
) -> np.ndarray:
    """x / T + b, below 0 s x + b; evidence of -inf, as after a drafted stop token, is final."""
    x = np.where(np.isnan(evidence), 0.0, evidence).clip(-LIMIT, LIMIT)
    odds = np.where(x < 0, slope, 1 / temperature) * x + bias
    return np.where(np.isneginf(evidence), -LIMIT, odds)


def calibrated_slot(evidence: float, temperature: float, bias: float, slope: float) -> float:
    """`calibrated` for a single number."""
    if evidence == -math.inf:
        return -LIMIT
    x = 0.0 if math.isnan(evidence) else min(max(evidence, -LIMIT), LIMIT)
    return (slope if x < 0 else 1 / temperature) * x + bias


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


def fit(logits: np.ndarray, accepted: np.ndarray, biased: bool = True) -> Calibration:
    """Sequential temperature scaling (DSpark), left to right, with a bias and a slope per slot.

    logits: [n, M] evidence of n rounds that offered all M tokens; accepted: [n] tokens that stood.
    Of 41 temperatures each slot gets the one under which its outcomes are the most likely, given
    the calibrated survival up to it: so the product is right, also where a slot's evidence tells
    something about earlier slots. (Picked by the smallest 15-bin calibration error, as published,
    temperatures predict other rounds worse.)
    """
    survival, slots = np.ones(len(logits)), []
    for slot in range(logits.shape[1]):
        fitted = fit_slot(logits[:, slot], survival, accepted > slot, biased)
        survival = survival * sigmoid(calibrated(logits[:, slot], *fitted))
        slots.append(fitted)
    temperatures, biases, slopes = (tuple(column) for column in zip(*slots, strict=True))
    return Calibration(temperatures, biases, len(logits), slopes=slopes if biased else ())


def fit_slot(
    evidence: np.ndarray, survival: np.ndarray, stood: np.ndarray, biased: bool
) -> tuple[float, float, float]:
    """T, b and s of one slot; unbiased: b = 0 and s = 1 / T."""
    survival = np.where(np.isneginf(evidence), 0, survival)  # no question here
    x = np.clip(np.nan_to_num(evidence, nan=0.0), -LIMIT, LIMIT)
    features = np.stack([np.ones_like(x), np.minimum(x, 0)], axis=1)
    weights, tried = np.zeros(2), []
    for T in TEMPERATURES.tolist():
        prior, offset = np.array([0, 1 / T]), np.maximum(x, 0) / T
        weights = scoring(features, offset, survival, stood, (weights, prior)) if biased else prior
        chances = np.clip(survival * sigmoid(offset + features @ weights), 1e-12, 1 - 1e-12)
        likelihood = np.log(np.where(stood, chances, 1 - chances)).sum()
        distance = np.square(weights - prior).sum() + np.log(T) ** 2
        tried.append((likelihood - PRIOR / 2 * distance, T, *weights.tolist()))
    _, T, b, s = max(tried)
    return T, b, s


def scoring(
    features: np.ndarray,
    offset: np.ndarray,
    survival: np.ndarray,
    stood: np.ndarray,
    begin: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """The weights w that make `stood` the most likely, by steps of Newton and Fisher.

    Chances are c = survival * sigmoid(offset + features w), w ~ N(prior, 1 / PRIOR); begin: where
    to start, and the prior.
    """
    weights, prior = begin
    for _ in range(STEPS):
        p = sigmoid(offset + features @ weights)
        c = np.minimum(survival * p, 1 - 1e-9)
        share = (1 - p) / (1 - c)
        slope = features.T @ ((stood - c) * share) - PRIOR * (weights - prior)
        bends = np.where(stood, p * (1 - p), c * (1 - p) * share)
        curvature = features.T @ (features * bends[:, None]) + PRIOR * np.eye(2)
        weights = weights + np.clip(np.linalg.solve(curvature, slope), -1, 1)
    return weights


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """The temperatures [M] alone, without biases: see `fit`."""
    return np.array(fit(np.asarray(logits), np.asarray(accepted), biased=False).temperatures)


def ece(chances: np.ndarray, outcomes: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error: mean |chance - frequency| over equal bins, weighted by size."""
    index = np.minimum((chances * bins).astype(int), bins - 1)
    gaps = np.bincount(index, chances - outcomes, bins)
    return float(np.abs(gaps).sum() / len(chances))


def survival_errors(
    calibration: Calibration, logits: np.ndarray, accepted: np.ndarray
) -> np.ndarray:
    """The calibration error [M] of each slot's survival."""
    survival = np.cumprod(sigmoid(calibration.log_odds(logits)), axis=1)
    return np.array([ece(survival[:, t], accepted > t) for t in range(logits.shape[1])])


def chance_errors(calibration: Calibration, logits: np.ndarray, draws: int = 20) -> np.ndarray:
    """The error [M] that as many rounds would show by chance if the calibration were exact."""
    chances = sigmoid(calibration.log_odds(logits))
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(draws):
        accepted = np.cumprod(rng.uniform(size=chances.shape) < chances, axis=1).sum(axis=1)
        errors.append(survival_errors(calibration, logits, accepted))
    return np.mean(errors, axis=0)


def calibration_key(drafter: Drafter) -> dict[str, str]:
    """The pair: tensors' names and shapes, and the values of two of the drafter's.

    Packed weights have other names and shapes; a cast between float types changes nothing.
    """
    values = [drafter.network.norm.weight, drafter.network.hidden_norm.weight]
    return {
        "format": str(FORMAT),
        "target": shapes(drafter.target.model),
        "drafter": shapes(drafter.network),
        "values": digest([value.astype(mx.float32).tolist() for value in values]),
    }


def shapes(module: nn.Module) -> str:
    tensors = tree_flatten(module.parameters())
    return digest([[name, list(value.shape)] for name, value in tensors])


def calibration_path(drafter: Drafter) -> Path:
    return costs.CACHE / f"calibration-{digest(calibration_key(drafter))}.json"


def save_calibrations(path: Path, drafter: Drafter, modes: dict[str, Calibration]) -> None:
    fitted = {mode: asdict(calibration) for mode, calibration in modes.items()}
    key, pair = calibration_key(drafter), costs.describe(drafter)
    write_json(path, {"key": key, "pair": pair, "modes": fitted})


def load_calibrations(drafter: Drafter, path: Path | None = None) -> dict[str, Calibration]:
    """The calibrations of a pair by mode; none, with a warning, if the file does not fit it.

    path: else the one made on this machine, else the one in the drafter's folder.
    """
    paths = [path] if path else [calibration_path(drafter)]
    if path is None and drafter.folder is not None:
        paths.append(drafter.folder / SHIPPED)
    path = next((p for p in paths if p.is_file()), None)
    if path is None:
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["key"] != calibration_key(drafter):
            raise ValueError("it belongs to another pair")
        modes = {name: from_dict(value) for name, value in data["modes"].items()}
        if any(len(c.biases) != drafter.config.num_proposals for c in modes.values()):
            raise ValueError("it has another number of slots")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        log.warning("%s can't be used (%s); confidences stay uncalibrated", path, error)
        return {}
    return modes


def from_dict(data: dict[str, Any]) -> Calibration:
    def floats(values: Sequence[Any]) -> tuple[float, ...]:
        return tuple(float(v) for v in values)

    return Calibration(
        floats(data["temperatures"]),
        floats(data["biases"]),
        int(data["rounds"]),
        data["ece_before"],
        data["ece_after"],
        floats(data["slopes"]),
    )

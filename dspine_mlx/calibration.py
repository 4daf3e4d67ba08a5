"""From a drafter's evidence to calibrated chances that its tokens stand.

Evidence x_t is the log-odds of slot t, given that slot t - 1 stood: from a confidence head, or of
the top entry of the drafter's own row (see `dspine_mlx.selection`). The chance is
sigmoid(x_t / T_t + b_t), with T and b fitted per slot and serving mode; a prefix stands with the
product of its chances.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import Sampler as SamplerFunction

from dspine_mlx import costs
from dspine_mlx.costs import FORMAT, digest, structure, write_json
from dspine_mlx.dflash import DFlash
from dspine_mlx.sampling import Sampler

log = logging.getLogger(__name__)
TEMPERATURES = np.logspace(-1, 1, 41)
BINS = 15
SHIPPED = "calibration.json"  # in a drafter's folder
BANDS = (0.0, 0.5, 0.9)  # sampled modes: temperatures above 0, from 0.5 and from 0.9 on


@dataclass(frozen=True)
class Calibration:
    """T and b of every slot; T = 1 and b = 0 take the evidence at its word."""

    temperatures: tuple[float, ...]
    biases: tuple[float, ...]
    rounds: int = 0  # rounds it was fitted on
    ece_before: float | None = None  # mean over the slots, on held-out prompts
    ece_after: float | None = None

    def __post_init__(self) -> None:
        if len(self.temperatures) != len(self.biases) or not min(self.temperatures, default=0) > 0:
            raise ValueError("temperatures must be above 0, with one bias for each")
        if not np.isfinite([*self.temperatures, *self.biases]).all():
            raise ValueError("temperatures and biases must be finite")

    def log_odds(self, evidence: np.ndarray) -> np.ndarray:
        """Calibrated log-odds [..., M] of the evidence [..., M]."""
        evidence = np.clip(np.nan_to_num(evidence, nan=0.0), -20, 20)
        return evidence / np.array(self.temperatures) + np.array(self.biases)


def uncalibrated(slots: int) -> Calibration:
    return Calibration((1.0,) * slots, (0.0,) * slots)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def mode_of(sampler: SamplerFunction) -> str:
    """The serving mode: one-hot drafts, or sampled ones in a band of temperatures."""
    if not isinstance(sampler, Sampler) or sampler.temp == 0:
        return "greedy"
    return f"sampled from {max(b for b in BANDS if b <= sampler.temp)}"


def fit(logits: np.ndarray, accepted: np.ndarray, biased: bool = True) -> Calibration:
    """Sequential temperature scaling (DSpark), left to right, plus a bias per slot.

    logits: [n, M] evidence of n rounds that offered all M tokens; accepted: [n] tokens that stood.
    Each slot's temperature is the one of 41 that gives the cumulative product the smallest 15-bin
    calibration error, or of those within half a standard error the one nearest to 1; its bias makes
    the mean chance among the rounds that reached the slot equal to the share that passed it.
    """
    logits = np.clip(logits, -20, 20)
    reached, temperatures, biases = np.ones(len(logits)), [], []
    for slot in range(logits.shape[1]):
        stood = accepted > slot
        alive = logits[accepted >= slot, slot]
        tried = []
        for T in TEMPERATURES:
            bias = intercept(alive / T, int(stood.sum())) if biased else 0.0
            error = ece(reached * sigmoid(logits[:, slot] / T + bias), stood)
            tried.append((error, float(T), bias))
        close = min(tried)[0] + 0.5 * stood.std() / len(stood) ** 0.5
        _, T, bias = min((t for t in tried if t[0] <= close), key=lambda t: abs(np.log(t[1])))
        temperatures.append(T)
        biases.append(bias)
        reached = reached * sigmoid(logits[:, slot] / T + bias)
    return Calibration(tuple(temperatures), tuple(biases), len(logits))


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """The temperatures [M] alone, without biases: see `fit`."""
    return np.array(fit(np.asarray(logits), np.asarray(accepted), biased=False).temperatures)


def intercept(logits: np.ndarray, stood: int) -> float:
    """b with sum sigmoid(logits + b) = stood, by bisection.

    One round that stood and one that did not are added at log-odds 0, so b is always finite.
    """
    logits, low, high = np.append(logits, [0.0, 0.0]), -12.0, 12.0
    for _ in range(40):
        b = (low + high) / 2
        low, high = (low, b) if sigmoid(logits + b).sum() > stood + 1 else (b, high)
    return (low + high) / 2


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


def calibration_key(drafter: DFlash) -> dict[str, str]:
    """The pair: tensors' names and shapes, and the values of two of the drafter's."""
    values = [drafter.norm.weight, drafter.hidden_norm.weight]
    return {
        "format": str(FORMAT),
        "target": structure(drafter.target.model),
        "drafter": structure(drafter),
        "values": digest([value.astype(mx.float32).tolist() for value in values]),
    }


def calibration_path(drafter: DFlash) -> Path:
    return costs.CACHE / f"calibration-{digest(calibration_key(drafter))}.json"


def save_calibrations(path: Path, drafter: DFlash, modes: dict[str, Calibration]) -> None:
    data = {"key": calibration_key(drafter), "modes": {m: asdict(c) for m, c in modes.items()}}
    write_json(path, data)


def load_calibrations(drafter: DFlash, path: Path | None = None) -> dict[str, Calibration]:
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
    )

"""The measured costs and the calibrations on file: of which pair, how old, and whether sane."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from dspine_mlx.verify_length import costs
from dspine_mlx.verify_length.calibration import Calibration, from_dict
from dspine_mlx.verify_length.costs import Curve, device_name
from dspine_mlx.verify_length.fit import LEAST_ROUNDS

DAY = 24 * 3600.0
CHEAPER = 0.6  # a forward that took less than this share of one over a row less was disturbed
APART = 2.5  # a plain token and a forward over one row differ by less than this factor


@dataclass(frozen=True)
class OnFile:
    """A file of the cache folder. problem: why it is not used, or not to be trusted, in words."""

    name: str
    days: float  # since it was written
    pair: str
    problem: str


@dataclass(frozen=True)
class CostsOnFile(OnFile):
    device: str = ""
    mlx: str = ""
    curve: Curve | None = None


@dataclass(frozen=True)
class CalibrationsOnFile(OnFile):
    modes: dict[str, Calibration] | None = None


def costs_on_file() -> Iterator[CostsOnFile]:
    for path in files("costs"):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            pair = words(data)
            curve = Curve.from_dict(data["curve"])
            device, version = str(data["key"]["device"]), str(data["key"]["mlx"])
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            yield CostsOnFile(path.name, age(path), "unknown pair", unreadable(error))
            continue
        problem = foreign(device, version) or disturbed(curve)
        yield CostsOnFile(path.name, age(path), pair, problem, device, version, curve)


def calibrations_on_file() -> Iterator[CalibrationsOnFile]:
    for path in files("calibration"):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            pair = words(data)
            modes = {str(mode): from_dict(value) for mode, value in data["modes"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            yield CalibrationsOnFile(path.name, age(path), "unknown pair", unreadable(error))
            continue
        yield CalibrationsOnFile(path.name, age(path), pair, doubtful(modes), modes)


def files(kind: str) -> list[Path]:
    return sorted(costs.CACHE.glob(f"{kind}-*.json"))


def age(path: Path) -> float:
    return max(0.0, time.time() - path.stat().st_mtime) / DAY


def words(data: dict[str, Any]) -> str:
    """The pair that a file is of; older files have its digests only."""
    digests = f"target {data['key']['target']} with drafter {data['key']['drafter']}"
    return str(data.get("pair") or digests)


def unreadable(error: Exception) -> str:
    return f"it can't be read ({type(error).__name__})"


def foreign(device: str, version: str) -> str:
    if device != device_name():
        return f"it was measured on {device}"
    return f"it was measured with MLX {version}" if version != mx.__version__ else ""


def disturbed(curve: Curve) -> str:
    """Signs that something else ran while a curve was measured."""
    rows = curve.verify[0]
    for n, (less, more) in enumerate(zip(rows, rows[1:], strict=False), 1):
        if more < CHEAPER * less:
            return f"{n + 1} rows took {more / less:.0%} of the time of {n}"
    ratio = curve.plain[0] / rows[0]
    if not 1 / APART < ratio < APART:
        return f"a plain token took {ratio:.2g} times a forward over one row"
    return ""


def doubtful(modes: dict[str, Calibration]) -> str:
    for mode, calibration in modes.items():
        before, after = calibration.ece_before, calibration.ece_after
        if calibration.rounds < LEAST_ROUNDS:
            return f"{mode} was fitted on {calibration.rounds} rounds only"
        if before is not None and after is not None and after > before:
            return f"{mode} is further off with it ({after:.1%}) than without ({before:.1%})"
    return ""

"""Files in the cache folder: which pair each belongs to, its age, and whether it is sane."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from dspine_mlx.cache_folder import reading, restored
from dspine_mlx.errors import InputError
from dspine_mlx.verify_length import store
from dspine_mlx.verify_length.calibration import Calibration
from dspine_mlx.verify_length.costs import Curve
from dspine_mlx.verify_length.fit import LEAST_ROUNDS

DAY = 24 * 3600.0
UNREADABLE = "it can't be read"


@dataclass(frozen=True)
class OnFile:
    """A file in the cache folder. problem: why it is not used or should not be trusted, in
    words."""

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
            with reading(path) as data:
                pair = pair_name(data)
                curve = restored(Curve, data["curve"])
                device, version = str(data["key"]["device"]), str(data["key"]["mlx"])
        except InputError:
            yield CostsOnFile(path.name, days_old(path), "unknown pair", UNREADABLE)
            continue
        problem = other_machine(device, version) or curve.contradiction()
        yield CostsOnFile(path.name, days_old(path), pair, problem, device, version, curve)


def calibrations_on_file() -> Iterator[CalibrationsOnFile]:
    for path in files("calibration"):
        try:
            with reading(path) as data:
                pair = pair_name(data)
                modes = {str(m): store.read_calibration(one) for m, one in data["modes"].items()}
        except InputError:
            yield CalibrationsOnFile(path.name, days_old(path), "unknown pair", UNREADABLE)
            continue
        yield CalibrationsOnFile(path.name, days_old(path), pair, looks_unreliable(modes), modes)


def files(kind: str) -> list[Path]:
    return sorted(store.cache_folder().glob(f"{kind}-*.json"))


def days_old(path: Path) -> float:
    return max(0.0, time.time() - path.lstat().st_mtime) / DAY


def pair_name(data: dict[str, Any]) -> str:
    """Name of the pair that a file belongs to; older files have its digests only."""
    digests = f"target {data['key']['target']} with drafter {data['key']['drafter']}"
    return str(data.get("pair") or digests)


def other_machine(device: str, version: str) -> str:
    if device != store.device_name():
        return f"it was measured on {device}"
    return f"it was measured with MLX {version}" if version != mx.__version__ else ""


def looks_unreliable(modes: dict[str, Calibration]) -> str:
    for mode, calibration in modes.items():
        before, after = calibration.ece_before, calibration.ece_after
        if calibration.rounds < LEAST_ROUNDS:
            return f"{mode} was fitted on {calibration.rounds} rounds only"
        if before is not None and after is not None and after > before:
            return f"{mode} is further off with it ({after:.1%}) than without ({before:.1%})"
    return ""

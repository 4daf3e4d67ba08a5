"""Calibrations that ship beside a checkpoint: SGLang's temperatures and its table of step costs."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspine_mlx.checkpoints.files import inside, read_json
from dspine_mlx.checkpoints.open import Checkpoint
from dspine_mlx.errors import InputError

LARGEST = 1 << 20  # bytes; larger JSON files are not calibrations
NOT_CALIBRATION = ("config.json", "generation_config.json")
TEMPERATURES = {"temperatures"}  # sequential temperature scaling: one per position
COSTS = (
    {"sample_batch_tokens", "sample_steps_per_sec"},
    {"bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds"},
)


@dataclass
class Calibration:
    temperatures: list[float] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # to copy along
    notes: list[str] = field(default_factory=list)


def read_calibration(checkpoint: Checkpoint) -> Calibration:
    """Read the calibration files of a checkpoint's folder; temperatures must fit its proposals."""
    found = Calibration()
    for file in sorted(checkpoint.folder.glob("*.json")):
        if file.name in NOT_CALIBRATION or file.stat().st_size > LARGEST:
            continue
        value = json_object(inside(checkpoint.folder, file.name))
        if value.keys() >= TEMPERATURES:
            found.temperatures = temperatures(file, value["temperatures"], checkpoint)
            found.files[file.name] = value
            found.notes.append(f"confidence temperatures from {file.name}")
        elif any(keys <= value.keys() for keys in COSTS):
            numbers(file, value)
            found.files[file.name] = value
            found.notes.append(f"step costs from {file.name}, measured where it was trained")
    return found


def json_object(file: Path) -> dict[str, Any]:
    """Read the object in a file; empty for anything else, which is not a calibration."""
    try:
        return read_json(file)
    except InputError:
        return {}


def temperatures(file: Path, values: Any, checkpoint: Checkpoint) -> list[float]:
    count = checkpoint.config.num_proposals
    good = isinstance(values, list) and len(values) == count
    if not good or not all(is_number(v) and v > 0 for v in values):
        raise InputError(
            f"{file} has the temperatures {values!r}; it must be {count} numbers above 0"
        )
    return [float(v) for v in values]


def numbers(file: Path, value: dict[str, Any]) -> None:
    for name in set().union(*COSTS) & value.keys():
        entries = value[name] if isinstance(value[name], list) else [value[name]]
        if not all(is_number(v) for v in entries):
            raise InputError(f"{file} has {name} {value[name]!r}; it must be numbers")


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)

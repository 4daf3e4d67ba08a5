"""Files kept per pair: measured costs with what drafting has shown, and calibrations.

Costs belong to chip, MLX version and pair, calibrations to the pair alone. An unusable file gets a
one-sentence warning and is made again; a failure to write one does no other harm.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from dspine_mlx.cache_folder import cache_folder, present, reading, restored, write_json
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.verify_length.budget import Budget
from dspine_mlx.verify_length.calibration import Calibration
from dspine_mlx.verify_length.costs import Curve
from dspine_mlx.verify_length.misfit import Misfit

log = logging.getLogger(__name__)
FORMAT = "2"
SHIPPED = "calibration.json"  # in a drafter's folder


class Shown(NamedTuple):
    """What a pair has shown so far: its curve, the budget of each serving mode, and how well the
    drafter fits."""

    curve: Curve | None = None
    budgets: dict[str, Budget] = {}
    misfit: Misfit | None = None


def read_costs(drafter: Drafter) -> Shown:
    """Read what the pair had shown when its last text ended; empty without a usable file."""
    path = costs_path(drafter)
    if not present(path):
        return Shown()
    try:
        with reading(path) as data:
            curve = restored(Curve, data["curve"])
            widths = drafter.most_offered + 1
            if data["key"] != pair_key(drafter) or len(curve.verify[0]) != widths:
                raise InputError("it belongs to another pair")
            if curve.contradiction():
                raise InputError(curve.contradiction())
            budgets = {str(m): restored(Budget, b) for m, b in data.get("budgets", {}).items()}
            misfit = Misfit.from_dict(data["misfit"]) if "misfit" in data else None
    except InputError as error:
        log.warning("%s can't be used (%s); the costs are measured again", path, error)
        return Shown()
    return Shown(curve, budgets, misfit)


def write_costs(drafter: Drafter, curve: Curve, budgets: Mapping[str, Budget]) -> None:
    data = {"key": pair_key(drafter), "pair": describe(drafter), "curve": asdict(curve)}
    data["budgets"] = {mode: asdict(budget) for mode, budget in budgets.items()}
    data["misfit"] = drafter.misfit.as_dict()
    keep(costs_path(drafter), data)


def costs_path(drafter: Drafter) -> Path:
    return cache_folder() / f"costs-{digest(pair_key(drafter))}.json"


def calibration_path(drafter: Drafter) -> Path:
    return cache_folder() / f"calibration-{digest(calibration_key(drafter))}.json"


def save_calibrations(
    path: Path,
    drafter: Drafter,
    modes: dict[str, Calibration],
    reading: Mapping[str, Any] | None = None,
) -> None:
    """reading: changes of the drafter's config that they were fitted with."""
    fitted = {mode: asdict(calibration) for mode, calibration in modes.items()}
    key, pair = calibration_key(drafter), describe(drafter)
    keep(path, {"key": key, "pair": pair, "modes": fitted, "reading": dict(reading or {})})


def load_calibrations(drafter: Drafter, path: Path | None = None) -> dict[str, Calibration]:
    """The calibrations of a pair by mode; none, with a warning, if the file does not fit it.

    path: None takes the file made on this machine, else the one in the drafter's folder.
    """
    path = path or found_calibration(drafter)
    if path is None:
        return {}
    try:
        with reading(path) as data:
            if data["key"] != calibration_key(drafter):
                raise InputError("it belongs to another pair")
            modes = {name: read_calibration(one) for name, one in data["modes"].items()}
            if any(len(c.biases) != drafter.config.num_proposals for c in modes.values()):
                raise InputError("it has another number of slots")
    except InputError as error:
        log.warning("%s can't be used (%s); confidences stay uncalibrated", path, error)
        return {}
    return modes


def read_calibration(data: dict[str, Any]) -> Calibration:
    """From JSON, in which earlier versions wrote no copy weights; as `restored`."""
    return restored(Calibration, {"copy_weights": (), **data})


def found_calibration(drafter: Drafter) -> Path | None:
    """The file made on this machine, else the one in the drafter's folder."""
    if not drafter.config.num_proposals:
        return None
    shipped = [drafter.folder / SHIPPED] if drafter.folder else []
    return next((p for p in (calibration_path(drafter), *shipped) if present(p)), None)


def load_reading(drafter: Drafter, path: Path | None = None) -> dict[str, Any]:
    """The reading that the pair's calibrations were fitted with: changes of the drafter's config.
    What is wrong with a file is said by `load_calibrations`."""
    path = path or found_calibration(drafter)
    if path is None:
        return {}
    try:
        with reading(path) as data:
            same = data["key"] == calibration_key(drafter)
            return dict(data.get("reading", {})) if same else {}
    except InputError:
        return {}


def keep(path: Path, data: dict[str, Any]) -> None:
    """Write atomically; a folder that can't be written is only warned about."""
    try:
        write_json(path, data)
    except OSError as error:
        log.warning("%s can't be written (%s); it will be made again next time", path, error)


def pair_key(drafter: Drafter) -> dict[str, str]:
    """What a measurement depends on. Models are known by their tensors' names, shapes, dtypes."""
    key = {
        "format": FORMAT,
        "device": device_name(),
        "blas": os.environ.get("LD_PRELOAD", ""),  # MLX has no name for the library it is using
        "mlx": mx.__version__,
        "target": structure(drafter.target.model),
        "drafter": structure(drafter.network),
        "rows": str(drafter.most_offered + 1),
    }
    kernels = drafter.target.verify_kernels.digest
    key |= drafter.verifier.ranks.key
    return key | {"kernels": kernels} if kernels else key


def calibration_key(drafter: Drafter) -> dict[str, str]:
    """Identify the pair: tensors' names and shapes, and the values of two of the drafter's.

    Packed weights have other names and shapes; a cast between float types changes nothing.
    """
    values = [drafter.network.norm.weight, drafter.network.hidden_norm.weight]
    return {
        "format": FORMAT,
        "target": drafter.verifier.ranks.structure or structure(drafter.target.model, dtypes=False),
        "drafter": structure(drafter.network, dtypes=False),
        "values": digest([value.astype(mx.float32).tolist() for value in values]),
    }


def describe(drafter: Drafter) -> str:
    """A bound pair in words, without names."""
    target = drafter.target
    family = type(target.model).__module__.rpartition(".")[2]
    size = sum(value.nbytes for _, value in tree_flatten(target.model.parameters()))
    return (
        f"{family}, {len(target.layers)} layers of {target.hidden_size}, {size / 1e9:.2g} GB, with "
        f"{type(drafter.network).__name__}, {len(drafter.layers)} layers, "
        f"{drafter.config.num_proposals} proposals"
    )


def device_name() -> str:
    if mx.metal.is_available():
        return str(mx.device_info()["device_name"])
    return f"{platform.system()} {platform.machine()} with {os.cpu_count()} processors"


def structure(module: Any, dtypes: bool = True) -> str:
    tensors = tree_flatten(module.parameters())
    kinds = [[str(value.dtype)] if dtypes else [] for _, value in tensors]
    return digest(
        [[name, list(value.shape), *k] for (name, value), k in zip(tensors, kinds, strict=True)]
    )


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]

"""Results of the whole-model check of exact mode, kept on file so that a target is checked once.

A result holds for one target with its weights, on one machine, with the software at hand. So its
key names all of that, and another key finds nothing.
"""

import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dspine_mlx.cache_folder import reading, write_json
from dspine_mlx.errors import InputError
from dspine_mlx.target.equal_rows import TEXTS

log = logging.getLogger(__name__)
FORMAT = 1
NAME = "exact.json"
KEPT = 32  # results, the newest: a file of some 30 kB
ENVIRONMENT = ("MLX_", "LD_PRELOAD", "OMP_", "OPENBLAS_")  # variables that change arithmetic
PACKAGE, CODE = Path(__file__).parent.parent, ("metal", "target")
UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}  # by bytes per element

Widths = dict[int, str]  # rows of a verify forward -> where it differs from single rows, or ""


def check_key(
    model: nn.Module, kernels: Mapping[str, Any], depths: Collection[int]
) -> dict[str, Any]:
    """Everything that a result depends on. kernels: what identifies machine, MLX, the kernels'
    text, and the product that each shape was given."""
    environment = sorted((k, v) for k, v in os.environ.items() if k.startswith(ENVIRONMENT))
    return {
        **kernels,
        "target": model_digest(model),
        "packages": {name: version(name) for name in ("dspine-mlx", "mlx-lm")},
        "code": code_digest(),
        "environment": digest(environment),  # may hold paths
        "depths": sorted(depths),
        "texts": TEXTS,
    }


def model_digest(model: nn.Module) -> str:
    """A digest of classes, settings and all weights, in two reads of the weights.

    A matrix counts by the sums of its rows and of its columns, as integers: enough to tell other
    weights, and no secret to keep. Vectors count as they are.
    """
    described: list[list[Any]] = []
    arrays: list[mx.array] = []
    for path, module in sorted(model.named_modules()):
        settings = {k: v for k, v in vars(module).items() if isinstance(v, str | int | float)}
        cls = type(module)
        described.append([path, cls.__module__, cls.__qualname__, sorted(settings.items())])
        for name, value in sorted(module.items()):
            if isinstance(value, mx.array):
                described.append([name, str(value.dtype), value.shape])
                arrays += sums(value)
    mx.eval(arrays)
    hashed = hashlib.sha256(json.dumps(described).encode())
    for array in arrays:
        hashed.update(np.array(array).tobytes())
    return hashed.hexdigest()[:16]


def code_digest(package: Path = PACKAGE) -> str:
    """A digest of the code that verify forwards run: between releases it changes, the version does
    not."""
    hashed = hashlib.sha256()
    for folder in CODE:
        for file in sorted((package / folder).glob("*.*")):
            if file.suffix in (".py", ".metal"):
                hashed.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]


def sums(value: mx.array) -> Iterator[mx.array]:
    numbers = value.view(UNSIGNED[value.dtype.size])
    if numbers.ndim < 2:
        yield numbers
        return
    rows = numbers.reshape(-1, numbers.shape[-1])
    yield rows.sum(axis=0)
    yield rows.sum(axis=1)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def read(folder: Path, key: dict[str, Any]) -> Widths:
    """Read what is known under a key; nothing if the file is absent or unreadable."""
    return next((widths for known, widths in entries(folder) if known == key), {})


def write(folder: Path, key: dict[str, Any], widths: Widths) -> None:
    """Put a result in front of the file. If the folder can't be written, the next load checks
    again."""
    others = [entry for entry in entries(folder) if entry[0] != key]
    kept = [
        {"key": key, "widths": {str(width): where for width, where in sorted(widths.items())}}
        for key, widths in [(key, widths), *others][:KEPT]
    ]
    try:
        write_json(folder / NAME, {"format": FORMAT, "checked": kept})
    except OSError as error:
        log.warning("checks of targets can't be kept in %s: %s", folder, error.strerror)


def entries(folder: Path) -> list[tuple[dict[str, Any], Widths]]:
    """All results on file, the newest first."""
    file = folder / NAME
    if not file.exists():
        return []
    try:
        with reading(file) as data:
            if data["format"] != FORMAT:
                return []
            return [
                (dict(one["key"]), {int(w): str(where) for w, where in one["widths"].items()})
                for one in data["checked"]
            ]
    except InputError as error:
        log.warning("%s can't be read (%s); targets are checked again", file, error)
        return []

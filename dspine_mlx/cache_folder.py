"""The folder for this machine's costs, calibrations and verdicts on kernels, kept as JSON."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from itertools import repeat
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from dspine_mlx.checkpoints.files import read_json
from dspine_mlx.errors import InputError

T = TypeVar("T")
NAME = "dspine-mlx"
UNUSABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError)


def cache_folder() -> Path:
    """The folder ~/.cache/dspine-mlx; for a user without a home, as in some containers, a private
    folder among temporary files."""
    try:
        return Path.home() / ".cache" / NAME
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"


def present(path: Path) -> bool:
    """Whether there is such a file, as far as this user can see."""
    try:
        return path.is_file()
    except OSError:  # no permission, or a home whose name is too long
        return False


@contextmanager
def reading(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON object of a file, to be taken apart in the block; `InputError` for whatever goes
    wrong there, as anybody may have written the file."""
    try:
        yield read_json(path)
    except InputError:
        raise
    except UNUSABLE as error:
        raise InputError(f"it is not what was written: {type(error).__name__}: {error}") from error


def restored(kind: type[T], data: Mapping[str, Any]) -> T:
    """A dataclass of numbers and tuples of them, from the JSON of `asdict`; ValueError, KeyError or
    TypeError when it is not one."""
    hints: dict[str, Any] = get_type_hints(kind)
    names = [f.name for f in fields(kind) if f.init]  # type: ignore[arg-type]
    return kind(**{name: value_of(hints[name], data[name]) for name in names})


def value_of(hint: Any, value: Any) -> Any:
    """A value from JSON as the type that a field is declared with."""
    parts = get_args(hint)
    if NoneType in parts:
        return None if value is None else value_of(parts[0], value)
    if not parts:
        value = float(value) if hint is float and type(value) is int else value
        if type(value) is not hint:
            raise TypeError(f"{value!r} is no {hint.__name__}")
        return value
    every = parts[-1] is ...
    hints = repeat(parts[0]) if every else parts
    return tuple(value_of(h, v) for h, v in zip(hints, value, strict=not every))


def write_json(path: Path, data: dict[str, Any]) -> None:
    """All of it or nothing; OSError if the folder can't be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
    ) as file:
        part = Path(file.name)
        try:
            json.dump(data, file, indent=1)
            file.flush()
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

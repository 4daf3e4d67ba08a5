"""The folder for this machine's costs, calibrations and verdicts on kernels, kept as JSON."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspine_mlx.checkpoints.files import read_json
from dspine_mlx.errors import InputError

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

"""Output files of commands: never overwriting, and either complete or absent."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from dspine_mlx.errors import InputError


def check_new(path: Path | None) -> None:
    """Raise `InputError` before the work if the file could not be written after it."""
    if path is None:
        return
    if path.exists() or path.is_symlink():
        raise InputError(f"{path} exists; name a new file")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} for {path.name}; make it first")


def check_plot(path: Path | None) -> None:
    """The same for a plot, and that it can be drawn."""
    check_new(path)
    if path is not None:
        check_matplotlib()


def check_matplotlib() -> None:
    if not find_spec("matplotlib"):
        raise InputError("--plot needs matplotlib; install it with pip install matplotlib")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`. It is renamed to `path` if the block succeeds, and
    deleted if not."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        check_new(path)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

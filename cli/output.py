"""Files that commands write: never over one that exists, and whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dspine_mlx.errors import InputError


def check_new(path: Path | None) -> None:
    """`InputError` before the work, if a file could not be written after it."""
    if path is None:
        return
    if path.exists() or path.is_symlink():
        raise InputError(f"{path} exists; name a new file")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} for {path.name}; make it first")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file beside `path` that becomes it when the block ends well, and vanishes if not."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        check_new(path)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

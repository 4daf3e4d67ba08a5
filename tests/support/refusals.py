"""What conversion and loading must refuse alike."""

from pathlib import Path

import pytest

from dspine_mlx.convert.conversion import convert
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter
from tests.support.checkpoints import (
    tiny_target,
)


def refused(folder: Path, message: str) -> None:
    """One sentence, nothing written, from conversion and from loading alike."""
    out = folder.parent / "out"
    before = sorted(folder.parent.iterdir())
    with pytest.raises(InputError, match=message) as error:
        convert(folder, out)
    assert "\n" not in str(error.value)
    assert sorted(folder.parent.iterdir()) == before
    with pytest.raises(InputError):
        load_drafter(folder, tiny_target()[0])

"""The folder for this machine's costs and calibrations."""

import os
import tempfile
from pathlib import Path

NAME = "dspine-mlx"


def cache_folder() -> Path:
    """The folder ~/.cache/dspine-mlx; for a user without a home, as in some containers, a private
    folder among temporary files."""
    try:
        return Path.home() / ".cache" / NAME
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"

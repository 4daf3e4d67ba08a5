"""Where costs and calibrations of this machine are kept."""

import os
import tempfile
from pathlib import Path

NAME = "dspine-mlx"


def cache_folder() -> Path:
    """~/.cache/dspine-mlx; for a user without a home, as in some containers, a folder of their own
    beside other temporary files."""
    try:
        return Path.home() / ".cache" / NAME
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"

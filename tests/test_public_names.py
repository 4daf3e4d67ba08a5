"""What `dspine_mlx.` offers."""

import subprocess
import sys

import dspine_mlx


def test_dir_shows_the_public_names_only() -> None:
    """Before anything is loaded, and after; each of them is there."""
    shown = "import dspine_mlx; print(*dir(dspine_mlx))"
    fresh = subprocess.run(
        [sys.executable, "-c", shown], capture_output=True, text=True, check=True
    )
    assert fresh.stdout.split() == sorted(dspine_mlx.__all__)
    assert all(getattr(dspine_mlx, name) is not None for name in dspine_mlx.__all__)
    assert dir(dspine_mlx) == sorted(dspine_mlx.__all__)


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "dspine_mlx", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == f"dspine-mlx {dspine_mlx.__version__}\n"

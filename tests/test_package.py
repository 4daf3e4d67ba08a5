"""The wheel holds what git holds, and works outside the checkout."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
OUTER = {"metal": "dspine_mlx/metal", "convert": "dspine_mlx/convert", "cli": "dspine_mlx/cli"}


def tracked() -> set[str]:
    """Files of the package in git, under the names they install as."""
    command = ["git", "ls-files", "dspine_mlx", *OUTER]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = set()
    for name in names.splitlines():
        top, _, rest = name.partition("/")
        if not (ROOT / name).is_symlink():
            files.add(f"{OUTER[top]}/{rest}" if top in OUTER else name)
    return files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    diff = subprocess.run(
        ["git", "diff", "HEAD", "--binary"], cwd=ROOT, capture_output=True, check=True
    )
    if diff.stdout:
        subprocess.run(["git", "apply"], cwd=source, input=diff.stdout, check=True)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_is_what_git_tracks(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    assert names == tracked()


def output(*command: str | Path, cwd: Path) -> str:
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_the_wheel_runs_in_a_fresh_venv(wheel: Path, tmp_path: Path) -> None:
    """Only dependencies come from the environment that runs the tests."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    output(*pip, "install", "-q", "--no-deps", wheel, cwd=tmp_path)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(output(python, "-c", purelib, cwd=tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    program = tmp_path / "venv" / "bin" / "dspine-mlx"
    assert output(program, "generate", "-p", "Ali has 52 caps.", "-m", "4", cwd=tmp_path).strip()
    where = "import dspine_mlx.metal as m; print(m.__file__)"
    assert output(python, "-c", where, cwd=tmp_path).startswith(str(tmp_path / "venv"))

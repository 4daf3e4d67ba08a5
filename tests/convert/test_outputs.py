"""What conversion leaves when it is interrupted, runs out of room, or meets existing paths."""

import resource
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from dspine_mlx.convert.conversion import convert
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter
from tests.support.checkpoints import (
    tiny_target,
)

pytestmark = pytest.mark.slow

STALL = """
import sys, time
from pathlib import Path
from dspine_mlx.convert.conversion import convert

def progress(done, total):
    if done > total / 2:
        print("half", flush=True)
        time.sleep(60)

convert(sys.argv[1], sys.argv[2], progress=progress)
"""


def stalled(source: Path, out: Path) -> subprocess.Popen[str]:
    """A conversion that is half done and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", STALL, str(source), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    return process


def test_an_interrupt_leaves_nothing(source: Path, tmp_path: Path) -> None:
    process = stalled(source, tmp_path / "out")
    assert list(tmp_path.glob(".out.*.partial"))
    process.send_signal(signal.SIGINT)
    process.wait(timeout=20)
    assert process.returncode != 0
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_killed_conversion_leaves_nothing_that_loads(source: Path, tmp_path: Path) -> None:
    process = stalled(source, tmp_path / "out")
    process.kill()
    process.wait(timeout=20)
    assert not (tmp_path / "out").exists()
    for partial in tmp_path.glob(".out.*.partial"):
        with pytest.raises(InputError, match="has no config.json"):
            load_drafter(partial, tiny_target()[0])
    convert(source, tmp_path / "out")  # and it blocks nothing
    load_drafter(tmp_path / "out", tiny_target()[0])


def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="could not write model.safetensors"):
            convert(source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_too_little_room_is_said_before(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = types.SimpleNamespace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    refused_room = "GB free, the output takes"
    with pytest.raises(InputError, match=refused_room):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_an_existing_path_is_refused(source: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "dangling link":
        out.symlink_to(tmp_path / "nowhere")
    else:
        (out.mkdir if kind == "folder" else out.touch)()
    with pytest.raises(InputError, match="exists; remove it or name another"):
        convert(source, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_a_path_taken_meanwhile_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def progress(done: int, total: int) -> None:
        out.mkdir(exist_ok=True)

    with pytest.raises(InputError, match="exists"):
        convert(source, out, progress=progress)
    assert not list(out.iterdir())


def test_a_file_changed_later_is_noticed(source: Path, tmp_path: Path) -> None:
    from dspine_mlx.convert.report import report

    convert(source, tmp_path / "out")
    assert report(tmp_path / "out", check_weights=True)["problems"] == []
    file = tmp_path / "out" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = report(tmp_path / "out", check_weights=True)["problems"]
    assert len(found) == 1
    assert "SHA-256 differs" in found[0]

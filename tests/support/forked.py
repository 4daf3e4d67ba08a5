"""Processes with everything imported: one process imports it, and forks whatever is asked of it.

    python -m tests.support.forked

It reads a JSON object per line: {"argv", "env", "fds", "session"} starts a process, and {"poll":
pid} asks for its exit status. Importing mlx-lm takes a second, and a rank little else. MLX starts
its threads at the first evaluation, which is a child's own.

What Python and packages read of the environment when they start (the locale, the Hub's cache) is
the template's: a test of that, or of streams that are closed, starts a process of its own.
"""

import gc
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

IMPORTED = (
    "dspine_mlx.cli.chat_loop",
    "dspine_mlx.cli.pair",
    "dspine_mlx.group.meet",
    "dspine_mlx.measure.compare",
    "dspine_mlx.server.app",
    "tests.support.group_texts",
    "transformers.models.auto.tokenization_auto",
)
LOOK = 0.01  # seconds between two looks at a process
ENDED = 240.0  # seconds, for a command on a busy machine
BEFORE = dict(os.environ)  # any test


class Template:
    """The process that forks, as a test sees it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked"],
            env=BEFORE | offline(),
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def offline() -> dict[str, str]:
    return {"MLX_DISABLE_COMPILE": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(empty_hub())}


def empty_hub() -> Path:
    folder = Path(tempfile.gettempdir()) / f"dspine-mlx-test-hub-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    return folder


@cache
def template() -> Template:
    """One for all tests; it ends with them, at the end of its standard input."""
    return Template()


class Forked:
    """A process, as `subprocess.Popen` shows one.

    env: how its environment differs from this process's; None takes a name away. fds: files of its
    standard streams; a terminal among them is its own if it leads a session.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str | None],
        fds: Sequence[Path],
        session: bool = False,
    ):
        self.returncode: int | None = None
        files = [str(path) for path in fds]
        names: dict[str, str | None] = {**os.environ, **offline(), **env}
        whole = {name: value for name, value in names.items() if value is not None}
        self.pid: int = template().ask(argv=list(argv), env=whole, fds=files, session=session)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = template().ask(poll=self.pid)
        return self.returncode

    def wait(self, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while (status := self.poll()) is None:
            assert time.monotonic() < deadline, f"it has not ended after {seconds} seconds"
            time.sleep(LOOK)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(9)


def status_of(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def run(
    *argv: str,
    env: Mapping[str, str | None] | None = None,
    typed: str = "",
    out: Path | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run` of a Python command line. typed: its standard input; out: where its
    standard output goes instead of into the result."""
    with tempfile.TemporaryDirectory() as folder:
        given, told, said = (Path(folder, name) for name in ("in", "out", "err"))
        given.write_text(typed, encoding="utf-8")
        told.touch()
        said.touch()
        status = Forked(argv, env or {}, (given, out or told, said)).wait(ENDED)
        texts = [path.read_text(encoding="utf-8") for path in (told, said)]
    if check:
        assert status == 0, texts[1]
    return subprocess.CompletedProcess(argv, status, *texts)


def become(argv: list[str], env: dict[str, str], fds: list[str], session: bool) -> None:
    """Run a Python command line in this process."""
    os.environ.clear()
    os.environ.update(env)
    if session:
        os.setsid()
    for number, path in enumerate(fds):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    option, name, *arguments = argv
    sys.argv = [name, *arguments]
    if option == "-m":
        sys.modules.pop(name, None)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        exec(name, {"__name__": "__main__"})


def main() -> None:
    for name in IMPORTED:
        __import__(name)
    gc.freeze()  # a child's collector leaves the memory that they share alone
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "poll" in request:
            print(json.dumps(status_of(request["poll"])), flush=True)
        elif child := os.fork():
            print(json.dumps(child), flush=True)
        else:
            become(**request)
            return


if __name__ == "__main__":
    main()

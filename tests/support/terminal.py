"""Commands in a pseudo-terminal of some width."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.forked import Forked, offline
from tests.support.serving import Fresh

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def open_terminal(columns: int) -> tuple[int, int]:
    """Both ends: what a terminal does, and what a command sees."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    return master, slave


def start(
    arguments: Sequence[str], slave: int, env: Mapping[str, str], session: bool = False
) -> Forked:
    """`dspine-mlx ARGUMENTS` there; the terminal tells its size. With a cache of the Hub of its own
    it imports everything itself."""
    path = Path(os.ttyname(slave))
    own = {"TERM": "xterm-256color", "COLUMNS": None, "LINES": None, **env}
    argv, files = ["-m", "dspine_mlx.cli", *arguments], (path, path, path)
    if "HF_HUB_CACHE" not in env:
        return Forked(argv, own, files, session)
    whole = {**os.environ, **offline(), **own}
    return Fresh(argv, {name: value for name, value in whole.items() if value is not None}, files)


def on_terminal(
    *arguments: str, columns: int, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit status and all that a terminal gets of `dspine-mlx ARGUMENTS`, escapes included."""
    master, slave = open_terminal(columns)
    process, output, status = start(arguments, slave, environment or {}), b"", None
    while status is None:
        status = process.poll()  # before a look at what it wrote
        while select.select([master], [], [], 0.02)[0]:
            output += os.read(master, 65536)
    os.close(slave)
    os.close(master)
    return status, output.decode().replace("\r\n", "\n")


def plain(output: str) -> str:
    """Without colours and cursor movements."""
    return ESCAPES.sub("", output)


class Terminal:
    """A command that talks on a pseudo-terminal; everything it shows is kept, escapes removed."""

    def __init__(self, *arguments: str, home: Path, columns: int = 80):
        self.master, self.slave = open_terminal(columns)
        own = {"HOME": str(home), "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = start(arguments, self.slave, own, session=True)
        self.raw, self.seen = "", 0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(60)
        os.close(self.slave)
        os.close(self.master)

    def send(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read(self, seconds: float) -> bool:
        """More of the output, if there is some within so many seconds; False at its end."""
        going = self.process.poll() is None  # before a look at what it wrote
        if not select.select([self.master], [], [], seconds)[0]:
            return going
        self.raw += os.read(self.master, 65536).decode(errors="replace")
        return True

    def expect(self, wanted: str, seconds: float = 60) -> str:
        """What was shown since the last call, up to and including the wanted text."""
        end = time.monotonic() + seconds
        while True:
            text = plain(self.raw).replace("\r", "").replace("\b", "")
            at = text.find(wanted, self.seen)
            if at >= 0:
                start, self.seen = self.seen, at + len(wanted)
                return text[start : self.seen]
            if time.monotonic() > end or not self.read(0.2):
                raise AssertionError(f"{wanted!r} was not shown; {text[self.seen :]!r} was")

    def quiet(self, seconds: float = 1.0) -> None:
        """Wait until nothing more is shown: the command waits for keys."""
        before = -1
        while before < len(self.raw):
            before = len(self.raw)
            self.read(seconds)

    def ended(self, seconds: float = 60) -> int:
        """The exit status of a command that ends."""
        end = time.monotonic() + seconds
        while self.read(0.2) and self.process.poll() is None and time.monotonic() < end:
            pass
        return self.process.wait(max(1, end - time.monotonic()))

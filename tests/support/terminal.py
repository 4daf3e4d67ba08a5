"""Commands in a pseudo-terminal of some width."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(
    *arguments: str, columns: int, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit status and all that a terminal gets of `dspine-mlx ARGUMENTS`, escapes included."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "dspine_mlx.cli", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=inherited | {"TERM": "xterm-256color"} | dict(environment or {}),
    )
    os.close(slave)
    output = b""
    try:
        while data := os.read(master, 65536):
            output += data
    except OSError:  # Linux's way to say that the other end is closed
        pass
    finally:
        os.close(master)
    return process.wait(), output.decode().replace("\r\n", "\n")


def plain(output: str) -> str:
    """Without colours and cursor movements."""
    return ESCAPES.sub("", output)


class Terminal:
    """A command that talks on a pseudo-terminal; everything it shows is kept, escapes removed."""

    def __init__(self, *arguments: str, home: Path, columns: int = 80):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        own = {"TERM": "xterm-256color", "HOME": str(home), "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dspine_mlx.cli", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=inherited | own,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.raw, self.seen = "", 0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)

    def send(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read(self, seconds: float) -> bool:
        """More of the output, if there is some within so many seconds; False at its end."""
        if not select.select([self.master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)

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

"""Commands in a pseudo-terminal of some width."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping

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

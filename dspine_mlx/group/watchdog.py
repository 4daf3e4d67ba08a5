"""Ends a process that waits too long for another rank.

MLX waits without Python's lock, so a thread can end the process whatever the backend does: JACCL
never reports a lost peer, and a stopped process is lost to nobody.
"""

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dspine_mlx.group.connections import Connections

SECONDS = 300.0  # that a rank waits for the others within a text
LOADING = 3600.0  # that ranks with their part loaded wait for the others
LOOK = 0.2  # between two looks at the clock
GRACE = 3.0  # that MLX has to report a closed connection itself
# A process of its own: MLX holds Python's lock while it connects.
MEET = (
    "import os, select, sys\n"
    "if not select.select([0], [], [], float(sys.argv[1]))[0]:\n"
    "    sys.stderr.write(sys.argv[2] + '\\n')\n"
    "    os.kill(int(sys.argv[3]), 15)\n"
)


class Watchdog:
    """Armed while this rank waits for others; ends the process when `seconds` have passed, or when
    a connection to one of them is closed and nothing else has noticed it."""

    def __init__(
        self,
        rank: int,
        size: int,
        seconds: float = SECONDS,
        connections: Connections | None = None,
    ):
        self.rank, self.size, self.seconds = rank, size, seconds
        self.connections = connections or Connections({})
        self.limit, self.deadline = seconds, math.inf
        self.thread: threading.Thread | None = None

    def arm(self, seconds: float | None = None) -> None:
        """Start to wait, from now on."""
        self.limit = self.seconds if seconds is None else seconds
        self.deadline = time.monotonic() + self.limit
        if self.thread is None:
            self.thread = threading.Thread(target=self.watch, daemon=True)
            self.thread.start()

    def disarm(self) -> None:
        """What was waited for has come."""
        self.deadline = math.inf

    @contextmanager
    def watching(self, seconds: float | None = None) -> Iterator[None]:
        self.arm(seconds)
        try:
            yield
        finally:
            self.disarm()

    def watch(self) -> None:
        alone = 0.0
        while time.monotonic() < self.deadline:
            time.sleep(LOOK)
            waits = self.deadline < math.inf
            alone = alone + LOOK if waits and self.connections.closed else 0.0
            if alone > GRACE:
                self.end("lost another rank")
        self.end(f"has waited {self.limit:.0f} seconds for another rank")

    def end(self, what: str) -> None:
        said = f"dspine-mlx: rank {self.rank} of {self.size} {what}, so the group ends"
        print(said, file=sys.stderr, flush=True)
        os._exit(1)


@contextmanager
def meeting(seconds: float) -> Iterator[None]:
    """Within the block ranks connect; a rank that is alone for so long ends."""
    said = (
        f"dspine-mlx: this rank has waited {seconds:.0f} seconds for the others of its group to "
        "start, so it ends"
    )
    command = [sys.executable, "-S", "-E", "-c", MEET, str(seconds), said, str(os.getpid())]
    watcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )  # a terminal's Ctrl-C is not for it
    try:
        yield
    finally:
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.wait()

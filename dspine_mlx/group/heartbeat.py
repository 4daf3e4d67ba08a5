"""Signs of life from rank 0 while it waits for a person: without them the others give it up."""

import os
import sys
import threading
from collections.abc import Callable

from dspine_mlx.errors import LostRank


class Heartbeat(threading.Thread):
    """Within its context, `beat` is called every so many seconds, in a thread of its own.

    If it finds that another rank is lost, the process ends: nobody may read what is being typed.
    """

    def __init__(self, beat: Callable[[], None], seconds: float):
        super().__init__(daemon=True)
        self.beat, self.seconds = beat, seconds
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(self.seconds):
            try:
                self.beat()
            except LostRank as error:
                print(f"dspine-mlx: {error}", file=sys.stderr, flush=True)
                os._exit(1)

    def __enter__(self) -> "Heartbeat":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        self.join()

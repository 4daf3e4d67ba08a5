"""Ctrl-C in a group: rank 0 acts on it, and puts it off while the others are told something."""

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import current_thread, main_thread
from typing import Any

INTERRUPTED = 128 + signal.SIGINT  # a shell's exit status


@contextmanager
def handled(handler: Any) -> Iterator[None]:
    """Within the block Ctrl-C does this. In a thread, which no signal reaches, nothing changes."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off to the end of the block: the others act on whatever has begun to be sent. A
    second one ends the process at once: some other rank may never answer."""
    asked: list[Any] = []

    def put_off(*signals: Any) -> None:
        if asked:
            os._exit(INTERRUPTED)
        asked.append(signals)

    try:
        with handled(put_off):
            yield
    finally:  # whatever else has gone wrong: another rank may have ended by the same Ctrl-C
        before = signal.getsignal(signal.SIGINT)
        if asked and callable(before):
            before(*asked[0])


def immediate_interrupts() -> AbstractContextManager[None]:
    """Within the block Ctrl-C ends the process without a word, also where MLX waits for others."""
    return handled(signal.SIG_DFL)


@contextmanager
def noticed() -> Iterator[list[Any]]:
    """Within the block Ctrl-C, which is for rank 0, does nothing but lengthen the list."""
    asked: list[Any] = []
    with handled(lambda *signals: asked.append(signals)):
        yield asked

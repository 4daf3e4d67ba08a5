"""Ctrl-C on rank 0, put off while the others are told something."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off to the end of the block: the others act on whatever has begun to be sent."""
    if current_thread() is not main_thread():  # which no signal reaches
        yield
        return
    asked: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *signals: asked.append(signals))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked and callable(before):
        before(*asked[0])

"""Swapping the classes of a model's modules for one forward, so that its own code runs with another
`__call__`. Neither parameters nor other models are touched."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock

# Held for each step of a text that runs alone: another thread's forward would find classes swapped.
TURN = RLock()


@contextmanager
def swapping(swaps: Sequence[tuple[object, type]]) -> Iterator[None]:
    """Give each object its class of `swaps`, and its own class back on every exit."""
    own = [(of, type(of)) for of, _ in swaps]
    # nn.Module.__setattr__ looks for arrays first and takes ten times as long.
    put = object.__setattr__
    try:
        for of, cls in swaps:
            put(of, "__class__", cls)
        yield
    finally:
        for of, cls in own:
            put(of, "__class__", cls)

"""Drafting methods, one module each. A new one is its module and its line in `BUILT_IN`."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.nn as nn

from dspine_mlx.drafters import dflash, dflash2, domino, dspark, dspark_gemma4, dspine
from dspine_mlx.drafters.method import Method
from dspine_mlx.errors import InputError

BUILT_IN = (
    dflash.METHOD,  # first: the backbone alone, for checkpoints without a sign of another method
    dspark.METHOD,
    dspark_gemma4.METHOD,
    dspine.METHOD,
    dflash2.METHOD,
    domino.METHOD,
)
METHODS: dict[str, Method] = {}


def register(method: Method) -> None:
    """Make a method known to loading, converting and training."""
    if method.name in METHODS:
        raise InputError(f"there is a method {method.name} already; give the new one another name")
    METHODS[method.name] = method


@contextmanager
def registered(method: Method) -> Iterator[None]:
    """Register a method within the block only."""
    register(method)
    try:
        yield
    finally:
        del METHODS[method.name]


def method_of(network: nn.Module) -> Method:
    """The method that a network belongs to."""
    for method in METHODS.values():
        if type(network) is method.network:
            return method
    raise InputError(
        f"{type(network).__name__} is of no known method; {', '.join(METHODS)} are registered"
    )


for built_in in BUILT_IN:
    register(built_in)

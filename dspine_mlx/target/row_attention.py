"""Replacing MLX's attention for the rows of verify forwards, and only there.

The layers' own code runs, with mlx-lm's function name bound to another function. No function of a
module is replaced, so other models and other forwards are not affected.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.target.model import Target
from dspine_mlx.target.recurrent import rebound

NAME = "scaled_dot_product_attention"
Stock = Callable[..., mx.array]  # mlx-lm's function of that name
Attend = Callable[..., mx.array]  # the same, with mlx-lm's as its first argument


class RowAttention:
    """The swap of a target's attention layers. attend(stock, queries, keys, values, cache, scale,
    mask, sinks): what they call in place of mlx-lm's `scaled_dot_product_attention`, which is
    `stock`."""

    def __init__(self, target: Target, attend: Attend):
        self.swaps: list[tuple[nn.Module, type[nn.Module]]] = []
        classes: dict[type[nn.Module], type[nn.Module]] = {}
        for module in target.body.modules():
            cls = type(module)
            methods = attending(cls)
            if methods and cls not in classes:
                own = {
                    name: rebound(method, {NAME: partial(attend, method.__globals__[NAME])})
                    for name, method in methods.items()
                }
                classes[cls] = type(cls.__name__, (cls,), own)
            if methods:
                self.swaps.append((module, classes[cls]))

    @contextmanager
    def verifying(self, rows: int) -> Iterator[None]:
        """Context for one forward over so many rows. One row is plain decoding: nothing is
        swapped."""
        swaps = self.swaps if rows > 1 else []
        classes = [type(module) for module, _ in swaps]
        try:
            for module, cls in swaps:
                module.__class__ = cls
            yield
        finally:
            for (module, _), cls in zip(swaps, classes, strict=True):
                module.__class__ = cls


def attending(cls: type[nn.Module]) -> dict[str, FunctionType]:
    """The methods of a layer that call mlx-lm's function."""
    methods = {name: getattr_static(cls, name) for name in dir(cls)}
    return {
        name: method
        for name, method in methods.items()
        if isinstance(method, FunctionType)
        and NAME in method.__code__.co_names
        and NAME in method.__globals__
    }


def apart(
    stock: Stock,
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend row by row, by plain decoding's own call on the keys it sees: its bits in any version
    of MLX.

    queries [B, heads, L, D]; keys, values [B, H, S, D], or the three arrays of a quantised cache.
    If the mask is not plainly causal, MLX takes all rows at once.
    """
    rows = queries.shape[2]
    rest = {} if sinks is None else {"sinks": sinks}
    if rows == 1 or not isinstance(mask, str):
        return stock(queries, keys, values, cache=cache, scale=scale, mask=mask, **rest)
    before = length(keys) - rows
    outputs = []
    for i in range(rows):
        seen = first_keys(keys, before + i + 1), first_keys(values, before + i + 1)
        query = queries[:, :, i : i + 1]
        outputs.append(stock(query, *seen, cache=cache, scale=scale, mask=None, **rest))
    return mx.concatenate(outputs, axis=2)


def length(keys: Any) -> int:
    first: mx.array = keys if isinstance(keys, mx.array) else keys[0]
    return first.shape[2]


def first_keys(keys: Any, count: int) -> Any:
    if isinstance(keys, mx.array):
        return keys[:, :, :count]
    return tuple(part[:, :, :count] for part in keys)

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
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.metal.attention import Attended, attend
from dspine_mlx.metal.exact_attention import attend_apart
from dspine_mlx.target.attention_race import context_of
from dspine_mlx.target.model import Target
from dspine_mlx.target.products import APART, STOCK, Apart, Product, Stock
from dspine_mlx.target.recurrent import rebound
from dspine_mlx.target.swap import swapping
from dspine_mlx.target.verdicts import AttentionShape, Verdicts

NAME = "scaled_dot_product_attention"
Function = Callable[..., mx.array]  # mlx-lm's of that name
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
        with swapping(swaps):
            yield


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


class Chosen:
    """Attends by the verdict for the kind of attention, its context and its rows. What has no
    verdict is left to MLX, or in exact mode attends row by row."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.unsettled: Product = APART if mode == "exact" else STOCK
        self.products: dict[tuple[int, int], dict[AttentionShape, Product]] = {}

    def settle(self, verdicts: Verdicts) -> bool:
        """Take the verdicts on attention; whether any does other than without."""
        self.products = {}
        for (shape, rows), verdict in verdicts.items():
            if isinstance(shape, AttentionShape) and verdict.product != self.unsettled:
                of = self.products.setdefault((shape.context, rows), {})
                of[shape._replace(context=0)] = verdict.product
        return bool(self.products)

    def __call__(self, stock: Function, queries: mx.array, *call: Any, **named: Any) -> mx.array:
        attended = Attended(*call, **named)
        product = self.product(queries, attended)
        if isinstance(product, Stock):
            return attend(queries, attended, stock)
        if isinstance(product, Apart):
            return attend_apart(queries, attended, stock)
        return product(queries, attended)

    def product(self, queries: mx.array, attended: Attended) -> Product:
        rows = queries.shape[2]
        products = self.products.get((context_of(self.mode, rows, attended.length), rows))
        if products is None:
            return self.unsettled
        product = products.get(AttentionShape.of(queries, attended), self.unsettled)
        served = product.limits(queries, attended) is None  # of this mask
        return product if served else self.unsettled


def shapes_of(target: Target) -> list[AttentionShape]:
    """The kinds of attention in a target, of any context. A forward over two tokens is built, and
    never run."""
    found: dict[AttentionShape, None] = {}

    def note(stock: Function, queries: mx.array, *call: Any, **named: Any) -> mx.array:
        attended = Attended(*call, **named)
        found[AttentionShape.of(queries, attended)] = None
        return attend(queries, attended, stock)

    with RowAttention(target, note).verifying(2):
        target.model(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(target.model))
    return list(found)

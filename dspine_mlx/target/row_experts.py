"""Experts of mixtures in verify forwards: which kernel serves them, and the swap of layers."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from dspine_mlx.metal.experts import CUTS, ExactExperts, Experts, experts_limits, gather
from dspine_mlx.metal.rows_exact import FUSIONS, forms
from dspine_mlx.target.model import Target
from dspine_mlx.target.products import APART, STOCK, Product
from dspine_mlx.target.race import Race, Verdict, same_bits, widened
from dspine_mlx.target.swap import swapping
from dspine_mlx.target.verdicts import ExpertShape

PROBED = 2  # rows


def expert_layers(target: Target) -> dict[ExpertShape, list[nn.Module]]:
    """A target's expert layers by shape. A forward over two tokens is built, and never run: it
    tells how many experts a row asks for."""
    found: dict[ExpertShape, list[nn.Module]] = {}

    def note(layer: nn.Module, x: mx.array, indices: mx.array) -> None:
        E, N, K = Experts.of(layer, indices).shape
        packing = (layer.bits, layer.group_size, layer.mode)
        own, dtype = x.shape[:-2] == indices.shape, str(x.dtype).removeprefix("mlx.core.")
        shape = ExpertShape(E, N, K, *packing, indices.size // PROBED, own, dtype)
        found.setdefault(shape, []).append(layer)

    layers = [m for m in target.body.modules() if type(m) is QuantizedSwitchLinear]
    plain = [layer for layer in layers if layer.get("global_scale") is None]
    if plain:
        cls = noting(note)
        with swapping([(layer, cls) for layer in plain]):
            ids = mx.zeros((1, PROBED), mx.int32)
            target.model(ids, cache=make_prompt_cache(target.model))
    return found


def noting(note: Any) -> type[nn.Module]:
    class Noting(QuantizedSwitchLinear):
        def __call__(self, x: mx.array, indices: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            note(self, x, indices)
            y: mx.array = super().__call__(x, indices, *args, **kwargs)
            return y

    return Noting


def swapped_experts(chosen: int, products: dict[int, Product], dtype: mx.Dtype) -> type[nn.Module]:
    """A subclass of the layer that multiplies by the entry of `products` for its number of rows,
    each of which asks for `chosen` experts."""

    class Swapped(QuantizedSwitchLinear):
        def __call__(
            self, x: mx.array, indices: mx.array, sorted_indices: bool = False
        ) -> mx.array:
            rows = indices.size // chosen
            product = products.get(rows, STOCK) if x.dtype == dtype else STOCK
            experts = Experts.of(self, indices, sorted_indices)
            if product == STOCK or product.limits(x, experts):
                unchanged: mx.array = super().__call__(x, indices, sorted_indices)
                return unchanged
            y = product(x, experts)
            return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y

    Swapped.__name__ = QuantizedSwitchLinear.__name__
    return Swapped


def expert_verdict(race: Race, shape: ExpertShape, layers: list[nn.Module], rows: int) -> Verdict:
    """Race for layers of one shape, the target's own, with rows that ask for experts at random:
    neighbours in a text share more."""
    random = mx.random.key(rows)
    asked = mx.argsort(mx.random.normal((rows, shape.experts), key=random), axis=1)
    indices = asked[:, : shape.chosen].astype(mx.uint32)
    width = shape.chosen if shape.own else 1
    x = mx.random.normal((rows, width, 1, shape.columns), key=random).astype(shape.mlx_dtype)
    operands = [Experts.of(layer, indices) for layer in layers]
    if experts_limits(x, operands[0]) is not None:
        return Verdict(STOCK, "no kernel serves it")
    entrants: list[Product] = [STOCK, APART] if race.mode == "exact" else [STOCK]
    found = form_of(race, operands[0], x)
    entrants += [ExactExperts(found, *cut) for cut in CUTS] if found else []
    right, rejected = race.check(entrants, x, operands[:1])
    seconds = race.times(list(right), x, operands)
    return race.choose(right, seconds, tuple(rejected))


def form_of(race: Race, experts: Experts, x: mx.array) -> Any:
    """The form with the bits of MLX's product, found in float32 as for other layers; or None."""
    tried = forms(experts.first)
    tried = tried if race.mode == "exact" else tried[: len(FUSIONS)]
    for form in tried:
        product = ExactExperts(form)
        pairs = ((x.astype(mx.float32), widened(experts)), (x, experts))
        try:
            if all(same_bits(product(rows, of), gather(rows, of)) for rows, of in pairs):
                return form
        except (RuntimeError, ValueError):  # refused by the driver
            return None
    return None

"""Rows that attend to a cache, and what they get in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from dspine_mlx.metal.attention import ROWS_ATTENTION, ROWS_MERGE, Attended, Parts, rows_attention
from tests.msl import Emulator
from tests.support.metal_device import METAL, emulator, normal, wide
from tests.support.rows import rounding

SMALL = (16, 16)  # the compiler unrolls the heads: wider ones take it seconds
SPARE = 19  # keys that the cache has room for, past the last


def attended(
    B: int,
    H: int,
    S: int,
    sizes: tuple[int, int],
    dtype: mx.Dtype,
    packing: tuple[int, int] = (0, 0),
    **options: Any,
) -> Attended:
    """A cache of S keys, a view of a larger one as mlx-lm hands it out. packing: bits, group."""
    bits, group = packing
    arrays = [normal((B, H, S + SPARE, size), dtype) for size in sizes]
    scale = sizes[0] ** -0.5
    if not bits:
        keys, values = (array[:, :, :S] for array in arrays)
        return Attended(keys, values, None, scale, **options)
    cache = QuantizedKVCache(group, bits)
    k, v = (tuple(a[:, :, :S] for a in mx.quantize(x, group, bits)) for x in arrays)
    return Attended(k, v, cache, scale, **options)


def queries(B: int, heads: int, L: int, D: int, dtype: mx.Dtype) -> mx.array:
    """As a layer makes them: projected row by row."""
    return normal((B, L, heads, D), dtype).transpose(0, 2, 1, 3)


def floats(part: Any, cache: Any) -> np.ndarray:
    if isinstance(part, mx.array):
        return wide(part)
    single = (a.astype(mx.float32) for a in part[1:])
    return wide(mx.dequantize(part[0], *single, cache.group_size, cache.bits))


def softmax_attention(q: mx.array, attended: Attended) -> np.ndarray:
    """In float64, a row at a time. mask: causal, or an array, boolean or added to the scores. A row
    that sees nothing: 0."""
    q64, sinks = wide(q), None if attended.sinks is None else wide(attended.sinks)
    k, v = floats(attended.keys, attended.cache), floats(attended.values, attended.cache)
    B, heads, L, _ = q64.shape
    S, share = k.shape[2], heads // k.shape[1]
    seen = np.tril(np.ones((L, S), bool), S - L)
    added: np.ndarray = np.zeros((L, S))
    if isinstance(attended.mask, mx.array) and attended.mask.dtype == mx.bool_:
        seen = np.array(attended.mask)
    elif isinstance(attended.mask, mx.array):
        added = wide(attended.mask)
        seen = added > -np.inf
    seen, added = (np.broadcast_to(a, (B, heads, L, S)) for a in (seen, added))
    out = np.zeros((B, heads, L, v.shape[3]))
    for b, h, i in np.ndindex(B, heads, L):
        keys = seen[b, h, i]
        scores = k[b, h // share, keys] @ q64[b, h, i] * attended.scale
        scores = scores + added[b, h, i, keys]
        least = -np.inf if sinks is None else sinks[h]
        top = max(scores.max(initial=-np.inf), least)
        weights = np.exp(scores - top)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - top))
        if keys.any():
            out[b, h, i] = weights / total @ v[b, h // share, keys]
    return out


def window_mask(L: int, S: int, window: int) -> mx.array:
    """Each row sees the last `window` keys up to its own."""
    row, key = mx.arange(S - L, S)[:, None], mx.arange(S)[None]
    return (key <= row) & (key > row - window)


def case(dtype: mx.Dtype = mx.float32, B: int = 1, heads: int = 4, H: int = 2, L: int = 4,
         S: int = 64, sizes: tuple[int, int] = (64, 64), packing: tuple[int, int] = (0, 0),
         parts: int = 2, window: int = 0, sinks: bool = False,
         ) -> tuple[mx.array, Attended, Parts]:  # fmt: skip
    mx.random.seed(S)
    options: dict[str, Any] = {"sinks": normal((heads,), dtype) if sinks else None}
    if window:
        options["mask"] = window_mask(L, S, window)
    context = attended(B, H, S, sizes, dtype, packing, **options)
    return queries(B, heads, L, sizes[0], dtype), context, Parts(parts)


@contextmanager
def devices(first: Emulator | None = None, second: Emulator | None = None) -> Iterator[None]:
    """Both passes run in the emulator, as they are unless others are given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ROWS_ATTENTION, "function", first or emulator(ROWS_ATTENTION))
        patch.setattr(ROWS_MERGE, "function", second or emulator(ROWS_MERGE))
        yield


def launch(q: mx.array, context: Attended, cut: Parts, order: int = 0, check: bool = True,
           first: Emulator | None = None, second: Emulator | None = None) -> mx.array:  # fmt: skip
    """Both passes, checked."""
    assert ROWS_ATTENTION.limits(q, context, cut) is None
    if METAL:
        return rows_attention(q, context, cut)
    for device in (first or emulator(ROWS_ATTENTION), second or emulator(ROWS_MERGE)):
        device.check, device.order = check, order
    with devices(first, second):
        return rows_attention(q, context, cut)


def assert_exact(out: mx.array, q: mx.array, context: Attended) -> None:
    """float64's values, rounded once; packed values are rounded to the dtype when unpacked."""
    exact = softmax_attention(q, context)
    largest = np.abs(exact).max()
    allowed = 1.01 * rounding(exact, out.dtype) + 2e-6 * largest
    if context.packed:
        allowed = allowed + 4 * mx.finfo(out.dtype).eps
    assert out.shape == exact.shape
    assert (np.abs(wide(out) - exact) <= allowed).all()

"""Rows that attend to a long cache together: against float64, in every schedule."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import RotatingKVCache

from dspine_mlx.metal import attention
from dspine_mlx.metal.attention import (
    MAX_ROWS,
    ROWS_ATTENTION,
    Attended,
    Parts,
    attention_limits,
    merge,
    parts_of,
    rows_attention,
)
from tests.support.attention import (
    SMALL,
    assert_exact,
    case,
    launch,
    queries,
    softmax_attention,
    window_mask,
)
from tests.support.metal_device import METAL, emulator, needs_device, needs_emulator, normal, wide

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    "grouped": {"dtype": mx.bfloat16, "heads": 8, "H": 2, "L": 5, "S": 77, "parts": 3},
    "4 bits": {"dtype": mx.float16, "B": 2, "H": 1, "L": 8, "S": 130, "sizes": (128, 128),
               "packing": (4, 64), "parts": 4},
    "8 bits": {"dtype": mx.bfloat16, "heads": 6, "H": 2, "L": 16, "S": 99, "sizes": (32, 32),
               "packing": (8, 32), "parts": 2, "window": 20, "sinks": False},
    "window and sinks": {"dtype": mx.bfloat16, "heads": 6, "H": 2, "L": 9, "S": 99,
                         "sizes": (32, 32), "parts": 2, "window": 20, "sinks": True},
    "2 bits": {"dtype": mx.bfloat16, "H": 2, "L": 3, "S": 45, "packing": (2, 32)},
    "3 bits": {"dtype": mx.float16, "H": 2, "L": 2, "S": 41, "sizes": (64, 32), "packing": (3, 32)},
    "5 bits": {"dtype": mx.bfloat16, "H": 2, "L": 3, "S": 37, "sizes": (32, 96),
               "packing": (5, 32)},
    "6 bits": {"H": 1, "L": 4, "S": 33, "sizes": (128, 128), "packing": (6, 64), "parts": 1},
    "sinks": {"heads": 4, "H": 4, "L": 3, "S": 40, "parts": 5, "sinks": True},
    "wide heads": {"dtype": mx.bfloat16, "heads": 16, "H": 1, "L": 9, "S": 50,
                   "sizes": (256, 256), "parts": 2},
    "wide floats": {"H": 2, "L": 2, "S": 20, "sizes": (256, 256), "parts": 2},
    "heads of two slices": {"dtype": mx.bfloat16, "heads": 16, "H": 1, "L": 3, "S": 21,
                            "sizes": (512, 512)},
    "two sizes": {"dtype": mx.float16, "H": 4, "L": 4, "S": 60, "sizes": (192, 128), "parts": 2},
    "parts without keys": {"H": 2, "L": 2, "S": 9, "parts": 7},
    "32 rows": {"dtype": mx.bfloat16, "heads": 8, "H": 2, "L": 32, "S": 90, "sizes": (40, 24),
                "parts": 2},
}  # fmt: skip


@needs_device
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_cache(name: str) -> None:
    """The schedules agree; what lies strided is not copied."""
    q, context, cut = case(**CASES[name])
    forward, *others = [launch(q, context, cut, order) for order in range(3)]
    assert_exact(forward, q, context)
    assert all(mx.array_equal(forward, other).item() for other in others)
    assert METAL or emulator(ROWS_ATTENTION).copies == 0


@needs_device
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_size(data: st.DataObject) -> None:
    H, share = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    L = data.draw(st.integers(2, MAX_ROWS))
    S = data.draw(st.integers(L, 150))
    window = data.draw(st.integers(0, S))
    sinks, parts = data.draw(st.booleans()), data.draw(st.integers(1, 5))
    q, context, cut = case(
        mx.bfloat16, 1, H * share, H, L, S, (64, 64), (0, 0), parts, window, sinks
    )
    assert_exact(launch(q, context, cut), q, context)


@needs_device
def test_the_masks_of_mlx_lms_windows() -> None:
    """A rotating cache past its window, with the mask it asks for."""
    mx.random.seed(3)
    cache, L = RotatingKVCache(max_size=24), 5
    cache.update_and_fetch(*normal((2, 1, 2, 40, 32)))
    mask = cache.make_mask(L, window_size=24)
    keys, values = cache.update_and_fetch(*normal((2, 1, 2, L, 32)))
    assert isinstance(mask, mx.array)
    q, context = queries(1, 4, L, 32, mx.float32), Attended(keys, values, cache, 0.2, mask)
    assert_exact(launch(q, context, Parts(2)), q, context)


@needs_device
@pytest.mark.parametrize("packing", [(0, 0), (8, 32)])
def test_masks_that_are_added(packing: tuple[int, int]) -> None:
    """Each head's own, and some keys that a row does not see."""
    q, context, cut = case(mx.bfloat16, L=3, S=50, packing=packing)
    mask = mx.where(window_mask(3, 50, 30), normal((4, 3, 50), mx.bfloat16), -mx.inf)
    context = context._replace(mask=mask.astype(mx.bfloat16))
    assert_exact(launch(q, context, cut), q, context)
    stock = wide(rows_attention(q.astype(mx.float32), context.widened()))
    np.testing.assert_allclose(stock, softmax_attention(q, context), rtol=1e-4, atol=1e-4)


@needs_device
def test_masks_of_several_texts() -> None:
    """One for each text, and rows that see nothing: zeros, whatever lies in the cache."""
    mx.random.seed(4)
    q, context, cut = case(B=2, L=3, S=50, sizes=SMALL)
    first = mx.array([7, 50])[:, None, None, None]  # the second text's keys are all padding
    mask = (mx.arange(50) >= first) & window_mask(3, 50, 50)
    context = context._replace(mask=mask)
    out = launch(q, context, cut)
    assert_exact(out, q, context)
    assert (out[1] == 0).all().item()


SLICED: dict[str, dict[str, Any]] = {
    "tiles that share keys": {"dtype": mx.bfloat16, "heads": 16, "H": 2, "L": 9, "S": 50},
    "packed": {"dtype": mx.float16, "heads": 2, "H": 1, "L": 3, "S": 41, "packing": (4, 32)},
    "two sizes and sinks": {"H": 2, "S": 40, "sizes": (32, 16), "sinks": True, "window": 20},
}


@needs_device
@pytest.mark.parametrize("name", SLICED)
def test_simdgroups_share_a_wide_tile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here of 32 columns, so that the emulator is done soon."""
    monkeypatch.setattr(attention, "SLICE", 16)
    q, context, cut = case(**{"sizes": (32, 32)} | SLICED[name])
    forward, *others = [launch(q, context, cut, order) for order in range(3)]
    assert_exact(forward, q, context)
    assert all(mx.array_equal(forward, other).item() for other in others)


@needs_emulator
@pytest.mark.parametrize(("L", "blocks"), [(2, 1), (16, 1), (17, 2), (32, 2)])
def test_keys_are_read_once_per_64_rows(L: int, blocks: int) -> None:
    """Of the heads that share them, together."""
    q, context, cut = case(mx.float16, heads=8, H=2, L=L, S=96, sizes=SMALL)
    launch(q, context, cut)
    for name, array in (("keys", context.keys), ("values", context.values)):
        traffic = emulator(ROWS_ATTENTION).traffic[name]
        assert traffic.touched == array.nbytes
        assert traffic.loaded == blocks * array.nbytes


def test_merging_is_softmax() -> None:
    """The plain reference of the second pass."""
    mx.random.seed(5)
    q, context, _ = case(heads=2, H=2, L=3, S=30, sinks=True)
    k, v = context.keys, context.values
    seen = window_mask(3, 30, 30)
    scores = mx.where(seen, q @ k.swapaxes(2, 3) * context.scale, -mx.inf).reshape(6, 3, 10)
    top = mx.maximum(scores.max(axis=2), -1e30)
    weights = mx.exp(scores - top[..., None])
    values = mx.repeat(v[0], 3, axis=0).reshape(6, 3, 10, 64)
    parts = (weights[..., None] * values).sum(axis=2), top, weights.sum(axis=2)
    (out,) = merge(*parts, context.sinks, q)
    assert_exact(out, q, context)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("3 bits", "5 bits")])
def test_without_a_cut_it_is_mlx(name: str) -> None:
    """MLX itself fails at 3 and 5 bits with a grouped head's shape."""
    q, context, _ = case(**{**CASES[name], "dtype": mx.float32})
    if context.packed:
        context = context._replace(sinks=None)
    before = mx.array(q)
    np.testing.assert_allclose(
        wide(rows_attention(q, context)), softmax_attention(q, context), rtol=1e-4, atol=1e-4
    )
    assert mx.array_equal(q, before).item()  # mlx-lm scales a quantised cache's queries in place


def test_stock_is_called_as_the_layer_calls_it() -> None:
    q, context, _ = case()
    calls: list[dict[str, Any]] = []

    def stock(*args: Any, **kwargs: Any) -> mx.array:
        calls.append(kwargs)
        return scaled_dot_product_attention(*args, **kwargs)

    rows_attention(q, context, stock=stock)
    assert calls == [{"cache": None, "scale": context.scale, "mask": "causal"}]


QUERIES, CONTEXT, CUT = case()
UNSERVED: dict[str, tuple[mx.array, Attended]] = {
    "1 rows; from 2 to 32 are served": (QUERIES[:, :, :1], CONTEXT),
    "queries [1, 3, 4, 64] for 2 heads of 64": (QUERIES[:, :3], CONTEXT),
    "heads of 264 and 264; multiples of 8 up to 256, and of 16 up to 512, are served": case(
        sizes=(264, 264))[:2],
    "heads of 512 and 512 in mlx.core.float32": case(sizes=(512, 512))[:2],
    "queries of mlx.core.float16, and others": (QUERIES.astype(mx.float16), CONTEXT),
    "mask None": (QUERIES, CONTEXT._replace(mask=None)),
    "a mask [4, 64] of mlx.core.int32": (
        QUERIES, CONTEXT._replace(mask=mx.zeros((4, 64), mx.int32))),
    "a mask [4, 60] of mlx.core.bool": (
        QUERIES, CONTEXT._replace(mask=window_mask(4, 60, 9))),
}  # fmt: skip


@pytest.mark.parametrize("reason", UNSERVED)
def test_not_served(reason: str) -> None:
    assert attention_limits(*UNSERVED[reason]) == reason
    assert attention_limits(QUERIES, CONTEXT) is None


def test_cuts() -> None:
    assert [cut.parts for cut in parts_of(1024)] == [4, 16]
    assert [cut.parts for cut in parts_of(16384)] == [4, 16, 64]

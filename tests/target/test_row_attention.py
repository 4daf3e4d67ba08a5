"""The swap of attention layers, and rows that attend one by one."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from dspine_mlx.metal.attention import Attended
from dspine_mlx.metal.exact_attention import attend_apart
from dspine_mlx.target.equal_rows import unequal_widths
from dspine_mlx.target.model import Target
from dspine_mlx.target.row_attention import RowAttention
from tests.support.each_family import EVERY_FAMILY
from tests.support.families import build


def apart(stock: Any, queries: mx.array, *call: Any, **named: Any) -> mx.array:
    return attend_apart(queries, Attended(*call, **named), stock)


@pytest.fixture
def other_bits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """mlx-lm's function gives several rows other bits than one, as on a GPU; rows of its calls."""
    calls: list[int] = []

    def stock(queries: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        calls.append(queries.shape[2])
        output = scaled_dot_product_attention(queries, *args, **kwargs)
        return output if queries.shape[2] == 1 else output * (1 + 2**-12)

    monkeypatch.setattr(qwen3, "scaled_dot_product_attention", stock)
    return calls


def test_rows_one_by_one_have_the_bits_of_one_row(other_bits: list[int]) -> None:
    target = Target(build("qwen3", 4))
    assert set(unequal_widths(target, (2, 5), depths=(20,))) == {2, 5}
    swap = RowAttention(target, apart)
    other_bits.clear()
    assert unequal_widths(target, (2, 5), swap.verifying, depths=(20,)) == {}
    assert set(other_bits) == {1, 20}  # but for the prompt


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_family(family: str) -> None:
    """Nothing is changed but the calls; classes go back; masks of windows are MLX's affair."""
    target = Target(build(family, 4))
    types = [type(m) for m in target.model.modules()]
    seen: list[int] = []

    def attend(stock: Any, queries: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        seen.append(queries.shape[2])
        return apart(stock, queries, *args, **kwargs)

    swap, ids = RowAttention(target, attend), mx.random.randint(0, 2048, (1, 6))
    plain = target.model(ids, cache=make_prompt_cache(target.model))
    with swap.verifying(6):
        ours = target.model(ids, cache=make_prompt_cache(target.model))
    assert mx.allclose(ours, plain, atol=1e-4).item()
    assert [type(m) for m in target.model.modules()] == types
    assert seen == [6] * len(swap.swaps)
    with swap.verifying(1):
        assert [type(m) for m in target.model.modules()] == types


def test_classes_go_back_after_an_error() -> None:
    target = Target(build("qwen3", None))
    types = [type(m) for m in target.model.modules()]

    def attend(*_: Any, **__: Any) -> mx.array:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), RowAttention(target, attend).verifying(3):
        target.model(mx.zeros((1, 3), mx.uint32))
    assert [type(m) for m in target.model.modules()] == types


@pytest.mark.parametrize("bits", [0, 8], ids=["float", "quantised"])
def test_a_row_sees_its_keys_only(bits: int) -> None:
    B, heads, H, L, S, D = 2, 4, 2, 3, 11, 32
    cache: Any = QuantizedKVCache(group_size=32, bits=bits) if bits else KVCache()
    queries = mx.random.normal((B, heads, L, D))
    keys, values = cache.update_and_fetch(*mx.random.normal((2, B, H, S, D)))
    ours = apart(scaled_dot_product_attention, queries, keys, values, cache, 0.2, "causal")
    wanted = scaled_dot_product_attention(queries, keys, values, cache, 0.2, "causal")
    assert mx.allclose(ours, wanted, atol=1e-5).item()
    assert ours.shape == (B, heads, L, D)


def test_sinks_are_passed_on() -> None:
    q, k, v = (mx.random.normal((1, h, n, 32)) for h, n in ((4, 3), (2, 9), (2, 9)))
    sinks = mx.random.normal((4,))
    ours = apart(scaled_dot_product_attention, q, k, v, None, 0.2, "causal", sinks)
    wanted = scaled_dot_product_attention(q, k, v, None, 0.2, "causal", sinks=sinks)
    assert mx.allclose(ours, wanted, atol=1e-5).item()
    assert not mx.allclose(ours, apart(scaled_dot_product_attention, q, k, v, None, 0.2, "causal"))

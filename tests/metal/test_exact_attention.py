"""Rows that attend together with one row's bits: against MLX's own kernels, cut from its header."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from dspine_mlx.metal.attention import Attended
from dspine_mlx.metal.exact_attention import (
    EXACT_ATTENTION,
    EXACT_MERGE,
    FORMS,
    ROWS,
    AsHeads,
    ExactAttention,
    attend_apart,
    exact_attention,
    exact_limits,
    merge,
)
from tests.msl import Emulator, KernelError, toolchain
from tests.support import mlx_attention, mlx_packed_attention
from tests.support.attention import attended, queries, softmax_attention, window_mask
from tests.support.metal_device import emulator, needs_emulator, needs_metal, normal, wide

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    "grouped": {"dtype": mx.bfloat16},
    "one key head": {"dtype": mx.float16, "heads": 6, "H": 1, "L": 5, "S": 131,
                     "sizes": (128, 128), "blocks": 64, "rows": 2},
    "each its own": {"heads": 2, "L": 8, "S": 70, "rows": 3},
    "two sizes and sinks": {"dtype": mx.bfloat16, "sizes": (192, 128), "sinks": True},
    "two texts": {"B": 2, "heads": 8, "sizes": (32, 32), "sinks": True, "rows": 8},
    "one pass": {"dtype": mx.bfloat16, "S": 99, "passes": 1},
    "one pass, sinks": {"dtype": mx.float16, "L": 9, "sizes": (128, 128), "sinks": True,
                        "passes": 1},
}  # fmt: skip


def case(dtype: mx.Dtype = mx.float32, B: int = 1, heads: int = 4, H: int = 2, L: int = 3,
         S: int = 150, sizes: tuple[int, int] = (64, 64), blocks: int = 32, rows: int = 4,
         sinks: bool = False, passes: int = 2,
         ) -> tuple[mx.array, Attended, ExactAttention]:  # fmt: skip
    mx.random.seed(S)
    given = normal((heads,), dtype) if sinks else None
    context = attended(B, H, S, sizes, dtype, sinks=given)
    return queries(B, heads, L, sizes[0], dtype), context, ExactAttention(passes, blocks, rows)


def launch(q: mx.array, context: Attended, cut: ExactAttention, order: int = 0,
           check: bool = True, first: Emulator | None = None) -> mx.array:  # fmt: skip
    assert EXACT_ATTENTION.limits(q, context, cut) is None
    devices = first or emulator(EXACT_ATTENTION), emulator(EXACT_MERGE)
    for device in devices:
        device.check, device.order = check, order
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EXACT_ATTENTION, "function", devices[0])
        patch.setattr(EXACT_MERGE, "function", devices[1])
        return exact_attention(q, context, cut)


def one_by_one(q: mx.array, context: Attended, blocks: int) -> mx.array:
    """MLX's two passes for each row; 0 blocks: its one pass."""
    rows = []
    for i in range(q.shape[2]):
        k, v, _, scale, _, sinks = context.first(context.length - q.shape[2] + 1 + i)
        row = q[:, :, i : i + 1]
        if blocks:
            rows.append(mlx_attention.two_pass(row, k, v, scale, blocks, sinks=sinks))
        else:
            rows.append(mlx_attention.one_pass(row, k, v, scale, sinks=sinks))
    return mx.concatenate(rows, axis=2)


@needs_emulator
@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_bits_of_one_row(name: str) -> None:
    q, context, cut = case(**CASES[name])
    one = one_by_one(q, context, cut.blocks if cut.passes == 2 else 0)
    np.testing.assert_allclose(wide(one), softmax_attention(q, context), atol=0.02)
    for order in range(3):
        assert mx.array_equal(launch(q, context, cut, order), one).item()
    assert emulator(EXACT_ATTENTION).copies == 0


@needs_emulator
def test_no_cut_changes_a_bit_and_the_form_does() -> None:
    q, context, _ = case(mx.bfloat16, L=7)
    one = one_by_one(q, context, 32)
    for rows in ROWS:
        cut = ExactAttention(2, 32, rows)
        assert mx.array_equal(launch(q, context, cut, check=False), one).item()
    for passes, blocks in FORMS:
        same = mx.array_equal(launch(q, context, ExactAttention(passes, blocks), check=False), one)
        assert same.item() == ((passes, blocks) == (2, 32))


@needs_emulator
def test_when_mlxs_own_rows_have_the_bits_of_one_row() -> None:
    """Together in the vector kernels, if they take the same passes and blocks. So a call per row
    with that row's keys is plain decoding's, whatever MLX chooses."""
    q, context, _ = case(mx.bfloat16)
    k, v, _, scale, _, _ = context
    single = mlx_attention.one_pass(q, k, v, scale, causal=True)
    assert mx.array_equal(single, one_by_one(q, context, 0)).item()
    double = mlx_attention.two_pass(q, k, v, scale, 32, causal=True)
    assert mx.array_equal(double, one_by_one(q, context, 32)).item()
    assert not mx.array_equal(double, one_by_one(q, context, 64)).item()


@needs_emulator
@pytest.mark.parametrize("contract", ["on", "fast"])
def test_what_the_compiler_fuses_changes_both_alike(
    contract: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = f"-ffp-contract={contract}"
    dialect = [flag if d == "-ffp-contract=off" else d for d in toolchain.DIALECT]
    assert flag in dialect
    monkeypatch.setattr(toolchain, "DIALECT", dialect)
    names = ("sdpa_vector_2pass_1", "sdpa_vector_2pass_2")
    devices = {name: Emulator(mlx_attention.definition(name)) for name in names}
    q, context, cut = case()
    before = one_by_one(q, context, 32)
    monkeypatch.setattr(mlx_attention, "emulator", devices.__getitem__)
    one = one_by_one(q, context, 32)
    monkeypatch.setattr(EXACT_ATTENTION, "function", Emulator(EXACT_ATTENTION.definition))
    monkeypatch.setattr(EXACT_MERGE, "function", Emulator(EXACT_MERGE.definition))
    assert mx.array_equal(exact_attention(q, context, cut), one).item()
    assert not mx.array_equal(one, before).item()


@needs_emulator
def test_rows_share_each_key() -> None:
    """A simdgroup per query head and tile of rows."""
    q, context, cut = case(L=8)
    launch(q, context, cut)
    traffic = emulator(EXACT_ATTENTION).traffic["keys"]
    assert traffic.touched == context.keys.nbytes
    assert traffic.loaded == 2 * 2 * context.keys.nbytes


@needs_emulator
@pytest.mark.parametrize(
    ("dtype", "parts", "S"),
    [(mx.float32, 1, 258), (mx.bfloat16, 1, 258), (mx.float32, 8, 258), (mx.bfloat16, 8, 258),
     (mx.float32, 8, 4098), (mx.bfloat16, 32, 4098)],
)  # fmt: skip
def test_rows_as_heads_over_a_quantised_cache(
    dtype: mx.Dtype, parts: int, S: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to MLX's kernels for one row, if rows run apart whose keys make other parts. Here that
    is once, past 256 or 4096 keys: two calls for five rows."""
    mx.random.seed(parts)
    q = queries(1, 2, 5, 64, dtype)
    context = attended(1, 1, S, (64, 64), dtype, (4, 32))
    calls = mlx_packed_attention.patch(monkeypatch, parts, looped=S > 4096)
    one = attend_apart(q, context)
    np.testing.assert_allclose(wide(one), softmax_attention(q, context), atol=0.05)
    del calls[:]
    assert mx.array_equal(AsHeads(parts)(q, context), one).item()
    assert [x.shape[2] for x in calls] == ([2 * 5] if parts == 1 else [2 * 3, 2 * 2])
    assert mx.array_equal(AsHeads(1)(q, context), one).item() == (parts == 1)


FAULTS = {
    "last bit": ("static_cast<KEPT>(sums[r][i])",
                 "static_cast<KEPT>(as_type<float>(as_type<uint>(sums[r][i]) ^ (i == 1)))"),
    "a key too many": ("S - L + first + r)", "S - L + first + r + 1)"),
    "order of the keys": (
        "key = block; key < S; key += BLOCKS",
        "key = (S - 1 - block) / BLOCKS * BLOCKS + block; key >= 0; key -= BLOCKS"),
    "no sink": ("? 1.0f : 0.0f", "? 0.0f : 0.0f"),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault: str) -> None:
    q, context, cut = case(sinks=True)
    device = spoiled(*FAULTS[fault])
    assert not mx.array_equal(
        launch(q, context, cut, check=False, first=device), one_by_one(q, context, 32)
    ).item()


@needs_emulator
@pytest.mark.parametrize(
    ("found", "replacement", "report"),
    [
        ("min(first + r, L - 1)", "(first + r)", "out-of-range load: queries"),
        ("key < S;", "key <= S;", "out-of-range load"),
        ("if (lane == 0) {", "{", "write-write race"),
        ("if (first + r >= L) continue;", "if (first + r + 1 >= L) continue;", "never written"),
    ],
)
def test_the_checker_reports(found: str, replacement: str, report: str) -> None:
    q, context, cut = case(L=5)
    k, v = (mx.contiguous(a) for a in (context.keys, context.values))  # nothing past the last
    with pytest.raises(KernelError, match=report):
        launch(
            mx.contiguous(q), context._replace(keys=k, values=v), cut,
            first=spoiled(found, replacement),
        )  # fmt: skip


def spoiled(found: str, replacement: str) -> Emulator:
    source = EXACT_ATTENTION.definition["source"]
    assert found in source
    return Emulator(EXACT_ATTENTION.definition | {"source": source.replace(found, replacement)})


def test_merging_is_softmax() -> None:
    """The plain reference of the second pass, over every third key."""
    mx.random.seed(5)
    q, context, _ = case(heads=2, L=3, S=30)
    k, v = context.keys[0], context.values[0]
    scores = mx.where(window_mask(3, 30, 30), q[0] @ k.swapaxes(1, 2) * context.scale, -mx.inf)
    scores = scores.reshape(6, 10, 3).swapaxes(1, 2)
    top = scores.max(axis=2)
    weights = mx.exp(scores - top[..., None])
    values = mx.repeat(v, 3, axis=0).reshape(6, 10, 3, 64).swapaxes(1, 2)
    parts = (weights[..., None] * values).sum(axis=2), top, weights.sum(axis=2)
    (out,) = merge(*parts, q)
    np.testing.assert_allclose(wide(out), softmax_attention(q, context), atol=1e-5)


def test_without_a_cut_rows_attend_one_by_one() -> None:
    q, context, _ = case()
    np.testing.assert_allclose(
        wide(exact_attention(q, context)), softmax_attention(q, context), atol=1e-5
    )


def test_limits() -> None:
    q, context, cut = case()
    assert exact_limits(q, context, cut) is None
    packed = attended(1, 2, 64, (64, 64), mx.float32, (4, 64))
    assert isinstance(packed.cache, QuantizedKVCache)
    unserved = {
        "a quantised cache, for which MLX has no kernel of its own": (q, packed),
        "a mask that is not plainly causal": (q, context._replace(mask=window_mask(3, 150, 9))),
        "4 heads of 72 and 64, 2 of keys": case(sizes=(72, 64))[:2],
        "34 heads of 64 and 64, 2 of keys": case(heads=34)[:2],
        "4 heads of 512 and 512, 2 of keys": case(mx.bfloat16, sizes=(512, 512))[:2],
        "1 rows; from 2 to 32 are served": (q[:, :, :1], context),
    }
    for reason, (rows, to) in unserved.items():
        assert exact_limits(rows, to) == reason


@needs_metal
@pytest.mark.parametrize("S", [1500, 5000, 20000])
def test_on_metal_some_blocks_have_the_bits_of_mlx(S: int) -> None:
    """At the lengths at which MLX takes two passes here, if it does."""
    q, context, _ = case(mx.bfloat16, heads=16, H=4, L=4, S=S, sizes=(128, 128))
    one = exact_attention(q, context)
    found = [
        form for form in FORMS
        if mx.array_equal(exact_attention(q, context, ExactAttention(*form)), one).item()
    ]  # fmt: skip
    print(S, found)
    np.testing.assert_allclose(wide(one), softmax_attention(q, context), atol=0.02)

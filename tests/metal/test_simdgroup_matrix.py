"""8x8 matrices over a simdgroup in tests/msl: their values, their layout, and what is reported."""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.msl import CompileError, Emulator, KernelError
from tests.support.metal_device import needs_emulator, normal, wide

pytestmark = needs_emulator

MMA = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels/steel/gemm/mma.h"
PLACE = """
    uint lane = thread_index_in_simdgroup;
    uint row = (lane >> 4) * 4 + ((lane >> 1) & 3), column = ((lane >> 3) & 1) * 4 + (lane & 1) * 2;
"""
PRODUCT = (
    PLACE
    + """
    simdgroup_matrix<T, 8, 8> left, right;
    simdgroup_matrix<float, 8, 8> sum;
    for (uint e = 0; e < 2; ++e) {
        left.thread_elements()[e] = a[row * 8 + column + e];
        right.thread_elements()[e] = b[row * 8 + column + e];
        sum.thread_elements()[e] = c[row * 8 + column + e];
    }
    simdgroup_multiply_accumulate(sum, left, right, sum);
    for (uint e = 0; e < 2; ++e) y[row * 8 + column + e] = sum.thread_elements()[e];
"""
)


def run(source: str, *arrays: mx.array, header: str = "", **options: Any) -> mx.array:
    definition = {
        "name": "matrices",
        "input_names": [*"abc"[: len(arrays)]],
        "output_names": ["y"],
        "source": source,
        "header": header,
    }
    return Emulator(definition, check=True, **options)(
        inputs=list(arrays),
        template=[("T", arrays[0].dtype)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(8, 8)],
        output_dtypes=[mx.float32],
    )[0]


def factors(dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    return normal((8, 8), dtype), normal((8, 8), dtype), normal((8, 8))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_multiply_accumulate(dtype: mx.Dtype) -> None:
    a, b, c = factors(dtype)
    outputs = [run(PRODUCT, a, b, c, order=order) for order in range(3)]
    np.testing.assert_allclose(wide(outputs[0]), wide(a) @ wide(b) + wide(c), atol=1e-6)
    assert all(mx.array_equal(y, outputs[0]).item() for y in outputs)


def test_multiply_starts_from_zero() -> None:
    a, b, c = factors(mx.float32)
    source = PRODUCT.replace(
        "multiply_accumulate(sum, left, right, sum)", "multiply(sum, left, right)"
    )
    np.testing.assert_allclose(wide(run(source, a, b, c)), wide(a) @ wide(b), atol=1e-6)


def test_lanes_hold_what_mlx_expects_them_to() -> None:
    """MLX's matrix kernels place elements by `get_coord` of the installed header: column, row."""
    text = MMA.read_text()
    start = text.index("METAL_FUNC static constexpr short2 get_coord(")
    found = text[start : text.index("}\n", text.index("return", start)) + 2]
    header = re.sub(r"\[\[.*?\]\]|static constexpr", "", found)
    source = (
        PLACE
        + """
    short2 mlx = get_coord(lane);
    for (int e = 0; e < 2; ++e) y[row * 8 + column + e] = mlx.y * 8 + mlx.x + e;
"""
    )
    places = run(source, mx.zeros((8,)), header=header)
    assert places.tolist() == mx.arange(64, dtype=mx.float32).reshape(8, 8).tolist()


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        ("simdgroup_matrix<float, 8, 8>(3.0f)", 3 * np.eye(8)),
        ("make_filled_simdgroup_matrix<float, 8, 8>(3.0f)", np.full((8, 8), 3.0)),
    ],
    ids=["the constructor makes a diagonal", "filled"],
)
def test_made_of_one_value(made: str, wanted: np.ndarray) -> None:
    store = f"simdgroup_matrix<float, 8, 8> made = {made};\n" + (
        "for (uint e = 0; e < 2; ++e) y[row * 8 + column + e] = made.thread_elements()[e];"
    )
    np.testing.assert_array_equal(np.array(run(PLACE + store, mx.zeros((8,)))), wanted)


def test_a_product_in_divergent_code_is_reported() -> None:
    other = "simdgroup_multiply_accumulate(sum, right, left, sum)"
    one = "simdgroup_multiply_accumulate(sum, left, right, sum)"
    source = PRODUCT.replace(one, f"if (lane < 16) {one};\nelse {other}")
    with pytest.raises(KernelError, match="divergent simdgroup operation, line"):
        run(source, *factors(mx.float32))


def test_lanes_that_returned_leave_nan() -> None:
    source = PRODUCT.replace(
        "simdgroup_multiply", "if (lane == 0) { y[0] = y[1] = 0.0f; return; }\nsimdgroup_multiply"
    )
    assert mx.isnan(run(source, *factors(mx.float32))).any().item()


def test_other_sizes_are_refused() -> None:
    with pytest.raises(CompileError, match="8x8"):
        run(PRODUCT.replace("<float, 8, 8> sum", "<float, 4, 8> sum"), *factors(mx.float32))

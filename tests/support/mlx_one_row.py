"""MLX's own kernel for one row of a quantised product, cut from the installed package's header."""

import functools
import re
from pathlib import Path
from typing import Any

import mlx.core as mx

from dspine_mlx.metal.rows import Matrix
from tests.msl import Emulator

HEADER = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels/quantized.h"
FLOATS = HEADER.with_name("fp_quantized.h")
CALLED = ("get_pack_factor", "get_bytes_per_pack", "load_vector", "load_vector_safe", "qdot",
          "qdot_safe")  # fmt: skip
SMALL_FLOATS = {  # header of each type, and the conversions that the kernels use
    "fp4_e2m1": ("fp4.h", ("float16_t", "float")),
    "fp8_e4m3": ("fp8.h", ("float16_t", "float")),
    "fp8_e8m0": ("fp8.h", ("float",)),
}
SIZES = "constexpr constant int SIMD_SIZE = 32;\nconstexpr constant int QUAD_SIZE = 4;\n"


def function_template(name: str, header: Path = HEADER) -> str:
    """The function template of that name, with its template line."""
    text = header.read_text().encode("ascii", "ignore").decode()
    found = re.search(rf"\b{name}\(", text)
    assert found, f"{header} has no {name}"
    return braces(text, text.rindex("template <", 0, found.start())) + "\n"


def braces(text: str, start: int) -> str:
    """The text from `start` to the end of the block that opens next."""
    depth, end = 0, text.index("{", start)
    while True:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
        if depth == 0:
            return text[start:end]


def struct(name: str, header: Path, before: str = "struct") -> str:
    text = header.read_text().encode("ascii", "ignore").decode()
    at = text.index(f"struct {name} {{")
    return braces(text, text.rindex(before, 0, at + len("struct")))


def small_float(name: str) -> str:
    """The type with its conversions only: constructors are beyond the emulator."""
    header, types = SMALL_FLOATS[name]
    text = struct(name, HEADER.with_name(header))
    conversions = [braces(text, text.index(f"operator {type_}()")) for type_ in types]
    return f"struct {name} {{ {' '.join(conversions)} uint8_t bits; }};\n"


def float_definition(fast: bool) -> dict[str, Any]:
    """fp_qmv_fast_impl or fp_qmv_impl, of the mx and nv modes."""
    name = "fp_qmv_fast_impl" if fast else "fp_qmv_impl"
    called = ["get_pack_factor", "get_bytes_per_pack", "dequantize_scale", *CALLED[2:], name]
    parts = [function_template(f, FLOATS) for f in called]
    partial = ", PARTIAL" if "partial_rows" in parts[-1] else ""
    return {
        "name": f"mlx_{name}",
        "input_names": ["w", "scales", "x", "K", "N"],
        "output_names": ["y"],
        "header": "constexpr constant float F8E4M3_MAX = 448.0f, F4E2M1_MAX = 6.0f;\n"
        + "".join(map(small_float, SMALL_FLOATS))
        + SIZES
        + struct("Dequantize", FLOATS, "template <")
        + ";\n"
        + "\n".join(parts),
        "source": f"{name}<T, GROUP, BITS{partial}>(w, scales, nullptr, x, y, K, N, "
        "threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);",
    }


def definition(fast: bool) -> dict[str, Any]:
    """qmv_fast_impl or qmv_impl as a custom kernel; rows of x lie along the grid's x, as MLX has
    them."""
    name = "qmv_fast_impl" if fast else "qmv_impl"
    called = [function_template(f) for f in (*CALLED, name)]
    partial = ", PARTIAL" if "partial_rows" in called[-1] else ""
    return {
        "name": f"mlx_{name}",
        "input_names": ["w", "scales", "biases", "x", "K", "N"],
        "output_names": ["y"],
        "header": SIZES + "\n".join(called),
        "source": f"{name}<T, GROUP, BITS{partial}>(w, scales, biases, x, y, K, N, "
        "threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);",
    }


@functools.cache
def emulator(fast: bool, mode: str = "affine") -> Emulator:
    return Emulator(definition(fast) if mode == "affine" else float_definition(fast))


def is_fast(matrix: Matrix) -> bool:
    """Whether K is whole blocks, of two packs for each lane."""
    pack = {3: 8, 5: 8, 6: 4}.get(matrix.bits) or 32 // matrix.bits
    return matrix.shape[1] % (64 * pack) == 0


def one_row(x: mx.array, matrix: Matrix, kernel: Emulator | None = None) -> mx.array:
    """x W^T for x [M, K], each row for itself: a threadgroup of 2 simdgroups makes 8 outputs."""
    kernel = kernel or emulator(is_fast(matrix), matrix.mode)
    M, (N, K) = x.shape[0], matrix.shape
    biases = [] if matrix.biases is None else [matrix.biases]
    return kernel(
        inputs=[matrix.weight, matrix.scales, *biases, x, mx.array(K), mx.array(N)],
        template=[("T", x.dtype), ("GROUP", matrix.group_size), ("BITS", matrix.bits),
                  ("PARTIAL", N % 8 != 0)],
        grid=(32 * M, 2 * -(-N // 8), 1),
        threadgroup=(32, 2, 1),
        output_shapes=[(M, N)],
        output_dtypes=[x.dtype],
    )[0]  # fmt: skip


def quantized_matmul(
    x: mx.array,
    w: mx.array,
    /,
    scales: mx.array,
    biases: mx.array | None = None,
    transpose: bool = True,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
) -> mx.array:
    """In the place of `mx.quantized_matmul`: what a GPU before the M3 gives for up to 5 rows."""
    assert transpose
    matrix = Matrix(w, scales, biases, group_size, bits, mode)
    return one_row(x.reshape(-1, x.shape[-1]), matrix).reshape(*x.shape[:-1], -1)


def on_a_gpu(x: mx.array, w: mx.array, /, **packing: Any) -> mx.array:
    """In the place of `mx.quantized_matmul`: this kernel for one row, another order of summation
    for several."""
    if x.size == x.shape[-1]:
        return quantized_matmul(x, w, **packing)
    packing.pop("transpose", None)
    return x @ mx.dequantize(w, **packing, dtype=x.dtype).T


def gather_qmm(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    rhs_indices: mx.array,
    group_size: int,
    bits: int,
    mode: str,
    **rest: Any,
) -> mx.array:
    """In the place of `mx.gather_qmm`, which runs this kernel for every pair of row and expert."""
    packing = group_size, bits, mode
    each = [
        Matrix(w[e], scales[e], None if biases is None else biases[e], *packing)
        for e in range(len(w))
    ]
    rows = mx.broadcast_to(x, (*rhs_indices.shape, *x.shape[-2:])).reshape(-1, 1, x.shape[-1])
    pairs = zip(rows, rhs_indices.reshape(-1).tolist(), strict=True)
    y = mx.concatenate([one_row(row, each[e]) for row, e in pairs])
    return y.reshape(*rhs_indices.shape, 1, -1)

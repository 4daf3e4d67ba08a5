"""MLX's own kernel for one row of a quantised product, cut from the installed package's header."""

import functools
import re
from pathlib import Path
from typing import Any

import mlx.core as mx

from dspine_mlx.metal.rows import Matrix
from tests.msl import Emulator

HEADER = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels/quantized.h"
CALLED = ("get_pack_factor", "get_bytes_per_pack", "load_vector", "load_vector_safe", "qdot",
          "qdot_safe")  # fmt: skip
SIZES = "constexpr constant int SIMD_SIZE = 32;\nconstexpr constant int QUAD_SIZE = 4;\n"


def function_template(name: str, header: Path = HEADER) -> str:
    """The function template of that name, with its template line."""
    text = header.read_text().encode("ascii", "ignore").decode()
    found = re.search(rf"\b{name}\(", text)
    assert found, f"{header} has no {name}"
    start = text.rindex("template <", 0, found.start())
    depth, end = 0, text.index("{", found.start())
    while True:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
        if depth == 0:
            return text[start:end] + "\n"


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
def emulator(fast: bool) -> Emulator:
    return Emulator(definition(fast))


def is_fast(matrix: Matrix) -> bool:
    """Whether K is whole blocks, of two packs for each lane."""
    pack = {3: 8, 5: 8, 6: 4}.get(matrix.bits) or 32 // matrix.bits
    return matrix.shape[1] % (64 * pack) == 0


def one_row(x: mx.array, matrix: Matrix, kernel: Emulator | None = None) -> mx.array:
    """x W^T for x [M, K], each row for itself: a threadgroup of 2 simdgroups makes 8 outputs."""
    kernel = kernel or emulator(is_fast(matrix))
    M, (N, K) = x.shape[0], matrix.shape
    return kernel(
        inputs=[matrix.weight, matrix.scales, matrix.biases, x, mx.array(K), mx.array(N)],
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

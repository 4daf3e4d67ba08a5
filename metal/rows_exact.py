"""y = x W^T for the few rows of a verify forward, with the bits of MLX's kernel for one row."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import mlx.core as mx

from dspine_mlx.metal.kernel import Arrays, Kernel
from dspine_mlx.metal.rows import INPUTS, MODES, Matrix, multiply, rows_limits

SIMDGROUPS = 2  # of a threadgroup
FUSIONS = range(5)


class Form(NamedTuple):
    """The choices that decide one row's bits in MLX's kernel; they depend on MLX's version and
    compiler.

    packs: 2 where K is whole blocks (qmv_fast), else 1 (qmv). wide: sums of x are float32 (MLX
    0.32.4), else in x's dtype. fuse: which products are fused with an addition: 0 the compiler's
    choice, 1 to 4 spelt out (rows_exact_header.metal).
    """

    packs: int
    wide: bool = True
    fuse: int = 0


@dataclass(frozen=True)
class Exact:
    """A form, and a cut that changes no bit: rows and outputs per simdgroup."""

    form: Form
    rows: int = 4
    outputs: int = 4

    def __call__(self, x: mx.array, matrix: Matrix) -> mx.array:
        return rows_exact(x, matrix, self)

    def limits(self, x: mx.array, matrix: Matrix) -> str | None:
        return ROWS_EXACT.limits(x, matrix, self)


CUTS = ((4, 4), (4, 8), (8, 2))  # rows and outputs per simdgroup: about 65, 100 and 80 registers


def forms(matrix: Matrix) -> list[Form]:
    """Forms that MLX's kernel may have for this matrix, most likely first."""
    packs = (2, 1) if matrix.shape[1] % 512 == 0 else (1, 2)
    sums = (True, False) if matrix.mode == "affine" else (True,)  # other modes have no bias
    return [Form(p, w, f) for w, p, f in product(sums, packs, FUSIONS)]


def rows_exact(x: mx.array, matrix: Matrix, cut: Exact | None = None) -> mx.array:
    """y = x W^T, each row with the bits of MLX's one-row kernel; cut None: one MLX call per row.

    x: [M, K] of 2 to 32 rows; W: [N, K], packed in any of MLX's ways but with 2 bits.
    """
    if cut is None:
        return apart(x, matrix)
    return ROWS_EXACT.launch(x, matrix, cut)[0]


def apart(x: mx.array, matrix: Matrix) -> mx.array:
    """Multiply row by row, by plain decoding's own calls."""
    return mx.concatenate([multiply(x[i : i + 1], matrix) for i in range(x.shape[0])])


def launch_exact(
    function: Callable[..., Arrays], x: mx.array, matrix: Matrix, cut: Exact
) -> Arrays:
    M, (N, _) = x.shape[0], matrix.shape
    tiles = -(-M // cut.rows)
    rows = -(-M // tiles)  # as few tiles, evenly filled
    threads = 32 * SIMDGROUPS
    sizes = {"BITS": matrix.bits, "GROUP": matrix.group_size, "SIMDGROUPS": SIMDGROUPS}
    sizes |= {"ROWS": rows, "OUTS": cut.outputs, "PACKS": cut.form.packs}
    sizes |= {"WIDE": cut.form.wide, "FUSE": cut.form.fuse, "MODE": MODES[matrix.mode]}
    biases = matrix.scales if matrix.biases is None else matrix.biases  # not read
    return function(
        inputs=[x, matrix.weight, matrix.scales, biases],
        template=[("T", x.dtype), *sizes.items()],
        grid=(threads * tiles, -(-N // (cut.outputs * SIMDGROUPS)), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(M, N)],
        output_dtypes=[x.dtype],
    )


def exact_limits(x: mx.array, matrix: Matrix, cut: Exact | None = None) -> str | None:
    if matrix.scales is None:
        return "not packed"
    N, K = matrix.shape
    if K in (64, 128):
        return f"a weight of {N} x {K}, for which MLX has another kernel"
    return rows_limits(x, matrix)


ROWS_EXACT = Kernel(
    "rows_exact",
    INPUTS,
    ["y"],
    lambda x, matrix, cut: [apart(x, matrix)],
    launch_exact,
    exact_limits,
    headers=("rows_header", "rows_exact_header"),
)

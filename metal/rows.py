"""y = x W^T for the few rows of a verify forward: kernels that share each weight among the rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.metal.kernel import Arrays, Kernel

MODES = {"affine": 0, "mxfp4": 1, "mxfp8": 1, "nvfp4": 2}  # enum Mode of rows_header.metal
PACKED_BITS, GROUPS = (3, 4, 5, 6, 8), (32, 64, 128)  # of affine weights
MAX_ROWS = 32


class Matrix(NamedTuple):
    """A weight W [N, K]: floating (bits 0), or packed by one of MLX's quantisations."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    group_size: int = 0
    bits: int = 0
    mode: str = "affine"

    @classmethod
    def of(cls, layer: nn.Module) -> "Matrix":
        """The weight of a linear layer or an embedding, quantised or not."""
        if "scales" not in layer:
            return cls(layer.weight)
        packing = (layer.group_size, layer.bits, layer.mode)
        return cls(layer.weight, layer.scales, layer.get("biases"), *packing)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        if self.scales is None:
            return self.weight.shape[0], self.weight.shape[1]
        return self.scales.shape[0], self.scales.shape[1] * self.group_size

    @property
    def nbytes(self) -> int:
        parts = (self.weight, self.scales, self.biases)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True)
class Tile:
    """A cut of rows_tile: 8-output tiles per threadgroup, and the simdgroups that share K."""

    tiles: int = 4
    split: int = 8

    def __call__(self, x: mx.array, matrix: Matrix) -> mx.array:
        return rows_tile(x, matrix, self)

    def limits(self, x: mx.array, matrix: Matrix) -> str | None:
        return ROWS_TILE.limits(x, matrix, self)


def tile_cuts(outputs: int) -> tuple[Tile, ...]:
    """Cuts worth trying, the most promising first. Fewer outputs make fewer threadgroups, so K is
    split more. One cut has 128 threads, for drivers that allow few."""
    if outputs >= 4096:
        return Tile(4, 8), Tile(2, 8), Tile(4, 4)
    return Tile(2, 8), Tile(1, 16), Tile(2, 4)


def rows_tile(x: mx.array, matrix: Matrix, cut: Tile | None = None) -> mx.array:
    """y = x W^T on the matrix units, in float32 and rounded once; cut None: MLX's own product.

    x: [M, K] of 2 to 32 rows; W: [N, K]. The bits of a row do not depend on the others.
    """
    if cut is None:
        return multiply(x, matrix)
    return ROWS_TILE.launch(x, matrix, cut)[0]


def multiply(x: mx.array, matrix: Matrix) -> mx.array:
    """Compute x W^T by MLX."""
    if matrix.scales is None:
        return x @ matrix.weight.T
    return mx.quantized_matmul(
        x,
        matrix.weight,
        scales=matrix.scales,
        biases=matrix.biases,
        group_size=matrix.group_size,
        bits=matrix.bits,
        mode=matrix.mode,
    )


def launch_tile(function: Callable[..., Arrays], x: mx.array, matrix: Matrix, cut: Tile) -> Arrays:
    M, (N, _) = x.shape[0], matrix.shape
    row_tiles = 1 if M <= 8 else 2
    # what a packing lacks is not read
    scales = matrix.weight if matrix.scales is None else matrix.scales
    biases = scales if matrix.biases is None else matrix.biases
    sizes = {"BITS": matrix.bits, "GROUP": matrix.group_size or 1, "MODE": MODES[matrix.mode]}
    sizes |= {"NT": cut.tiles, "RT": row_tiles, "SPLIT": cut.split}
    threads = 32 * cut.split
    return function(
        inputs=[x, matrix.weight, scales, biases],
        template=[("T", x.dtype), *sizes.items()],
        grid=(threads * -(-N // (8 * cut.tiles)), -(-M // (8 * row_tiles)), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(M, N)],
        output_dtypes=[x.dtype],
    )


def tile_limits(x: mx.array, matrix: Matrix, cut: Tile) -> str | None:
    return rows_limits(x, matrix)


def rows_limits(x: mx.array, matrix: Matrix) -> str | None:
    """Why no kernel here serves these arguments, or None."""
    if matrix.weight.ndim != 2:
        return f"the weight has {matrix.weight.ndim} axes"
    N, K = matrix.shape
    if N < 8 or K % 32:
        return f"a weight of {N} x {K}; it needs 8 outputs and a multiple of 32 columns"
    if not 2 <= x.shape[0] <= MAX_ROWS:
        return f"{x.shape[0]} rows; from 2 to {MAX_ROWS} are served"
    if not mx.issubdtype(x.dtype, mx.floating):
        return f"rows of {x.dtype}"
    return packing_limits(x, matrix)


def packing_limits(x: mx.array, matrix: Matrix) -> str | None:
    if matrix.scales is None:
        same = x.dtype == matrix.weight.dtype
        return None if same else f"rows of {x.dtype}, a weight of {matrix.weight.dtype}"
    if matrix.mode not in MODES:
        return f"weights in {matrix.mode}"
    if matrix.mode != "affine":
        return None
    if matrix.bits not in PACKED_BITS or matrix.group_size not in GROUPS:
        return f"weights of {matrix.bits} bits in groups of {matrix.group_size}"
    if matrix.biases is None or not x.dtype == matrix.scales.dtype == matrix.biases.dtype:
        return f"rows of {x.dtype}, scales of {matrix.scales.dtype}"
    return None


INPUTS = ["x", "weight", "scales", "biases"]
ROWS_TILE = Kernel(
    "rows_tile",
    INPUTS,
    ["y"],
    lambda x, matrix, cut: [multiply(x, matrix)],
    launch_tile,
    tile_limits,
    headers=("rows_header",),
)

"""Weights for the kernels of several rows, and what their products are in float64."""

import mlx.core as mx
import numpy as np

from dspine_mlx.metal.rows import Matrix
from tests.support.metal_device import normal, wide


def matrix(
    shape: tuple[int, int], bits: int, group: int, dtype: mx.Dtype, mode: str = "affine"
) -> Matrix:
    """A weight; bits 0: as it is. Rows of very different size, so that a wrong scale shows."""
    weight = normal(shape) * mx.exp(2 * normal((shape[0], 1)))
    if bits == 0:
        return Matrix(weight.astype(dtype))
    if mode == "affine":
        weight = weight.astype(dtype)
    packed, scales, *biases = mx.quantize(weight, group, bits, mode)
    return Matrix(packed, scales, biases[0] if biases else None, group, bits, mode)


def values(weight: Matrix) -> np.ndarray:
    """The weights in float64."""
    if weight.scales is None:
        return wide(weight.weight)
    scales, biases = weight.scales, weight.biases
    packing = {"group_size": weight.group_size, "bits": weight.bits, "mode": weight.mode}
    if biases is None:
        return wide(mx.dequantize(weight.weight, scales, **packing, dtype=mx.float32))
    single = scales.astype(mx.float32), biases.astype(mx.float32)
    return wide(mx.dequantize(weight.weight, *single, **packing))


def product(x: mx.array, weight: Matrix) -> np.ndarray:
    return wide(x) @ values(weight).T


def rounding(exact: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Half a unit in the last place of each value, in a dtype: the error of rounding it once."""
    size = np.maximum(np.abs(exact), 1e-30)
    return 2.0 ** np.floor(np.log2(size)) * mx.finfo(dtype).eps / 2

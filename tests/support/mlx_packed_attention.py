"""MLX's own kernels for one row over a quantised cache, cut from the installed package's headers:
the softmax of its scores, and its product with the values."""

import functools
from typing import Any

import mlx.core as mx
import pytest

from tests.msl import Emulator
from tests.support.mlx_one_row import HEADER, SIZES, function_template

SOFTMAX = HEADER.with_name("softmax.h")
LOOPED = 1024  # threads of the softmax of many keys
PLACES = """
uint gid = threadgroup_position_in_grid.x, LID = thread_position_in_threadgroup.x;
uint lsize = threads_per_threadgroup.x;
uint simd_lane_id = thread_index_in_simdgroup, simd_group_id = simdgroup_index_in_threadgroup;
"""
SPLIT = """
const int part = (K + PARTS - 1) / PARTS, split = threadgroup_position_in_grid.z % PARTS;
const int row = threadgroup_position_in_grid.z / PARTS;
const int length = split == PARTS - 1 ? K - split * part : part;
const size_t key = size_t(row / SHARE) * K + split * part;
qvm_impl<T, GROUP, BITS>(
    w + key * N * BITS / 32, scales + key * N / GROUP, biases + key * N / GROUP,
    x + size_t(row) * K + split * part, y + size_t(threadgroup_position_in_grid.z) * N,
    length, N, K,
    uint3(0, threadgroup_position_in_grid.y, 0), simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup);
"""


@functools.cache
def softmax_emulator(looped: bool) -> Emulator:
    name = "softmax_looped" if looped else "softmax_single_row"
    _, body = function_template(name, SOFTMAX).split(") {\n", 1)
    thread = "lid" if looped else "_lid"
    return Emulator({
        "name": f"mlx_{name}", "input_names": ["in", "axis_size"], "output_names": ["out"],
        "header": function_template("softmax_exp", SOFTMAX),
        "source": PLACES.replace("LID", thread) + body.strip().removesuffix("}"),
    })  # fmt: skip


@functools.cache
def product_emulator() -> Emulator:
    called = ("get_pack_factor", "get_bytes_per_pack", "qouter", "qvm_impl")
    return Emulator({
        "name": "mlx_qvm", "input_names": ["w", "scales", "biases", "x", "K", "N"],
        "output_names": ["y"], "header": SIZES + "".join(map(function_template, called)),
        "source": SPLIT,
    })  # fmt: skip


def softmax(scores: mx.array, looped: bool) -> mx.array:
    """Of the last axis, a threadgroup a row."""
    S = scores.shape[-1]
    threads = LOOPED if looped else -(-S // 128) * 32
    return softmax_emulator(looped)(
        inputs=[scores, mx.array(S)],
        template=[("T", scores.dtype), ("AccT", mx.float32), ("N_READS", 4)],
        grid=(threads * scores.size // S, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[scores.shape],
        output_dtypes=[scores.dtype],
    )[0]


def product(
    x: mx.array, values: tuple[mx.array, ...], bits: int, group: int, parts: int
) -> mx.array:
    """x [B, H, R, 1, S] times values [B, H, 1, S, V]: the keys in so many parts, then their sum."""
    B, H, R, M, S = x.shape
    assert M == 1
    V = values[1].shape[-1] * group
    sums = product_emulator()(
        inputs=[*map(mx.contiguous, (*values, x)), mx.array(S), mx.array(V)],
        template=[("T", x.dtype), ("GROUP", group), ("BITS", bits), ("PARTS", parts), ("SHARE", R)],
        grid=(32, 2 * -(-V // 64), B * H * R * parts),
        threadgroup=(32, 2, 1),
        output_shapes=[(B, H, R, parts, V)],
        output_dtypes=[x.dtype],
    )[0]
    return sums.sum(axis=3, keepdims=True)


def patch(monkeypatch: pytest.MonkeyPatch, parts: int, looped: bool) -> list[mx.array]:
    """Let mlx-lm's function run them. Returns the rows of scores that it will have been given."""
    multiply = mx.quantized_matmul
    calls: list[mx.array] = []

    def quantized_matmul(
        x: mx.array, *packed: mx.array, transpose: bool = True, **packing: Any
    ) -> mx.array:
        if transpose:  # a score does not depend on the keys beside it
            return multiply(x, *packed, transpose=True, **packing)
        calls.append(x)
        return product(x, packed, packing["bits"], packing["group_size"], parts)

    monkeypatch.setattr(mx, "quantized_matmul", quantized_matmul)
    monkeypatch.setattr(mx, "softmax", lambda scores, **_: softmax(scores, looped))
    return calls

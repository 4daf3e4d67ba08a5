"""MLX's own vector attention, cut from the installed package's header."""

import functools
from typing import Any

import mlx.core as mx

from tests.msl import Emulator
from tests.support.mlx_one_row import HEADER, function_template

VECTOR = HEADER.with_name("sdpa_vector.h")
FLAGS = ("has_mask", "query_transposed", "do_causal", "bool_mask", "float_mask", "has_sinks")
STRIDES = ["k_head_stride", "k_seq_stride", "v_head_stride", "v_seq_stride"]
UNUSED = """
const device bool* bmask = nullptr; const device T* fmask = nullptr;
const int mask_kv_seq_stride = 0, mask_q_seq_stride = 0, mask_head_stride = 0;
"""
PLACES = """
uint3 tid = threadgroup_position_in_grid; uint3 tpg = threadgroups_per_grid;
uint simd_gid = simdgroup_index_in_threadgroup; uint simd_lid = thread_index_in_simdgroup;
uint3 tptg = threads_per_threadgroup; uint3 tidtg = thread_position_in_threadgroup;
"""
KERNELS = {  # inputs and outputs in MLX's names
    "sdpa_vector": (["queries", "keys", "values", "gqa_factor", "N", *STRIDES, "scale", "sinks",
                     "num_q_heads"], ["out"]),
    "sdpa_vector_2pass_1": (["queries", "keys", "values", "N", *STRIDES, "scale", "sinks"],
                            ["out", "sums", "maxs"]),
    "sdpa_vector_2pass_2": (["partials", "sums", "maxs"], ["out"]),
}  # fmt: skip


def definition(name: str) -> dict[str, Any]:
    """A kernel of the header as a custom kernel; its function constants are template arguments."""
    _, body = function_template(name, VECTOR).split(") {\n", 1)
    inputs, outputs = KERNELS[name]
    before = PLACES + ("" if "partials" in inputs else UNUSED)
    return {"name": f"mlx_{name}", "input_names": inputs, "output_names": outputs,
            "source": before + body.strip().removesuffix("}")}  # fmt: skip


@functools.cache
def emulator(name: str) -> Emulator:
    return Emulator(definition(name))


def flags(causal: bool, sinks: mx.array | None) -> list[tuple[str, Any]]:
    on = {"do_causal": causal, "has_sinks": sinks is not None}
    return [(flag, on.get(flag, False)) for flag in FLAGS]


def strides(keys: mx.array, values: mx.array) -> list[mx.array]:
    sizes = [n for a in (keys, values) for n in (a.shape[2] * a.shape[3], a.shape[3])]
    return [mx.array(size, mx.uint64) for size in sizes]


def enough(sinks: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """An array that MLX passes as device memory: 8 elements at least."""
    given = mx.zeros((0,), dtype) if sinks is None else sinks
    return mx.concatenate([given, mx.zeros((8,), dtype)])


def one_pass(q: mx.array, k: mx.array, v: mx.array, scale: float, causal: bool = False,
             sinks: mx.array | None = None) -> mx.array:  # fmt: skip
    """A threadgroup of 32 simdgroups per row and head."""
    q, k, v = (mx.contiguous(a) for a in (q, k, v))
    B, heads, L, D = q.shape
    V = v.shape[3]
    return emulator("sdpa_vector")(
        inputs=[q, k, v, mx.array(heads // k.shape[1]), mx.array(k.shape[2]), *strides(k, v),
                scale, enough(sinks, q.dtype), mx.array(heads)],
        template=[("T", q.dtype), ("D", D), ("V", V), *flags(causal, sinks)],
        grid=(B * heads * 1024, L, 1),
        threadgroup=(1024, 1, 1),
        output_shapes=[(B, heads, L, V)],
        output_dtypes=[q.dtype],
    )[0]  # fmt: skip


def two_pass(q: mx.array, k: mx.array, v: mx.array, scale: float, blocks: int,
             causal: bool = False, sinks: mx.array | None = None) -> mx.array:  # fmt: skip
    """Every `blocks`-th key of a key head for a threadgroup, then the blocks together."""
    q, k, v = (mx.contiguous(a) for a in (q, k, v))
    B, heads, L, D = q.shape
    H, V = k.shape[1], v.shape[3]
    rows = B * heads * L
    partials = emulator("sdpa_vector_2pass_1")(
        inputs=[q, k, v, mx.array(k.shape[2]), *strides(k, v), scale, enough(sinks, q.dtype)],
        template=[("T", q.dtype), ("D", D), ("V", V), ("TK", 4), ("blocks", blocks),
                  *flags(causal, sinks)],
        grid=(32 * H, B * heads // H, L * blocks),
        threadgroup=(32, heads // H, L),
        output_shapes=[(rows, blocks, V), (rows, blocks), (rows, blocks)],
        output_dtypes=[q.dtype, mx.float32, mx.float32],
    )  # fmt: skip
    return emulator("sdpa_vector_2pass_2")(
        inputs=partials,
        template=[("T", q.dtype), ("D", V), ("blocks", blocks)],
        grid=(B * heads * 1024, L, 1),
        threadgroup=(1024, 1, 1),
        output_shapes=[(B, heads, L, V)],
        output_dtypes=[q.dtype],
    )[0]  # fmt: skip

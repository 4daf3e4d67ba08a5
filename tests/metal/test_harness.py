"""tests/msl itself: it runs correct kernels right, and catches one planted bug of every kind."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.msl import CompileError, Emulator, KernelError
from tests.support.metal_device import needs_emulator

pytestmark = [needs_emulator, pytest.mark.slow]

ROWS, D, TG = 3, 256, 128
NORM = """
    threadgroup float part[TG / 32];
    uint row = threadgroup_position_in_grid.x, tid = thread_position_in_threadgroup.x;
    uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
    float s = 0.0f;
    for (uint d = tid; d < D; d += TG) s += x[row * D + d] * x[row * D + d];
    s = simd_sum(s);
    if (lane == 0) part[group] = s;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    s = simd_sum(lane < TG / 32 ? part[lane] : 0.0f);
    float r = metal::precise::rsqrt(s / D + 1e-6f);
    for (uint d = tid; d < D; d += TG) y[row * D + d] = x[row * D + d] * r * w[d];
"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
REPORTED = {  # what is planted: (text of NORM, what takes its place, what must be reported)
    "row bound off by one": ("for (uint d = tid; d < D", "for (uint d = tid; d <= D", "load: x["),
    "wrong weight index": ("* w[d]", "* w[d + 1]", "out-of-range load: w[256]"),
    "store past the end": ("y[row * D + d] =", "y[row * D + d + 1] =", "store: y[768]"),
    "small threadgroup array": ("part[TG / 32]", "part[2]", "of threadgroup part"),
    "no barrier": (BARRIER, "", "read after unordered write: byte"),
    "a barrier for no memory": ("mem_flags::mem_threadgroup", "mem_flags::mem_none", "unordered"),
    "every lane writes": ("if (lane == 0) part", "part", "write-write race: byte"),
    "rows overlap": ("y[row * D + d] =", "y[row * (D - 1) + d] =", "write-write race: y["),
    "write after read": (
        "float r =",
        "if (tid == 0) part[1] = 0.0f;\nfloat r =",
        "write after unordered read: byte 4",
    ),
    "reads what none wrote": ("lane < TG / 32", "lane < 1 || part[lane % 4 + 4] > 0", "range"),
    "unwritten part": ("if (lane == 0) part", "if (tid == 0) part", "memory never written: byte 4"),
    "reads its output": ("s = simd_sum(s);", "s = simd_sum(s + y[tid]);", "never written: y["),
    "tail never written": ("d < D; d += TG) y", "d + 1 < D; d += TG) y", "y: 3 elements never"),
    "cast to write an input": ("float r =", "((device float*)x)[tid] = s;\nfloat r =", "an input"),
    "wild pointer": (
        "float r =",
        "s += *(const device float*)(ulong)(0x10000 + 0 * tid) * 0.0f;\nfloat r =",
        "wild access",
    ),
    "divergent barrier": (BARRIER, f"if (group == 0) {BARRIER}", "barrier"),
    "divergent simd_sum": (
        "s = simd_sum(lane < TG / 32 ? part[lane] : 0.0f);",
        "if (lane < 4) s = simd_sum(part[lane]);\nelse s = simd_max(0.0f);",
        "divergent simdgroup operation, line",
    ),
    "return before a barrier": (BARRIER, f"if (tid == 9) return;\n{BARRIER}", "threads returned"),
    "too much threadgroup memory": ("part[TG / 32]", "part[8200]", "threadgroup too large"),
}
REFUSED = {  # what Apple's compiler refuses as well
    "address spaces": ("float s =", "const device float* q = part;\nfloat s ="),
    "no address space": ("float s =", "float* q = y;\nfloat s ="),
    "write to an input": ("float s =", "x[0] = 1.0f;\nfloat s ="),
    "unknown function": ("metal::precise::rsqrt", "metal::rsqrtf"),
    "double": ("float s =", "double z = x[0];\nfloat s ="),
    "standard library": ("metal::precise::rsqrt", "std::sqrt"),
    "ambiguous minimum": ("float s =", "int z = min(int(tid), 3u);\nfloat s ="),
    "beyond ASCII": ("float s =", "// x\u00b2\nfloat s ="),
}


def run(source: str, x: mx.array, check: bool = True, **definition: Any) -> mx.array:
    definition = {
        "name": "norm",
        "input_names": ["x", "w"],
        "output_names": ["y"],
        "source": source,
    } | definition
    kernel = Emulator(definition, check=check)
    return kernel(
        inputs=[x, mx.arange(D) / D],
        template=[("D", D), ("TG", TG)],
        grid=(ROWS * TG, 1, 1),
        threadgroup=(TG, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )[0]


def planted(found: str, replacement: str) -> str:
    assert found in NORM
    return NORM.replace(found, replacement, 1)


def test_a_correct_kernel_is_right_and_clean() -> None:
    x = mx.random.normal((ROWS, D))
    wanted = mx.fast.rms_norm(x, mx.arange(D) / D, 1e-6)
    np.testing.assert_allclose(np.array(run(NORM, x)), np.array(wanted), atol=1e-5)


@pytest.mark.parametrize("bug", REPORTED)
def test_reports(bug: str) -> None:
    found, replacement, report = REPORTED[bug]
    with pytest.raises(KernelError) as caught:
        run(planted(found, replacement), mx.random.normal((ROWS, D)), ensure_row_contiguous=False)
    assert report in str(caught.value)


@pytest.mark.parametrize("bug", REFUSED)
def test_refuses(bug: str) -> None:
    with pytest.raises(CompileError):
        run(planted(*REFUSED[bug]), mx.random.normal((ROWS, D)))


def test_refuses_a_float_where_bfloat_is_wanted() -> None:
    with pytest.raises(CompileError, match="bfloat"):
        run(NORM, mx.random.normal((ROWS, D)).astype(mx.bfloat16))


def test_refuses_a_device_pointer_to_a_small_input() -> None:
    """MLX puts inputs of less than 8 elements into the constant address space."""
    definition = {
        "name": "small",
        "input_names": ["x"],
        "output_names": ["y"],
        "header": "inline float first(const device float* p) { return p[0]; }\n",
        "source": "y[thread_position_in_grid.x] = first(x);",
    }
    launch: dict[str, Any] = {"grid": (4, 1, 1), "threadgroup": (4, 1, 1)}
    launch |= {"output_shapes": [(4,)], "output_dtypes": [mx.float32]}
    assert Emulator(definition)(inputs=[mx.ones((8,))], **launch)[0].tolist() == [1.0] * 4
    with pytest.raises(CompileError):
        Emulator(definition)(inputs=[mx.ones((7,))], **launch)


def test_bytes_are_counted() -> None:
    definition = {
        "name": "reversed",
        "input_names": ["x"],
        "output_names": ["y"],
        "source": "uint i = thread_position_in_grid.x;\ny[i] = x[x_shape[0] - 1 - i] + x[0];",
    }
    kernel = Emulator(definition, check=True)
    x = mx.arange(40, dtype=mx.float32)
    (y,) = kernel(
        inputs=[x],
        grid=(40, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(40,)],
        output_dtypes=[mx.float32],
    )
    assert y.tolist() == x[::-1].tolist()
    assert kernel.traffic["x"].loaded == 2 * 160
    assert kernel.traffic["x"].touched == kernel.traffic["y"].stored == 160

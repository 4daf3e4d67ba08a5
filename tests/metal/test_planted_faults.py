"""Faults planted in the drafter's kernels and in second passes: the checker or a comparison finds
each. Kernels of rows have theirs beside their tests."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dspine_mlx.metal.attention import ROWS_MERGE
from dspine_mlx.metal.exact_attention import EXACT_MERGE
from dspine_mlx.metal.inject import GATED_MESSAGE, RESIDUAL_WRITE
from dspine_mlx.metal.kernel import Kernel, Lookup
from dspine_mlx.metal.markov import MARKOV_SCORES
from dspine_mlx.metal.transition import CANDIDATE_MESSAGES, TRANSITION_SCORES
from dspine_mlx.metal.walk import WALK
from tests.msl import Emulator, KernelError
from tests.support.metal_device import emulator, needs_emulator, normal, wide

pytestmark = pytest.mark.slow

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
LOADS, DOTS, SUMS = "    for (uint e = tid", "    for (uint c = lane", "    for (int n = 0"


def table(rows: int, columns: int, bits: int = 0) -> Lookup:
    """Rows 3, 8, 13, ... of 40, for 2 slots."""
    at = (3 + 5 * mx.arange(2 * rows)).reshape(2, rows).astype(mx.uint32)
    matrix = normal((40, columns))
    if not bits:
        return Lookup(at, matrix)
    packed, scales, biases = mx.quantize(matrix, group_size=32, bits=bits)
    return Lookup(at, packed, scales, biases, 32, bits)


def parts(blocks: int) -> tuple[mx.array, ...]:
    return normal((6, blocks, 64)), normal((6, blocks)), 1 + mx.abs(normal((6, blocks)))


def inputs(kernel: Kernel) -> tuple[Any, ...]:
    mx.random.seed(1)
    if kernel is GATED_MESSAGE:
        return normal((3, 70)), normal((3, 3 * 40)), normal((80,)), normal((40,))
    if kernel is RESIDUAL_WRITE:
        return normal((4, 96)), normal((3, 96)), normal((96,)), 1e-6
    if kernel is CANDIDATE_MESSAGES:
        return normal((2, 20)), table(3, 40)
    if kernel is TRANSITION_SCORES:
        write, weight = normal((2, 3, 1024)), normal((1024,))
        return normal((2, 1024)), write, weight, 1e-6, table(3, 1024, bits=4)
    if kernel is MARKOV_SCORES:
        return normal((2, 3)), table(3, 200), table(3, 200)
    if kernel is WALK:
        return mx.zeros((4,)), mx.round(normal((5, 4, 4))), mx.zeros((6, 4)), 1.0
    queries = normal((1, 2, 3, 64))
    if kernel is EXACT_MERGE:
        return *parts(64), queries
    return *parts(3), normal((8,))[:2], queries


WRONG: dict[str, tuple[Kernel, str, str]] = {
    "message: another row's scale": (
        GATED_MESSAGE, "max(metal::precise::sqrt(previous)", "max(metal::precise::sqrt(own)"),
    "message: no bias": (GATED_MESSAGE, "+ static_cast<float>(bias[d])", ""),
    "write: another row's": (RESIDUAL_WRITE, "write[written * D", "write[written / 2 * D"),
    "write: a norm of another row": (
        RESIDUAL_WRITE, "block[row * D + d]", "block[row / 2 * D + d]"),
    "candidates: another row": (CANDIDATE_MESSAGES, "rows[pair]", "rows[pair / K * K]"),
    "candidates: its gate": (CANDIDATE_MESSAGES, "table[row + A + d]", "table[row + d]"),
    "scores: another row's scale": (TRANSITION_SCORES, "scales[scaled]", "scales[column / GROUP]"),
    "scores: no bias": (TRANSITION_SCORES, "* scale + bias", "* scale"),
    "scores: a group off by one": (
        TRANSITION_SCORES, "biases[scaled]", "biases[scaled > 0 ? scaled - 1 : 0]"),
    "scores: another predecessor": (
        TRANSITION_SCORES, "write[(t * K + i)", "write[(t * K + i / 2)"),
    "markov: another pair": (MARKOV_SCORES, "base[t * K + pair % K]", "base[t * K + pair / K]"),
    "markov: the first columns": (MARKOV_SCORES, "w2[after * R + start + c]", "w2[after * R + c]"),
    "walk: the last maximum": (WALK, "score > best", "score >= best"),
    "walk: another row": (WALK, "+ i * transitions_strides[2]", ""),
    "merge: a part left out": (ROWS_MERGE, "p < parts; ++p) {", "p + 1 < parts; ++p) {"),
    "merge: another head's sink": (ROWS_MERGE, "sinks[head]) - top", "sinks[1 - head]) - top"),
    "exact merge: a last bit": (
        EXACT_MERGE, "sum : sum / total)",
        "sum : as_type<float>(as_type<uint>(sum / total) ^ (i == 1)))"),
    "exact merge: another order": (
        EXACT_MERGE, "int block = group + 32 * b", "int block = group * BLOCKS_EACH + b"),
}  # fmt: skip
REPORTED: dict[str, tuple[Kernel, str, str]] = {  # stale threadgroup memory
    "message": (GATED_MESSAGE, BARRIER, ""),
    "write": (RESIDUAL_WRITE, BARRIER, ""),
    "scores": (TRANSITION_SCORES, f"    {BARRIER}\n{DOTS}", DOTS),
    "scores, overwritten": (TRANSITION_SCORES, f"    {BARRIER}\n{LOADS}", LOADS),
    "markov": (MARKOV_SCORES, f"    {BARRIER}\n{SUMS}", SUMS),
    "walk": (WALK, f"{BARRIER}\nif (tid == 0) {{", "if (tid == 0) {"),
    "exact merge": (EXACT_MERGE, f"{BARRIER}\n    float sum", "\n    float sum"),
}  # fmt: skip


def spoiled(kernel: Kernel, found: str, replacement: str) -> Emulator:
    definition = kernel.definition
    part = "source" if found in definition["source"] else "header"
    assert found in definition[part]
    changed = {part: definition[part].replace(found, replacement)}
    return Emulator(definition | changed, check=True)


def agree(kernel: Kernel, device: Emulator) -> bool:
    """Bit for bit where that is what the kernel is for, else about what plain MLX gives."""
    args = inputs(kernel)
    outputs = kernel.launcher(device, *args)
    if kernel is EXACT_MERGE:
        (wanted,) = kernel.launcher(emulator(kernel), *args)
        np.testing.assert_allclose(wide(wanted), wide(kernel.reference(*args)[0]), atol=1e-5)
        return mx.array_equal(outputs[0], wanted).item()
    pairs = zip(outputs, kernel.reference(*args), strict=True)
    return all(np.allclose(wide(a), wide(b), rtol=1e-4, atol=1e-4) for a, b in pairs)


@needs_emulator
@pytest.mark.parametrize("kernel", {kernel.name: kernel for kernel, *_ in WRONG.values()}.values(),
                         ids=lambda kernel: kernel.name)  # fmt: skip
def test_without_a_fault_they_agree(kernel: Kernel) -> None:
    assert agree(kernel, Emulator(kernel.definition, check=True))


@needs_emulator
@pytest.mark.parametrize("fault", WRONG)
def test_a_planted_fault_shows(fault: str) -> None:
    kernel, *change = WRONG[fault]
    assert not agree(kernel, spoiled(kernel, *change))


@needs_emulator
@pytest.mark.parametrize("fault", REPORTED)
def test_the_checker_reports_stale_memory(fault: str) -> None:
    kernel, *change = REPORTED[fault]
    with pytest.raises(KernelError, match="unordered"):
        kernel.launcher(spoiled(kernel, *change), *inputs(kernel))

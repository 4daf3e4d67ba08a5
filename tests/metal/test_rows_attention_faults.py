"""Faults planted in the kernels of rows that attend together: the checker reports them, or float64
and the race show them."""

import mlx.core as mx
import pytest

from dspine_mlx.metal import attention
from dspine_mlx.metal.attention import ROWS_ATTENTION, ROWS_MERGE, Attended, Parts
from dspine_mlx.target.products import STOCK, name
from dspine_mlx.target.race import Race
from tests.msl import Emulator, KernelError
from tests.support.attention import SMALL, assert_exact, case, devices, launch, window_mask
from tests.support.metal_device import needs_emulator
from tests.support.racing import M2

pytestmark = pytest.mark.slow

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
FAULTS = {  # what is planted: (text, what takes its place)
    "a key too many": ("key <= last", "key <= last + 1"),
    "another head's keys": ("key_head * keys_strides[1]", "0 * keys_strides[1]"),
    "the maximum of half a row": ("highest = max(highest, simd_shuffle_xor(highest, 8));", ""),
    "no fading": ("sums[t][e] * fade", "sums[t][e]"),
    "weights of half a row": ("sum += simd_shuffle_xor(sum, 1);", ""),
    "position of another row": ("position = known % L", "position = known % 2"),
    "a mask that is not added": ("if (MASK == 2 && seen)", "if (MASK == 3 && seen)"),
}
IN_HEADER = {  # of a packed cache
    "another key's scale": ("scales[scales_at + column", "scales[column"),
    "no bias": ("* scale + bias", "* scale"),
    "a group off by one": ("biases[scales_at + column / GROUP]", "biases[scales_at]"),
    "a last bit": ("run_field<BITS>(run, c)", "run_field<BITS>(run, c) ^ (c == 5)"),
    "another column": ("run_field<BITS>(run, c)", "run_field<BITS>(run, c ^ 1)"),
}
REPORTED = {
    "stale threadgroup memory": (
        f"{BARRIER}\n\n", "", "unordered"),
    "keys past the last": (
        "if (key < end) {", "if (true) {", "(out-of-range load|never written).*(keys|values)"),
    "rows past the last": ("known = min(row, rows - 1)", "known = row", "out-of-range load"),
    "a row not written": ("if (row < rows)", "if (row + 1 < rows)", "never written"),
    "every lane writes": ("if (slice == 0 && place.y == 0)", "if (true)", "write-write race"),
}  # fmt: skip


IN_SLICES = {  # with what the checker reports, or None: the values show it
    "stale scores": (
        f"    {BARRIER}\n        UNROLL for (int k = 0; k < STEPS; ++k)",
        "    UNROLL for (int k = 0; k < STEPS; ++k)", "unordered"),
    "both write": ("if (slice == 0 && place.y == 0)", "if (place.y == 0)", "write-write race"),
    "scores of a slice only": ("s < SLICES; ++s", "s < 1; ++s", None),
    "another slice's columns": ("8 * (first_query + t) + place.x", "8 * t + place.x", None),
    "another tile's scores": ("from = group - slice + s", "from = s", None),
}  # fmt: skip


def spoiled(found: str, replacement: str) -> Emulator:
    definition = ROWS_ATTENTION.definition
    part = "source" if found in definition["source"] else "header"
    assert found in definition[part]
    return Emulator(definition | {part: definition[part].replace(found, replacement)})


def assert_found(q: mx.array, context: Attended, cut: Parts, device: Emulator) -> None:
    """By the race, and beside float64."""
    with pytest.raises(AssertionError):
        assert_exact(launch(q, context, cut, check=False, first=device), q, context)
    with devices(device):
        right, rejected = Race("auto", M2).check([STOCK, cut], q, [context])
    assert set(right) == {STOCK}
    assert rejected[0].startswith(f"{name(cut)}: error ")


@needs_emulator
@pytest.mark.parametrize("packing", [(0, 0), (4, 32)])
def test_without_a_fault_nothing_is_found(packing: tuple[int, int]) -> None:
    q, context, cut = case(L=3, S=40, packing=packing)
    with devices():
        right, _ = Race("auto", M2).check([STOCK, cut], q, [context])
    assert set(right) == {STOCK, cut}


@needs_emulator
@pytest.mark.parametrize("fault", IN_HEADER)
def test_a_fault_in_unpacking_shows(fault: str) -> None:
    assert_found(*case(L=3, S=40, packing=(4, 32)), spoiled(*IN_HEADER[fault]))


@needs_emulator
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault: str) -> None:
    q, context, cut = case(L=3, S=90, sizes=SMALL)
    if "mask" in fault:
        context = context._replace(mask=mx.where(window_mask(3, 90, 90), 0.5, -mx.inf) * 2)
    assert_found(q, context, cut, spoiled(*FAULTS[fault]))


@needs_emulator
@pytest.mark.parametrize("fault", REPORTED)
def test_the_checker_reports(fault: str) -> None:
    found, replacement, report = REPORTED[fault]
    q, context, cut = case(L=3, S=90, sizes=SMALL)
    with pytest.raises(KernelError, match=report):
        launch(mx.contiguous(q), context, cut, first=spoiled(found, replacement))


@needs_emulator
@pytest.mark.parametrize("fault", IN_SLICES)
def test_a_fault_between_slices_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SLICE", 8)
    found, replacement, report = IN_SLICES[fault]
    q, context, cut = case(heads=8, L=3, S=40, sizes=SMALL)
    if report:
        with pytest.raises(KernelError, match=report):
            launch(q, context, cut, first=spoiled(found, replacement))
        return
    assert_found(q, context, cut, spoiled(found, replacement))


@needs_emulator
def test_a_last_bit_shows() -> None:
    """In bfloat16, where a value is float64's, rounded once."""
    q, context, cut = case(mx.bfloat16, L=3, S=90, sizes=SMALL)
    assert_exact(launch(q, context, cut), q, context)
    source = ROWS_MERGE.definition["source"]
    rounded = "static_cast<T>(total == 0.0f ? 0.0f : sum / total)"
    assert rounded in source
    flipped = f"as_type<T>(ushort(as_type<ushort>({rounded}) ^ (row == 1)))"
    second = Emulator(ROWS_MERGE.definition | {"source": source.replace(rounded, flipped)})
    with pytest.raises(AssertionError):
        assert_exact(launch(q, context, cut, second=second), q, context)

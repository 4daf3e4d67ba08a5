"""Several rows on the matrix units: against float64, in every schedule, and planted faults."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.metal.rows import (
    MAX_ROWS,
    ROWS_TILE,
    Matrix,
    Tile,
    rows_limits,
    rows_tile,
    tile_cuts,
)
from tests.msl import Emulator, KernelError
from tests.support.metal_device import (
    DTYPES,
    emulator,
    launch,
    needs_device,
    needs_emulator,
    normal,
    wide,
)
from tests.support.rows import matrix, product, rounding

pytestmark = pytest.mark.slow

AFFINE = [(bits, group, "affine") for bits in (3, 4, 5, 6, 8) for group in (32, 64, 128)]
OTHERS = [(0, 0, "affine"), (4, 32, "mxfp4"), (8, 32, "mxfp8"), (4, 16, "nvfp4")]
PACKINGS = [*AFFINE, *OTHERS]
Packing = tuple[int, int, str]


def assert_exact(y: mx.array, x: mx.array, weight: Matrix) -> None:
    """Each value is float64's, rounded once, give or take float32's rounding of the sum."""
    exact = product(x, weight)
    sizes = np.abs(wide(x)) @ np.abs(product(mx.eye(x.shape[1]).astype(mx.float32), weight))
    allowed = 1.01 * rounding(exact, y.dtype) + 2e-6 * sizes
    assert (np.abs(wide(y) - exact) <= allowed).all()


@needs_device
@pytest.mark.parametrize(("bits", "group", "mode"), PACKINGS)
def test_every_packing(bits: int, group: int, mode: str) -> None:
    """K fills the last chunk or half of it, N its last tile or not; the schedules agree."""
    dtype = DTYPES[(bits + group // 32) % 3]
    columns = 5 * 128 if group == 128 else 5 * 64 if group == 64 else 9 * 32
    weight = matrix((27, columns), bits, group, dtype, mode)
    x = normal((11, columns), dtype)
    forward, *others = [
        launch(ROWS_TILE, x, weight, Tile(2, 2), order=order)[0] for order in range(3)
    ]
    assert_exact(forward, x, weight)
    assert all(mx.array_equal(forward, other).item() for other in others)


@needs_device
@settings(max_examples=12, deadline=None)
@given(
    st.integers(2, MAX_ROWS),
    st.integers(8, 70),
    st.integers(1, 9),
    st.sampled_from([(4, 64, "affine"), (8, 32, "affine"), (0, 0, "affine")]),
    st.sampled_from([Tile(1, 4), Tile(2, 8), Tile(4, 4)]),
    st.integers(0, 2**31),
)
def test_any_size(M: int, N: int, groups: int, packing: Packing, cut: Tile, seed: int) -> None:
    mx.random.seed(seed)
    bits, group, mode = packing
    K = groups * (group or 32)
    weight, x = matrix((N, K), bits, group, mx.bfloat16, mode), normal((M, K), mx.bfloat16)
    assert_exact(launch(ROWS_TILE, x, weight, cut)[0], x, weight)


@needs_device
@pytest.mark.parametrize("packing", [(4, 64, "affine"), (5, 32, "affine"), (0, 0, "affine")])
def test_a_row_has_the_same_bits_whatever_rides_along(packing: Packing) -> None:
    bits, group, mode = packing
    weight, x = matrix((40, 640), bits, group, mx.float32, mode), normal((21, 640))
    whole = rows_of(x, weight)
    for rows in (2, 3, 8, 9, 16, 17):
        assert mx.array_equal(rows_of(x[:rows], weight), whole[:rows]).item()


def rows_of(x: mx.array, weight: Matrix) -> mx.array:
    return launch(ROWS_TILE, x, weight, Tile(2, 4), check=False)[0]


@needs_emulator
@pytest.mark.parametrize(
    "packing", [(3, 64, "affine"), (4, 64, "affine"), (4, 32, "mxfp4"), (0, 0, "affine")]
)
@pytest.mark.parametrize(("rows", "reads"), [(2, 1), (8, 1), (16, 1), (17, 2), (32, 2)])
def test_weights_are_read_once_per_16_rows(packing: Packing, rows: int, reads: int) -> None:
    bits, group, mode = packing
    weight, x = matrix((32, 256), bits, group, mx.float16, mode), normal((rows, 256), mx.float16)
    launch(ROWS_TILE, x, weight, Tile(4, 2))
    traffic = emulator(ROWS_TILE).traffic["weight"]
    assert traffic.touched == weight.weight.nbytes
    assert traffic.loaded == reads * weight.weight.nbytes


FAULTS = {  # what is planted: (text, what takes its place)
    "scale of another row": ("scales[at / GROUP]", "scales[(at + K) % (N * K) / GROUP]"),
    "no sums for the bias": ("+ bias[t] * row_sums[r][e]", ""),
    "bias sums of half the lanes": ("sum += simd_shuffle_xor(sum, 4);", ""),
    "off by one group": ("biases[at / GROUP]", "biases[max(at / GROUP, 1ul) - 1]"),
    "a row of x twice": ("8 * r + place.y + e, M - 1)", "8 * r + place.y, M - 1)"),
    "fields shifted": ("(runs[t], 8 * e + s)", "(runs[t], s)"),
    "a part is not added": ("p < SPLIT; ++p", "p + 1 < SPLIT; ++p"),
}  # fmt: skip
REPORTED = {
    "stale threadgroup memory": (
        "threadgroup_barrier(mem_flags::mem_threadgroup);", "", "read after unordered write",
    ),
    "rows past the last": ("M - 1);", "M);", "out-of-range load: x"),
    "outputs past the last": ("place.x, N - 1)", "place.x, N)", "out-of-range load: weight"),
    "columns past the last": ("FACTORED || run_column < K", "true", "out-of-range load: scales"),
    "a row not written": ("row < M &&", "row + 1 < M &&", "elements never written"),
    "parts overlap": ("p * 64 * NT * RT + i", "p * 64 * NT * RT + i + 64", "byte"),
}  # fmt: skip


def spoiled(found: str, replacement: str) -> Emulator:
    source = ROWS_TILE.definition["source"]
    assert found in source
    return Emulator(
        ROWS_TILE.definition | {"source": source.replace(found, replacement)}, check=True
    )


@needs_emulator
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault: str) -> None:
    weight, x = matrix((24, 256), 4, 64, mx.float32), normal((5, 256))
    (y,) = ROWS_TILE.launcher(spoiled(*FAULTS[fault]), x, weight, Tile(2, 2))
    with pytest.raises(AssertionError):
        assert_exact(y, x, weight)


@needs_emulator
def test_a_last_bit_shows() -> None:
    """In bfloat16, where a result is float64's, rounded once."""
    weight, x = matrix((24, 256), 4, 64, mx.bfloat16), normal((5, 256), mx.bfloat16)
    assert_exact(launch(ROWS_TILE, x, weight, Tile(2, 2))[0], x, weight)
    flipped = "as_type<T>(ushort(as_type<ushort>(static_cast<T>(total)) ^ (i == 0)));"
    device = spoiled("static_cast<T>(total);", flipped)
    (y,) = ROWS_TILE.launcher(device, x, weight, Tile(2, 2))
    with pytest.raises(AssertionError):
        assert_exact(y, x, weight)


@needs_emulator
@pytest.mark.parametrize("fault", REPORTED)
def test_the_checker_reports(fault: str) -> None:
    found, replacement, report = REPORTED[fault]
    weight, x = matrix((20, 96), 4, 32, mx.float32), normal((5, 96))
    with pytest.raises(KernelError, match=report):
        ROWS_TILE.launcher(spoiled(found, replacement), x, weight, Tile(2, 2))


@pytest.mark.parametrize(("bits", "group", "mode"), PACKINGS)
def test_without_a_cut_it_is_mlx(bits: int, group: int, mode: str) -> None:
    weight, x = matrix((24, 256), bits, group, mx.float32, mode), normal((3, 256))
    np.testing.assert_allclose(wide(rows_tile(x, weight)), product(x, weight), rtol=1e-4, atol=1e-3)


SERVED = normal((4, 128)), matrix((16, 128), 4, 64, mx.float32)
UNSERVED = {
    "1 rows; from 2 to 32 are served": (SERVED[0][:1], SERVED[1]),
    "rows of mlx.core.float16, scales of mlx.core.float32": (
        SERVED[0].astype(mx.float16),
        SERVED[1],
    ),
    "rows of mlx.core.float32, a weight of mlx.core.float16": (
        SERVED[0],
        Matrix(mx.zeros((16, 128), mx.float16)),
    ),
    "weights of 2 bits in groups of 64": (SERVED[0], matrix((16, 128), 2, 64, mx.float32)),
    "a weight of 7 x 128; it needs 8 outputs and a multiple of 32 columns": (
        SERVED[0],
        matrix((7, 128), 4, 64, mx.float32),
    ),
    "the weight has 3 axes": (SERVED[0], Matrix(mx.zeros((2, 16, 128)))),
}


def test_served() -> None:
    assert rows_limits(*SERVED) is None


@pytest.mark.parametrize("reason", UNSERVED)
def test_not_served(reason: str) -> None:
    assert rows_limits(*UNSERVED[reason]) == reason


def test_cuts_fit_the_device() -> None:
    for outputs in (8, 1024, 4096, 152064):
        cuts = tile_cuts(outputs)
        assert all(32 * c.split <= 512 and c.split * c.tiles * 2 * 256 <= 16384 for c in cuts)
        assert min(32 * c.split for c in cuts) == 128

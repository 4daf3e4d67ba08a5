"""Experts that several rows share: one row's bits, and weights read once per expert."""

import mlx.core as mx
import numpy as np
import pytest

from dspine_mlx.metal.experts import (
    CUTS,
    EXPERTS_EXACT,
    ExactExperts,
    Experts,
    experts_exact,
    experts_limits,
    gather,
    gather_apart,
)
from dspine_mlx.metal.rows import Matrix
from dspine_mlx.metal.rows_exact import Form
from dspine_mlx.target.products import APART
from dspine_mlx.target.race import Race
from tests.msl import Emulator, KernelError
from tests.support import mlx_one_row
from tests.support.metal_device import emulator, launch, needs_emulator, normal, wide
from tests.support.mlx_one_row import is_fast, one_row
from tests.support.racing import M2
from tests.support.rows import matrix, product

pytestmark = pytest.mark.slow

PACKINGS = [
    (4, 64, mx.bfloat16, "affine"), (8, 32, mx.float32, "affine"), (6, 64, mx.float16, "affine"),
    (4, 32, mx.bfloat16, "mxfp4"), (8, 32, mx.float32, "mxfp8"), (4, 16, mx.float16, "nvfp4"),
]  # fmt: skip
E, N = 5, 21
INDICES = [[0, 3], [3, 1], [3, 0], [4, 3], [3, 2]] * 8  # expert 3 has 40 pairs of 80


def case(bits: int = 4, group: int = 64, dtype: mx.Dtype = mx.float32, mode: str = "affine",
         whole: bool = True, rows: int = 5, shared: bool = True,
         ) -> tuple[mx.array, Experts, list[Matrix]]:  # fmt: skip
    """shared: a row for all of its experts."""
    mx.random.seed(bits + group)
    K = 512 if whole else 512 + 2 * group
    each = [matrix((N, K), bits, group, dtype, mode) for _ in range(E)]
    weight, scales = (mx.stack([m[i] for m in each]) for i in (0, 1))
    biases = mx.stack([m.biases for m in each]) if mode == "affine" else None
    indices = mx.array(INDICES[:rows], mx.uint32)
    experts = Experts(weight, scales, biases, group, bits, mode, indices)
    return normal((rows, 1 if shared else 2, 1, K), dtype), experts, each


def pairs_apart(x: mx.array, experts: Experts, each: list[Matrix]) -> mx.array:
    """MLX's own kernel for one row, from its text, for each pair of row and expert."""
    rows = [
        one_row(x[i, min(j, x.shape[1] - 1)], each[expert])
        for i, chosen in enumerate(experts.indices.tolist())
        for j, expert in enumerate(chosen)
    ]
    return mx.concatenate(rows).reshape(*experts.indices.shape, 1, N)


@needs_emulator
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("bits", "group", "dtype", "mode"), PACKINGS)
def test_pairs_have_the_bits_of_one_row(
    bits: int, group: int, dtype: mx.Dtype, mode: str, whole: bool
) -> None:
    x, experts, each = case(bits, group, dtype, mode, whole, shared=whole)
    one = pairs_apart(x, experts, each)
    cut = ExactExperts(Form(2 if is_fast(each[0]) else 1))
    for order in range(3):
        (y,) = launch(EXPERTS_EXACT, x, experts, cut, order=order)
        assert mx.array_equal(y, one).item()


@needs_emulator
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rows", [2, 16, 40])
def test_any_number_of_pairs(cut: tuple[int, int], rows: int) -> None:
    """Of one expert in several words of the list, too; no cut changes a bit."""
    x, experts, each = case(rows=rows)
    (y,) = launch(EXPERTS_EXACT, x, experts, ExactExperts(Form(2), *cut))
    assert mx.array_equal(y, pairs_apart(x, experts, each)).item()


@needs_emulator
def test_an_expert_is_read_once_for_the_rows_of_a_tile() -> None:
    """Where MLX reads it for every pair."""
    x, experts, _ = case(rows=5)
    launch(EXPERTS_EXACT, x, experts, ExactExperts(Form(2), 4))
    traffic, size = emulator(EXPERTS_EXACT).traffic["weight"], experts.weight.nbytes // E
    # experts 0 to 4 have 2, 1, 1, 5 and 1 pairs; the last outputs of a threadgroup are read thrice
    outputs = 24 / 21
    assert traffic.touched == 5 * size
    assert traffic.loaded == round(6 * size * outputs)
    assert traffic.loaded < 10 * size


FAULTS = {
    "another expert": ("static_cast<size_t>(expert) * N", "static_cast<size_t>(expert / 2) * N"),
    "another row": ("pair[m] / per", "pair[m] / per / 2"),
    "last bit": ("<T>(result);", "<T>(as_type<float>(as_type<uint>(result) ^ (first + o == 1)));"),
    "scale": ("(scales[at])", "(scales[max(at, 1ul) - 1])"),
    "no sums for the bias": ("(scale * dot + sum * bias)", "(scale * dot)"),
    "a group off by one": ("biases[at]", "biases[max(at, 1ul) - 1]"),
}
REPORTED = {
    "pairs made twice": ("if (left != 0) return;", "", "write-write race: y"),
    "a pair not stored": ("m < count)", "m + 1 < count)", "never written"),
}


def spoiled(found: str, replacement: str) -> Emulator:
    definition = EXPERTS_EXACT.definition
    part = "source" if found in definition["source"] else "header"
    assert found in definition[part]
    changed = {part: definition[part].replace(found, replacement)}
    return Emulator(definition | changed, check=True)


@needs_emulator
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the race, too."""
    x, experts, each = case()
    device, cut = spoiled(*FAULTS[fault]), ExactExperts(Form(2))
    (y,) = EXPERTS_EXACT.launcher(device, x, experts, cut)
    assert not mx.array_equal(y, pairs_apart(x, experts, each)).item()
    monkeypatch.setattr(mx, "gather_qmm", mlx_one_row.gather_qmm)
    for function, found in ((emulator(EXPERTS_EXACT), {APART, cut}), (device, {APART})):
        monkeypatch.setattr(EXPERTS_EXACT, "function", function)
        right, _ = Race("exact", M2).check([APART, cut], x, [experts])
        assert set(right) == found


@needs_emulator
@pytest.mark.parametrize("fault", REPORTED)
def test_the_checker_reports(fault: str) -> None:
    found, replacement, report = REPORTED[fault]
    x, experts, _ = case(rows=40)
    with pytest.raises(KernelError, match=report):
        EXPERTS_EXACT.launcher(spoiled(found, replacement), x, experts, ExactExperts(Form(2)))


@pytest.mark.parametrize("shared", [True, False])
def test_without_a_cut_it_is_mlx(shared: bool) -> None:
    x, experts, each = case(shared=shared)
    exact = np.stack([
        np.stack([product(x[i, min(j, x.shape[1] - 1)], each[e]) for j, e in enumerate(chosen)])
        for i, chosen in enumerate(experts.indices.tolist())
    ])  # fmt: skip
    for y in (experts_exact(x, experts), gather(x, experts), gather_apart(x, experts)):
        np.testing.assert_allclose(wide(y), exact, rtol=1e-4, atol=1e-3)


def test_limits() -> None:
    x, experts, _ = case()
    assert experts_limits(x, experts) is None
    unserved = {
        "x [5, 1, 1, 256] for experts of 21 x 512": (x[..., :256], experts),
        "x [4, 1, 1, 512] for indices [5, 2]": (x[:4], experts),
        "1 pairs of row and expert; from 2 to 512 are served": (
            x[:1], experts._replace(indices=experts.indices[:1, :1])),
        "rows of mlx.core.float16, scales of mlx.core.float32": (x.astype(mx.float16), experts),
    }  # fmt: skip
    for reason, (rows, of) in unserved.items():
        assert experts_limits(rows, of) == reason

"""Several rows with one row's bits: against MLX's own kernel text, in the forms compilers make."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.metal.rows import Matrix
from dspine_mlx.metal.rows_exact import (
    CUTS,
    ROWS_EXACT,
    Exact,
    Form,
    exact_limits,
    forms,
    rows_exact,
)
from dspine_mlx.target.race import Race
from tests.msl import Emulator, KernelError, toolchain
from tests.support import mlx_one_row
from tests.support.metal_device import emulator, launch, needs_emulator, needs_metal, normal, wide
from tests.support.mlx_one_row import is_fast, one_row
from tests.support.rows import matrix, product

pytestmark = pytest.mark.slow

PACKINGS = [
    (3, 64, mx.bfloat16, "affine"), (3, 128, mx.float16, "affine"), (4, 64, mx.bfloat16, "affine"),
    (4, 32, mx.float16, "affine"), (4, 128, mx.float32, "affine"), (5, 32, mx.float16, "affine"),
    (5, 128, mx.float32, "affine"), (6, 64, mx.bfloat16, "affine"), (6, 32, mx.float32, "affine"),
    (8, 64, mx.bfloat16, "affine"), (8, 32, mx.float32, "affine"), (8, 128, mx.float16, "affine"),
    (4, 32, mx.bfloat16, "mxfp4"), (8, 32, mx.float16, "mxfp8"), (4, 16, mx.bfloat16, "nvfp4"),
    (4, 32, mx.float32, "mxfp4"), (8, 32, mx.float32, "mxfp8"), (4, 16, mx.float32, "nvfp4"),
]  # fmt: skip
CASES = [(*packing, whole) for packing in PACKINGS for whole in (True, False)]


def case(
    bits: int, group: int, dtype: mx.Dtype, mode: str = "affine", whole: bool = True, M: int = 7
) -> tuple[mx.array, Matrix]:
    K = 512 if whole else 512 + max(group, 32)
    return normal((M, K), dtype), matrix((21, K), bits, group, dtype, mode)


def form_of(weight: Matrix) -> Form:
    return Form(2 if is_fast(weight) else 1)


@needs_emulator
@pytest.mark.parametrize(("bits", "group", "dtype", "mode", "whole"), CASES)
def test_rows_have_the_bits_of_one_row(
    bits: int, group: int, dtype: mx.Dtype, mode: str, whole: bool
) -> None:
    x, weight = case(bits, group, dtype, mode, whole)
    one = mx.concatenate([one_row(x[i : i + 1], weight) for i in range(len(x))])
    assert is_fast(weight) == whole
    for order in range(3):
        (y,) = launch(ROWS_EXACT, x, weight, Exact(form_of(weight)), order=order)
        assert mx.array_equal(y, one).item()


@needs_emulator
@settings(max_examples=10, deadline=None)
@given(
    st.integers(2, 32),
    st.integers(8, 50),
    st.integers(2, 20),
    st.sampled_from(CUTS),
    st.integers(0, 2**31),
)
def test_no_cut_changes_a_bit(M: int, N: int, groups: int, cut: tuple[int, int], seed: int) -> None:
    mx.random.seed(seed)
    K = 64 * (groups + (groups == 2))  # 128 columns have a kernel of their own in MLX
    x, weight = normal((M, K), mx.bfloat16), matrix((N, K), 4, 64, mx.bfloat16)
    (y,) = launch(ROWS_EXACT, x, weight, Exact(form_of(weight), *cut))
    assert mx.array_equal(y, one_row(x, weight)).item()


@needs_emulator
@pytest.mark.parametrize(
    "form", [Form(1), Form(2, wide=False), Form(2, fuse=1)], ids=["packs", "narrow", "fused"]
)
def test_another_form_has_other_bits(form: Form) -> None:
    """Else the tests above would prove nothing. Narrow sums are float32's own in float32."""
    x, weight = case(4, 64, mx.float32 if form.wide else mx.bfloat16, whole=True)
    (y,) = launch(ROWS_EXACT, x, weight, Exact(form))
    assert not mx.array_equal(y, one_row(x, weight)).item()
    exact = product(x, weight)
    np.testing.assert_allclose(wide(y), exact, atol=0.03 * np.abs(exact).max())


@needs_emulator
@pytest.mark.parametrize(
    ("contract", "bits", "group", "mode"),
    [(contract, bits, 64, "affine") for contract in ("off", "on", "fast") for bits in (4, 8)]
    # without fused multiply-adds the others are among CASES
    + [(contract, *packing) for contract in ("on", "fast")
       for packing in ((4, 32, "mxfp4"), (8, 32, "mxfp8"), (4, 16, "nvfp4"))],
)  # fmt: skip
def test_one_form_has_the_bits_whatever_the_compiler_fuses(
    contract: str, bits: int, group: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled without fused multiply-adds, with those of a statement, and of several."""
    flag = f"-ffp-contract={contract}"
    dialect = [flag if d == "-ffp-contract=off" else d for d in toolchain.DIALECT]
    assert flag in dialect
    monkeypatch.setattr(toolchain, "DIALECT", dialect)
    x, weight = case(bits, group, mx.float32, mode, M=3)
    stock = mlx_one_row.definition if mode == "affine" else mlx_one_row.float_definition
    one = one_row(x, weight, Emulator(stock(fast=True)))
    device = Emulator(ROWS_EXACT.definition)

    def has_the_bits(fuse: int) -> bool:
        cut = Exact(Form(2, fuse=fuse))
        return bool(mx.array_equal(ROWS_EXACT.launcher(device, x, weight, cut)[0], one))

    first = next(filter(has_the_bits, range(5)), None)
    assert first is not None
    if mode == "affine":
        assert (first == 0) == (contract != "fast")


@needs_emulator
@pytest.mark.parametrize(("cut", "reads"), [((4, 4), 2), ((4, 8), 2), ((8, 2), 1)])
def test_each_tile_of_rows_reads_the_weights_once(cut: tuple[int, int], reads: int) -> None:
    x, weight = normal((8, 512)), matrix((32, 512), 4, 64, mx.float32)
    launch(ROWS_EXACT, x, weight, Exact(Form(2), *cut))
    traffic = emulator(ROWS_EXACT).traffic["weight"]
    assert traffic.touched == weight.weight.nbytes
    assert traffic.loaded == reads * weight.weight.nbytes


@needs_metal
@pytest.mark.parametrize(("bits", "group", "dtype", "mode", "whole"), CASES)
def test_on_metal_a_form_has_the_bits_of_mlx(
    bits: int, group: int, dtype: mx.Dtype, mode: str, whole: bool
) -> None:
    """Against MLX's own product of one row, on the GPU at hand: the form that a race would find."""
    x, weight = case(bits, group, dtype, mode, whole)
    form = Race("exact").form(weight, x)
    assert form is not None
    assert mx.array_equal(rows_exact(x, weight, Exact(form)), rows_exact(x, weight)).item()


FAULTS = {  # the last bit flipped, another order, another row's scale, another row's sum
    "last bit": ("<T>(result);", "<T>(as_type<float>(as_type<uint>(result) ^ (first + o == 1)));"),
    "order of the units": ("u * BITS, weights", "(SPAN - UNIT - u) * BITS, weights"),
    "scale": ("(scales[at])", "(scales[max(at, 1ul) - 1])"),
    "sum of x": ("bias, sums[m]", "bias, sums[0]"),
    "no sums for the bias": ("(scale * dot + sum * bias)", "(scale * dot)"),
    "a group off by one": ("biases[at]", "biases[max(at, 1ul) - 1]"),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault: str) -> None:
    found, replacement = FAULTS[fault]
    texts = {part: ROWS_EXACT.definition[part] for part in ("header", "source")}
    assert any(found in text for text in texts.values())
    planted = {part: text.replace(found, replacement) for part, text in texts.items()}
    spoiled = Emulator(ROWS_EXACT.definition | planted)
    x, weight = case(4, 64, mx.float32, whole=True)
    (y,) = ROWS_EXACT.launcher(spoiled, x, weight, Exact(Form(2)))
    assert not mx.array_equal(y, one_row(x, weight)).item()


@needs_emulator
@pytest.mark.parametrize(
    ("found", "replacement", "report"),
    [
        ("first_row + m, M - 1)", "first_row + m, M)", "out-of-range load: x"),
        ("lane == 0 &&", "", "write-write race: y"),
        ("first_row + m < M)", "first_row + m + 1 < M)", "elements never written"),
    ],
)
def test_the_checker_reports(found: str, replacement: str, report: str) -> None:
    source = ROWS_EXACT.definition["source"]
    assert found in source
    definition = ROWS_EXACT.definition | {"source": source.replace(found, replacement)}
    x, weight = case(4, 64, mx.float32, whole=True)
    with pytest.raises(KernelError, match=report):
        ROWS_EXACT.launcher(Emulator(definition, check=True), x, weight, Exact(Form(2)))


def test_without_a_cut_rows_go_through_mlx_one_by_one() -> None:
    x, weight = case(4, 64, mx.float32, whole=True)
    np.testing.assert_allclose(
        wide(rows_exact(x, weight)), product(x, weight), rtol=1e-4, atol=1e-3
    )


def test_forms_begin_with_the_installed_mlx() -> None:
    (_, whole), (_, ragged) = (
        case(4, 64, mx.float32, whole=True),
        case(4, 64, mx.float32, whole=False),
    )
    assert forms(whole)[0] == Form(2)
    assert forms(ragged)[0] == Form(1)
    assert len(set(forms(whole))) == 20
    assert len(forms(case(8, 32, mx.float32, "mxfp8")[1])) == 10  # no sums of x


def test_limits() -> None:
    x = normal((3, 128))
    assert exact_limits(x, matrix((16, 128), 0, 0, mx.float32)) == "not packed"
    assert exact_limits(x, matrix((16, 128), 4, 64, mx.float32)) == (
        "a weight of 16 x 128, for which MLX has another kernel"
    )
    assert exact_limits(*case(4, 64, mx.float32, whole=True)) is None

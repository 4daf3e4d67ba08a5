"""Which kernels run: the check at first use, and what falls back."""

from typing import Any

import mlx.core as mx
import pytest

from dspine_mlx.errors import InputError
from dspine_mlx.metal.kernel import Arrays, Kernel, Kernels, largest_error


class Doubling(Kernel):
    """x -> [2x, number of x]; the launch is plain MLX, spoiled as told."""

    def __init__(self, factor: float = 2.0, fails: Exception | None = None, limit: str = ""):
        self.name, self.factor, self.fails, self.limit = "doubling", factor, fails, limit
        self.calls = self.reference_calls = 0
        self.reference = self._reference
        self.limits = lambda x: self.limit or None

    def _reference(self, x: mx.array) -> Arrays:
        self.reference_calls += 1
        return [(2 * x).astype(x.dtype), mx.array(x.size)]

    def launch(self, *args: Any) -> Arrays:
        self.calls += 1
        if self.fails:
            raise self.fails
        return [(self.factor * args[0]).astype(args[0].dtype), mx.array(args[0].size)]


def active() -> Kernels:
    kernels = Kernels("auto")
    kernels.active = True
    return kernels


def test_modes() -> None:
    assert not Kernels("off").active
    assert Kernels("auto").active == mx.metal.is_available()
    with pytest.raises(InputError, match="kernels is 'fast'; it must be 'auto' or 'off'"):
        Kernels("fast")


def test_off_runs_the_reference_and_records_nothing() -> None:
    kernels, kernel = Kernels("off"), Doubling()
    assert kernels.run(kernel, mx.array([1.0]))[0].tolist() == [2.0]
    assert kernel.calls == 0
    assert kernels.report() == {"mode": "off", "active": False, "checks": []}


def test_a_kernel_is_checked_once_per_shape_and_dtype() -> None:
    kernels, kernel = active(), Doubling()
    for n, dtype in ((3, mx.float32), (3, mx.float32), (4, mx.float32), (3, mx.float16)):
        x = mx.arange(n).astype(dtype)
        assert kernels.run(kernel, x)[0].tolist() == (2 * x).tolist()
    assert kernel.calls == 4 + 3
    assert kernel.reference_calls == 2 * 3
    checks = kernels.report()["checks"]
    assert [c["shapes"] for c in checks] == ["float32[3]", "float32[4]", "float16[3]"]
    assert all(c["runs"] and c["kernel"] == "doubling" for c in checks)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (Doubling(factor=2.01), "error 0.005, plain 0, allowed 0.002"),
        (Doubling(factor=float("nan")), "error inf"),
        (Doubling(fails=RuntimeError("Unable to build metal library\nline 2")), "Unable to build"),
        (Doubling(fails=ValueError("Thread group size (512) is greater")), "refused: Thread group"),
        (Doubling(limit="size 3 is odd"), "size 3 is odd"),
    ],
    ids=["inexact", "nan", "compiler", "driver", "limit"],
)
def test_a_kernel_that_fails_is_replaced(kernel: Doubling, reason: str) -> None:
    kernels = active()
    for _ in range(3):
        assert kernels.run(kernel, mx.array([1.0, 2.0, 3.0]))[0].tolist() == [2.0, 4.0, 6.0]
    assert kernel.calls <= 1
    (check,) = kernels.report()["checks"]
    assert not check["runs"]
    assert reason in check["reason"]


def test_the_bound_grows_with_the_plain_paths_own_error() -> None:
    """In bfloat16 the plain path is 2^-9 off at 1 + 2^-8: an error of twice that may pass."""

    class Rounding(Doubling):
        def _reference(self, x: mx.array) -> Arrays:
            return [x * mx.array(1.00390625, x.dtype), mx.array(x.size)]

    x = mx.array([1.0078125] * 4, mx.bfloat16)
    kernels, kernel = active(), Rounding(factor=1.0)
    kernels.run(kernel, x)
    (check,) = kernels.checks.values()
    assert check.runs == (0.00390625 / 1.01174 <= 2 * 0.00384 + 2e-3)


def test_integers_must_agree() -> None:
    one, two = mx.array([1, 2]), mx.array([1, 3])
    assert largest_error([one], [one]) == 0
    assert largest_error([one], [two]) == float("inf")


def test_errors_are_relative_to_the_largest_value() -> None:
    exact = mx.array([100.0, -1000.0])
    assert largest_error([exact + 1], [exact]) == pytest.approx(1e-3)

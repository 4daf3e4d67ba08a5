"""Kernels as a load prepares them: on MLX's own BLAS, with another, and checked."""

import math
from pathlib import Path

import mlx.nn as nn
import pytest

from dspine_mlx.target import equal_rows, row_kernels
from dspine_mlx.target.model import Target
from dspine_mlx.target.row_kernels import prepare
from tests.support.metal_device import without_metal
from tests.support.tiny import tiny_target


@pytest.fixture
def target() -> Target:
    """Quantised, with a tied head."""
    model = tiny_target()
    nn.quantize(model, group_size=32, bits=4)
    return Target(model)


def classes(target: Target) -> list[type]:
    return [type(m) for m in target.model.modules()]


@without_metal
def test_preparing_on_the_wheels_blas_races_nothing(target: Target, tmp_path: Path) -> None:
    """Whose several rows have plain decoding's bits; "off" and "auto" leave the target alone."""
    types = classes(target)
    for mode in ("off", "auto"):
        kernels = prepare(target, mode, range(2, 9), tmp_path)
        assert kernels.verdicts == {}
        with kernels.verifying(4):
            assert classes(target) == types
        assert kernels.digest == ""
        assert kernels.width_limit == math.inf
    assert list(tmp_path.iterdir()) == []


@without_metal
def test_preparing_an_exact_target_checks_it(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equal_rows, "DEPTHS", (8,))
    kernels = prepare(target, "exact", (2, 3, 4), None)
    assert kernels.checked == {2, 3, 4}
    assert kernels.unequal == {}
    assert kernels.width_limit == 4
    assert kernels.explain()[0].endswith("up to 4 rows, as checked.")


@without_metal
def test_preparing_with_an_optimised_blas(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The target is asked once; what it says decides which widths take part."""
    asked: list[frozenset[int]] = []

    def differing(_: Target, widths: frozenset[int]) -> frozenset[int]:
        asked.append(widths)
        return frozenset({8})

    monkeypatch.setattr(row_kernels, "blas_differs", lambda: True)
    monkeypatch.setattr(row_kernels, "differing_widths", differing)
    monkeypatch.setattr(row_kernels, "SECONDS", 1e9)
    kernels = prepare(target, "auto", (4, 8), tmp_path)
    assert asked == [frozenset({4, 8})]
    assert not kernels.lacks((4, 8))
    assert {v.why for (_, rows), v in kernels.verdicts.items() if rows == 4} == {
        "no kernel serves it"
    }
    assert all(v.seconds > 0 for (_, rows), v in kernels.verdicts.items() if rows == 8)
    assert prepare(target, "auto", (4, 8), tmp_path).verdicts == kernels.verdicts
    assert len(asked) == 1

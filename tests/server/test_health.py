"""What GET /health says of the rows of verify forwards."""

import mlx.nn as nn
import pytest

from dspine_mlx.server.health import in_use
from dspine_mlx.target.model import StockKernels, Target
from dspine_mlx.target.row_kernels import RowKernels
from tests.support.families import build
from tests.support.racing import CPU, Track


@pytest.mark.parametrize(
    ("mode", "kernels"),
    [
        ("auto", ["attention", "exact_experts", "tile"]),
        ("exact", ["exact", "exact_attention", "exact_experts"]),
    ],
)
def test_it_names_the_kernels_that_run(
    monkeypatch: pytest.MonkeyPatch, mode: str, kernels: list[str]
) -> None:
    track = Track(monkeypatch)
    model: nn.Module = build(
        "qwen3_moe", 4, hidden_size=256, moe_intermediate_size=256, head_dim=64
    )
    settled = RowKernels(Target(model), track.race(mode))
    settled.settle([4], seconds=1e9)
    assert in_use(settled) == kernels


def test_without_kernels_it_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_use(StockKernels()) == []
    track = Track(monkeypatch)
    exact = RowKernels(Target(build("qwen3", 4)), track.race("exact", CPU))
    exact.settle([4], seconds=1e9)
    assert in_use(exact) == []

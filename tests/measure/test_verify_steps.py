"""What rows of a verify forward cost, without and with the pair's kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn
import pytest

from dspine_mlx.cli import bench_steps
from dspine_mlx.cli.bench_steps import equal_texts, verify_steps
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.measure.compare import Models
from dspine_mlx.measure.verify_steps import VerifySteps, time_verify_steps
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.target.model import StockKernels
from dspine_mlx.verify_length.profile import StepTimer
from tests.support.tiny import tiny_dspine


class Quick(StockKernels):
    """Kernels with which a verify forward takes a tenth of its rows."""

    digest = "quick"

    def __init__(self, limit: float, promise: str = ""):
        self.width_limit, self.said = limit, promise

    def promise(self) -> str:
        return self.said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time; a verify forward moves it by its number of rows. No forward runs."""
    now = [0.0]

    def verify(self: StepTimer, width: int) -> None:
        now[0] += width / 10 if isinstance(self.kernels, Quick) else width

    monkeypatch.setattr(StepTimer, "verify", verify)
    return now


@pytest.fixture
def drafter(model: nn.Module) -> Drafter:
    """With 7 proposals, or 15 copied tokens."""
    return tiny_dspine(model)


def timed(drafter: Drafter, clock: list[float]) -> VerifySteps:
    return time_verify_steps(drafter, lambda: clock[0])


def test_stock_alone(drafter: Drafter, clock: list[float]) -> None:
    steps = timed(drafter, clock)
    assert steps.stock == pytest.approx({1: 1, 2: 2, 4: 4, 8: 8, 16: 16})
    assert steps.kernels == {}


def test_both_in_turn(drafter: Drafter, clock: list[float]) -> None:
    """And in exact mode, only the widths that may be verified."""
    drafter.target.verify_kernels = Quick(4)
    steps = timed(drafter, clock)
    assert steps.stock == pytest.approx({1: 1, 2: 2, 4: 4, 8: 8, 16: 16})
    assert steps.kernels == pytest.approx({1: 0.1, 2: 0.2, 4: 0.4})


def test_the_forward_runs_with_the_kernels(drafter: Drafter) -> None:
    seen: list[int] = []

    class Watched(Quick):
        @contextmanager
        def verifying(self, rows: int) -> Iterator[None]:
            seen.append(rows)
            yield

    drafter.target.verify_kernels = Watched(2)
    steps = time_verify_steps(drafter)
    assert seen == [1, 2] * (len(seen) // 2)
    assert len(seen) >= 8
    assert min(*steps.stock.values(), *steps.kernels.values()) > 0


# ---- what bench says


def result(same: int | None, interrupted: bool = False) -> dict[str, Any]:
    identical = {"plain": 10, "mlx-lm-draft:x": 3, "auto": same, "fixed:4": same}
    rows = [{"way": mode, "texts": 10, "identical": n} for mode, n in identical.items()]
    return {"ways": rows, "interrupted": interrupted}


def test_only_our_drafted_texts_are_counted() -> None:
    assert equal_texts([result(10), result(9)]) == [38, 40]
    assert equal_texts([result(None)]) is None  # sampled


@pytest.mark.parametrize(
    ("kernels", "same", "broken"),
    [(Quick(4, "Up to 4."), 10, 0), (Quick(4, "Up to 4."), 9, 1), (StockKernels(), 9, 0)],
    ids=["exact", "exact but not equal", "auto"],
)
def test_the_promise_is_said_and_judged(
    drafter: Drafter,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kernels: StockKernels,
    same: int,
    broken: int,
) -> None:
    drafter.target.verify_kernels = kernels
    monkeypatch.setattr(bench_steps, "time_verify_steps", lambda pair: timed(pair, clock))
    models = Models(drafter.target.model, None, drafter, Sampler())
    found = verify_steps(models, [result(same)])
    said = capsys.readouterr().out
    assert kernels.promise() in said
    assert f"{2 * same} of 20 drafted texts are plain decoding's." in said
    assert said.count("That breaks the promise of --kernels exact") == broken
    lines = [line.split() for line in said.splitlines()]
    assert ["MLX's", "products", "1.00", "2.00", "4.00", "8.00", "16.00"] in lines
    ours = ["with", "kernels", "0.10", "0.20", "0.40", "-", "-"]
    assert (ours in lines) == isinstance(kernels, Quick)
    assert found["promise_broken"] == bool(broken)
    assert found["equal_texts"] == [2 * same, 20]
    assert found["promise"] == kernels.promise()
    assert found["verify_steps"]["stock"][4] == pytest.approx(4)


def test_who_stops_waits_for_nothing(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models(drafter.target.model, None, drafter, Sampler())
    assert verify_steps(models, [result(10, interrupted=True)]) == {}
    assert verify_steps(models, []) == {}

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_steps, "time_verify_steps", interrupted)
    assert verify_steps(models, [result(10)]) == {}
    without = Models(drafter.target.model, None, None, Sampler())
    assert verify_steps(without, [result(10)]) == {}

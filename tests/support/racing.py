"""A race without a GPU: plain MLX stands in for kernels, and the clock is fake."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from dspine_mlx.metal import rows, rows_exact
from dspine_mlx.metal.attention import Attended, Parts, attend
from dspine_mlx.metal.exact_attention import AsHeads, ExactAttention, attend_apart
from dspine_mlx.metal.experts import ExactExperts, Experts, gather, gather_apart
from dspine_mlx.metal.rows import ROWS_TILE, Matrix, Tile
from dspine_mlx.metal.rows_exact import ROWS_EXACT
from dspine_mlx.target import attention_race, products, race, row_experts
from dspine_mlx.target.race import Machine, Race
from dspine_mlx.target.row_kernels import RowKernels
from dspine_mlx.target.verdicts import Shape, Verdicts
from tests.msl import Emulator

M2 = Machine(metal=True, architecture="applegpu_g14s")
M5 = Machine(metal=True, architecture="applegpu_g17g")
CPU = Machine(metal=False, architecture="x86_64")
OPEN_BLAS = Machine(metal=False, architecture="x86_64", differing=frozenset({4, 8}))
Cost = Callable[[int], float]  # seconds of the nth call


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cut of each kernel, on one layer of a shape, once: the emulator compiles each cut."""
    for limit in ("REPEATS", "CHECKED", "TIMED_BYTES"):
        monkeypatch.setattr(race, limit, 1)
    monkeypatch.setattr(race, "tile_cuts", lambda outputs: (Tile(2, 8),))
    monkeypatch.setattr(race, "CUTS", ((4, 4),))
    monkeypatch.setattr(row_experts, "CUTS", ((2, 4),))
    monkeypatch.setattr(attention_race, "ROWS", (4,))


class Kernel:
    """What `mx.fast.metal_kernel` would have made: it multiplies, takes its time, and may spoil
    the output or refuse the launch."""

    def __init__(self, track: "Track", seconds: Cost):
        self.track, self.seconds = track, seconds
        self.calls = 0
        self.spoil: Callable[[mx.array, int], mx.array] = lambda y, _: y
        self.threads = 1024  # that the driver allows
        self.device: Emulator | None = None  # runs the kernel's own text

    def __call__(self, *, inputs: list[Any], threadgroup: Any, template: Any, **launch: Any) -> Any:
        if threadgroup[0] > self.threads:
            raise ValueError(f"Thread group size ({threadgroup[0]}) is greater than the maximum")
        self.calls += 1
        self.track.now += self.seconds(self.calls)
        if self.device is not None:
            (y,) = self.device(inputs=inputs, threadgroup=threadgroup, template=template, **launch)
            return [self.spoil(y, self.calls)]
        sizes, (x, weight, scales, biases) = dict(template), inputs
        matrix = Matrix(weight, scales, biases, sizes["GROUP"], sizes["BITS"])
        y = rows.multiply(x, matrix if sizes["BITS"] else Matrix(weight))
        return [self.spoil(y, self.calls)]


class Attention:
    """In the place of a kernel's call: it takes its time, and MLX does its work unless it is
    real."""

    def __init__(self, track: "Track", seconds: float):
        self.track, self.seconds = track, seconds
        self.calls = 0
        self.real = False
        self.spoil: Callable[[Any, mx.array, Attended], mx.array] = lambda cut, y, _: y

    def patch(self, monkeypatch: pytest.MonkeyPatch, cut: Any) -> None:
        launch = cut.__call__

        def called(made: Any, queries: mx.array, attended: Attended) -> mx.array:
            self.calls += 1
            self.track.now += self.seconds
            mlx = gather if isinstance(attended, Experts) else attend_apart
            y = launch(made, queries, attended) if self.real else mlx(queries, attended)
            return self.spoil(made, y, attended)

        monkeypatch.setattr(cut, "__call__", called)


class Track:
    """The clock of a race. stock: seconds of MLX's product or attention of several rows; tile,
    exact, parts, exact_attention: of the kernels; row: of one of the rows that are multiplied, or
    attend, one by one. Contexts that are raced are short."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stock: float = 1.0, row: float = 1.0):
        self.now, self.stock, self.row = 0.0, stock, row
        self.tile = Kernel(self, lambda _: 0.5)
        self.tile.spoil = lambda y, _: y * (1 + 2**-22)  # right, with other bits
        self.exact = Kernel(self, lambda _: 0.6)
        self.spoil_stock: Callable[[mx.array], mx.array] = lambda y: y
        monkeypatch.setattr(ROWS_TILE, "function", self.tile)
        monkeypatch.setattr(ROWS_EXACT, "function", self.exact)
        monkeypatch.setattr(products, "multiply", self.timed("stock"))
        monkeypatch.setattr(rows_exact, "multiply", self.timed("row"))
        self.parts = Attention(self, 0.5)
        self.parts.spoil = lambda cut, y, _: y * (1 + 2**-22)
        self.parts.patch(monkeypatch, Parts)
        self.exact_attention = Attention(self, 0.6)
        self.exact_attention.patch(monkeypatch, ExactAttention)
        self.as_heads = Attention(self, 0.8)
        self.as_heads.patch(monkeypatch, AsHeads)
        self.experts = Attention(self, 0.7)
        self.experts.patch(monkeypatch, ExactExperts)
        for function, seconds in ((gather, lambda rows: self.stock),
                                  (gather_apart, lambda rows: self.row * rows)):  # fmt: skip
            monkeypatch.setattr(
                products, function.__name__, self.attending(function, seconds, axis=0)
            )
        monkeypatch.setattr(products, "attend", self.attending(attend, lambda rows: self.stock))
        monkeypatch.setattr(
            products, "attend_apart", self.attending(attend_apart, lambda rows: self.row * rows)
        )
        monkeypatch.setattr(attention_race, "LONG", (256, 1024))
        monkeypatch.setattr(attention_race, "EXACT", (1, 64, 128))
        monkeypatch.setattr(attention_race, "COPIES", 2)

    def __call__(self) -> float:
        return self.now

    def products(self, kernels: RowKernels) -> Verdicts:
        """The verdicts on linear layers."""
        return {key: v for key, v in kernels.verdicts.items() if isinstance(key[0], Shape)}

    def timed(self, kind: str) -> Callable[[mx.array, Matrix], mx.array]:
        def multiply(x: mx.array, matrix: Matrix) -> mx.array:
            self.now += getattr(self, kind)
            y = rows.multiply(x, matrix)
            return self.spoil_stock(y) if kind == "stock" else y

        return multiply

    def attending(
        self, function: Callable[..., mx.array], seconds: Callable[[int], float], axis: int = 2
    ) -> Callable[..., mx.array]:
        def attend(queries: mx.array, attended: Attended) -> mx.array:
            self.now += seconds(queries.shape[axis])
            y = function(queries, attended)
            return self.spoil_stock(y) if function.__name__ == "attend" else y

        return attend

    def race(self, mode: str = "auto", machine: Machine = M2, **options: Any) -> Race:
        return Race(mode, machine, self, **options)

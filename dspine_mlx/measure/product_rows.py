"""Products of 1 to 16 rows, timed by themselves: MLX's, and both kernels for verify rows.

Every candidate of a race at load is checked and timed, whatever would win. No drafter takes part.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx

from dspine_mlx.errors import InputError
from dspine_mlx.metal.rows import Matrix, Tile, tile_cuts
from dspine_mlx.metal.rows_exact import CUTS, Exact, exact_limits, forms
from dspine_mlx.target.model import Target
from dspine_mlx.target.products import STOCK, Product, name
from dspine_mlx.target.race import CHECKED, HOPELESS, TIMED_BYTES, Machine, Race
from dspine_mlx.target.row_kernels import RowKernels
from dspine_mlx.target.verdicts import Shape

ROWS = (1, 2, 4, 8, 16)
SECONDS = 60.0  # after about this long no further shape is begun
KINDS = {"stock": type(STOCK), "exact": Exact, "tile": Tile}
TYPICAL = (  # outputs, columns, bits: layers of an 8B model, then of a 27B model
    (4096, 4096, 4),
    (12288, 4096, 4),
    (4096, 12288, 4),
    (17408, 5120, 4),
    (17408, 5120, 8),
    (17408, 5120, 0),  # not packed
)
GROUP, DTYPE = 64, mx.bfloat16  # of typical layers


class Group(NamedTuple):
    """Layers of one shape: their number, and weights to multiply by, made when asked for."""

    shape: Shape
    layers: int
    matrices: Callable[[], list[Matrix]]


@dataclass(frozen=True)
class Timed:
    """The fastest right cut of one kind of product. exact: it has the bits of MLX's product of one
    row."""

    product: str
    seconds: float
    exact: bool


@dataclass
class ShapeTimes:
    """Times of one shape by number of rows and kind of product, and why others are missing."""

    shape: Shape
    layers: int
    rows: dict[int, dict[str, Timed]] = field(default_factory=dict)
    rejected: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"shape": self.shape._asdict()}


def groups_of(target: Target) -> list[Group]:
    """The linear layers of a target by shape, its LM head included."""

    def weights(layers: Sequence[Any]) -> Callable[[], list[Matrix]]:
        return lambda: [Matrix.of(layer) for layer in layers]

    shapes = RowKernels(target).shapes
    return [Group(shape, len(layers), weights(layers)) for shape, layers in shapes.items()]


def typical_groups() -> list[Group]:
    """Shapes of common targets, with random weights. As many layers as no cache holds."""

    def weights(outputs: int, columns: int, bits: int) -> Callable[[], list[Matrix]]:
        def make() -> list[Matrix]:
            first = random_matrix(outputs, columns, bits, seed=0)
            count = -(-TIMED_BYTES // first.nbytes)
            return [first, *(random_matrix(outputs, columns, bits, s) for s in range(1, count))]

        return make

    dtype = str(DTYPE).removeprefix("mlx.core.")
    return [
        Group(Shape(n, k, bits, GROUP if bits else 0, "affine", dtype), 0, weights(n, k, bits))
        for n, k, bits in TYPICAL
    ]


def random_matrix(outputs: int, columns: int, bits: int, seed: int) -> Matrix:
    """A weight whose products of normal rows are about 1 in size."""
    key, other = mx.random.split(mx.random.key(seed))
    size = columns**-0.5
    if not bits:
        return Matrix(size * mx.random.normal((outputs, columns), DTYPE, key=key))
    halves = mx.random.randint(0, 1 << 16, (outputs, columns * bits // 16), mx.uint16, key=key)
    step = 3.5 * size / 2**bits  # evenly spread over +- 1.75 sizes: a standard deviation of one
    scales = step * mx.random.uniform(0.5, 1.5, (outputs, columns // GROUP), key=other)
    biases = -0.5 * (2**bits - 1) * scales
    weight, scales, biases = halves.view(mx.uint32), scales.astype(DTYPE), biases.astype(DTYPE)
    return Matrix(weight, scales, biases, GROUP, bits)


def time_groups(
    groups: Iterable[Group],
    rows: Sequence[int] = ROWS,
    clock: Callable[[], float] = time.perf_counter,
    seconds: float = SECONDS,
) -> Iterator[list[ShapeTimes]]:
    """Time every group, and yield what there is so far; shapes left when the time is up are
    skipped."""
    machine = Machine.here()
    if not machine.metal:
        raise InputError("--rows times kernels for Apple GPUs; there is no Metal on this machine")
    timer, begun = Timer(machine, clock), clock()
    done: list[ShapeTimes] = []
    for group in groups:
        if done and clock() - begun > seconds:
            return
        done = [*done, timer.time_group(group, rows)]
        yield done


class Timer:
    """Checks and times candidates as races do. Forms of exact products are sought as in exact
    mode, whose race does not stop at the likely ones."""

    def __init__(self, machine: Machine, clock: Callable[[], float]):
        self.race = Race("auto", machine, clock, newest=True)
        self.exact = Race("exact", machine, clock)

    def time_group(self, group: Group, rows: Sequence[int]) -> ShapeTimes:
        matrices = group.matrices()
        mx.eval([part for matrix in matrices for part in matrix if isinstance(part, mx.array)])
        dtype = getattr(mx, group.shape.dtype)
        found = ShapeTimes(group.shape, group.layers)
        for count in rows:
            key = mx.random.key(count)
            x = mx.random.normal((count, group.shape.columns), key=key).astype(dtype)
            found.rows[count], rejected = self.time_rows(x, matrices)
            found.rejected += [f"{count} rows, {reason}" for reason in rejected]
        return found

    def time_rows(
        self, x: mx.array, matrices: Sequence[Matrix]
    ) -> tuple[dict[str, Timed], list[str]]:
        entrants = self.candidates(x, matrices[0])
        right, rejected = self.race.check(entrants, x, matrices[:CHECKED])
        seconds = {p: median(s) for p, s in self.race.times(list(right), x, matrices).items()}
        slow = f"more than {HOPELESS:g} times as slow as stock"
        rejected += [f"{name(product)}: {slow}" for product in right if product not in seconds]
        best = {}
        for kind, cls in KINDS.items():
            cuts = [product for product in seconds if isinstance(product, cls)]
            if cuts:
                product = min(cuts, key=lambda cut: seconds[cut])
                best[kind] = Timed(name(product), seconds[product], right[product])
        return best, rejected

    def candidates(self, x: mx.array, matrix: Matrix) -> list[Product]:
        if len(x) == 1:
            return [STOCK]
        exact: list[Product] = []
        if exact_limits(x, matrix) is None:
            form = self.exact.form(matrix, x) or forms(matrix)[0]
            exact = [Exact(form, *cut) for cut in CUTS]
        tiles = [cut for cut in tile_cuts(matrix.shape[0]) if cut.limits(x, matrix) is None]
        return [STOCK, *exact, *tiles]

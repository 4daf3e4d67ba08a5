"""Which product multiplies how many rows: settled by a race on the user's machine.

Correctness comes first: a candidate whose values are off, or vary between calls, is out whatever
its time. So is one that the driver refuses. What is not raced is left to MLX.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import mlx.core as mx

from dspine_mlx.errors import InputError
from dspine_mlx.metal.attention import Attended, attend
from dspine_mlx.metal.exact_attention import attend_apart
from dspine_mlx.metal.experts import Experts, gather, gather_apart
from dspine_mlx.metal.rows import Matrix, multiply, tile_cuts
from dspine_mlx.metal.rows_exact import CUTS, FUSIONS, Exact, Form, apart, exact_limits, forms
from dspine_mlx.target.products import APART, STOCK, UNPACKED, Product, name

MODES = ("auto", "exact", "off")
GAIN = 0.97  # of stock's time: a smaller gain is noise, and a tie goes to the better bits
STEADY = 0.75  # of the repeats in which a candidate must be that much faster
REPEATS = 5
HOPELESS = 2.0  # times stock's time in the first repeat: not repeated
CHECKED = 4  # layers of a shape on which values are compared
TIMED_BYTES = 1 << 27  # bytes of weights multiplied in turn: more than a cache holds
SLACK = 2e-5  # of the largest value: difference between two orders of a long float32 sum


@dataclass(frozen=True)
class Machine:
    """The facts that decide which candidates there are.

    architecture: MLX's name for the chip ("applegpu_g14s"), or of a CPU. differing: on a CPU, the
    numbers of rows at which MLX gives one of them other bits than alone, as an optimised BLAS does.
    """

    metal: bool
    architecture: str
    differing: frozenset[int] = frozenset()

    @classmethod
    def here(cls, differing: frozenset[int] = frozenset()) -> "Machine":
        metal = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
        return cls(metal, str(mx.device_info()["architecture"]), differing)

    @property
    def generation(self) -> int:
        """Apple GPU generation: 13 for the M1, 17 for the M5; 0 for anything else."""
        digits = self.architecture.removeprefix("applegpu_g")[:2]
        return int(digits) if self.metal and digits.isdecimal() else 0


@dataclass(frozen=True)
class Verdict:
    """The product for one shape and number of rows, and why. Seconds: of one product; 0: not
    timed. one_row: of MLX's product of a single row."""

    product: Product
    why: str
    seconds: float = 0.0
    stock: float = 0.0
    rejected: tuple[str, ...] = ()  # candidates that were wrong or refused, and why
    one_row: float = 0.0


class Race:
    """Races for the shapes of one target.

    mode "auto": a candidate's error against float32 is at most twice stock's, and the fastest
    wins; where two are within 3 %, one with plain decoding's bits, then stock. "exact": only
    products with the bits of MLX's product of one row take part. "off": nothing is raced. On the M5
    and later, MLX has better kernels for several rows, so "auto" leaves them to it unless `newest`.
    """

    def __init__(
        self,
        mode: str = "auto",
        machine: Machine | None = None,
        clock: Callable[[], float] = time.perf_counter,
        newest: bool = False,
    ):
        if mode not in MODES:
            raise InputError(f"kernels is {mode!r}; it must be 'auto', 'exact' or 'off'")
        self.mode, self.clock, self.newest = mode, clock, newest
        self.machine = machine or Machine.here()
        self.forms: dict[tuple[Any, ...], Form | None] = {}

    @property
    def idle(self) -> str:
        """Why nothing is raced, or ""."""
        if self.mode == "off":
            return "kernels are off"
        if self.mode == "exact":
            return ""
        if self.machine.metal and self.machine.generation >= 17 and not self.newest:
            return "MLX's own kernels serve several rows on this chip"
        if not self.machine.metal and not self.machine.differing:
            return "no Metal"
        return ""

    @property
    def baseline(self) -> Product:
        """The product that is correct by definition: MLX's for all rows, or in exact mode for
        each."""
        return APART if self.mode == "exact" else STOCK

    def verdict(self, matrices: Sequence[Matrix], rows: int, dtype: mx.Dtype) -> Verdict:
        """Race for layers of one shape, the target's own, with `rows` rows of a dtype."""
        if self.idle:
            return Verdict(STOCK, self.idle)
        x = mx.random.normal((rows, matrices[0].shape[1]), key=mx.random.key(rows)).astype(dtype)
        entrants = self.candidates(matrices[0], x)
        if entrants == [STOCK]:
            return Verdict(STOCK, "no kernel serves it")
        right, rejected = self.check(entrants, x, matrices[:CHECKED])
        seconds = self.times(list(right), x, matrices)
        (one_row,) = self.times([STOCK], x[:1], matrices).values()
        verdict = self.choose(right, seconds, tuple(rejected))
        return replace(verdict, one_row=median(one_row))

    def candidates(self, matrix: Matrix, x: mx.array) -> list[Product]:
        products: list[Product] = [STOCK]
        if self.mode == "exact":
            products.append(APART)
        if not self.machine.metal:
            differs = self.mode == "auto" and x.shape[0] in self.machine.differing
            serves = differs and UNPACKED.limits(x, matrix) is None
            return [*products, UNPACKED] if serves else products
        if exact_limits(x, matrix) is None:
            form = self.form(matrix, x)
            if form is None and self.mode == "auto":
                form = forms(matrix)[0]  # correct if not exact: it takes part like any other
            products += [Exact(form, *cut) for cut in CUTS] if form else []
        if self.mode == "auto":
            cuts = tile_cuts(matrix.shape[0])
            products += [cut for cut in cuts if cut.limits(x, matrix) is None]
        return products

    def form(self, matrix: Matrix, x: mx.array) -> Form | None:
        """The form with the bits of MLX's product of one row, or None; found once per packing.

        It is found in float32, where a wrong form shows in most values; rounding to bfloat16 hides
        it in all but a few.
        """
        packing = (matrix.mode, matrix.bits, matrix.group_size)
        key = (*packing, matrix.shape[1] % 512 == 0, x.dtype)
        if key not in self.forms:
            found = forms(matrix)
            tried = found if self.mode == "exact" else found[: len(FUSIONS)]
            self.forms[key] = next((f for f in tried if self.has_form(f, matrix, x)), None)
        return self.forms[key]

    def has_form(self, form: Form, matrix: Matrix, x: mx.array) -> bool:
        product = Exact(form)
        try:
            return all(
                same_bits(product(rows, weight), apart(rows, weight))
                for rows, weight in ((x[:2].astype(mx.float32), widened(matrix)), (x[:2], matrix))
            )
        except (RuntimeError, ValueError):  # refused by the driver
            return False

    def check(
        self, entrants: list[Product], x: mx.array, matrices: Sequence[Any]
    ) -> tuple[dict[Product, bool], list[str]]:
        """Check values. Returns the products that pass, and whether each has plain decoding's bits;
        and what was wrong with the others."""
        right: dict[Product, bool] = {}
        rejected = []
        wanted = [Wanted(x, matrix) for matrix in matrices]
        for product in entrants:
            try:
                outputs = [product(x, matrix) for matrix in matrices]
                again = [product(x, matrix) for matrix in matrices]
                flaps = [not same_bits(a, b, nan=True) for a, b in zip(outputs, again, strict=True)]
                exact = all(w.has_bits(y) for w, y in zip(wanted, outputs, strict=True))
                faults = [w.fault(y) for w, y in zip(wanted, outputs, strict=True)]
            except (RuntimeError, ValueError) as refusal:  # the driver's, compiling or launching
                rejected.append(f"{name(product)}: refused: {str(refusal).splitlines()[0]}")
                continue
            if self.mode == "exact":
                faults = [] if exact else ["not the bits of one row"]
            if any(flaps):
                faults.insert(0, "its values vary from call to call")
            fault = next(filter(None, faults), "")
            if not fault or product == self.baseline:
                right[product] = exact
            else:
                rejected.append(f"{name(product)}: {fault}")
        return right, rejected

    def times(
        self, products: list[Product], x: mx.array, matrices: Sequence[Any]
    ) -> dict[Product, list[float]]:
        """Time one product each, in interleaved repeats, of those that are not hopeless."""
        some = enough(matrices)
        seconds: dict[Product, list[float]] = {product: [] for product in products}
        for _ in range(REPEATS):
            for product in seconds:
                begun = self.clock()
                mx.eval([product(x, matrix) for matrix in some])
                seconds[product].append((self.clock() - begun) / len(some))
            baseline = seconds[plain(products)][0]
            seconds = {p: s for p, s in seconds.items() if s[0] <= HOPELESS * baseline}
        return seconds

    def choose(
        self,
        right: dict[Product, bool],
        seconds: dict[Product, list[float]],
        rejected: tuple[str, ...],
    ) -> Verdict:
        base = plain(right)
        allowed = {
            p: median(s) for p, s in seconds.items() if p == base or is_faster(s, seconds[base])
        }
        fastest = min(allowed.values())
        ties = [p for p, s in allowed.items() if GAIN * s <= fastest]
        best = max(ties, key=lambda p: (right[p], p == base, -allowed[p]))
        why = "faster" if best != base else "nothing else is steadily faster"
        return Verdict(best, why, allowed[best], allowed[base], rejected)


class Wanted:
    """The reference for products of x and a matrix, or experts, or for attention of queries x."""

    def __init__(self, x: mx.array, matrix: Any):
        stock, one_by_one = functions(matrix)
        self.one_row = one_by_one(x, matrix)
        self.truth = stock(x.astype(mx.float32), widened(matrix))
        self.largest = mx.abs(self.truth).max()
        self.stock = self.error(stock(x, matrix))

    def error(self, y: mx.array) -> float:
        return (mx.abs(y.astype(mx.float32) - self.truth).max() / self.largest).item()

    def has_bits(self, y: mx.array) -> bool:
        return same_bits(y, self.one_row)

    def fault(self, y: mx.array) -> str:
        error = self.error(y)
        if error <= 2 * self.stock + SLACK:  # False for NaN
            return ""
        return f"error {error:.2g}, stock has {self.stock:.2g}"


def functions(matrix: Any) -> tuple[Callable[..., mx.array], Callable[..., mx.array]]:
    """MLX's function for all rows, and row by row."""
    if isinstance(matrix, Attended):
        return attend, attend_apart
    return (gather, gather_apart) if isinstance(matrix, Experts) else (multiply, apart)


def plain(products: Collection[Product]) -> Product:
    """The product that others are measured against: stock, or rows one by one where stock has other
    bits."""
    return STOCK if STOCK in products else APART


def is_faster(seconds: list[float], than: list[float]) -> bool:
    """Whether it is faster by 3 % in the median, and steadily: in three quarters of the repeats."""
    wins = sum(s < GAIN * t for s, t in zip(seconds, than, strict=True))
    return median(seconds) < GAIN * median(than) and wins >= STEADY * len(seconds)


def same_bits(a: mx.array, b: mx.array, nan: bool = False) -> bool:
    """Whether all values are equal. nan: NaNs count as equal."""
    return mx.array_equal(a, b, equal_nan=nan).item()


def widened(matrix: Any) -> Any:
    """The same weights, or keys and values, for rows of float32."""
    if isinstance(matrix, Attended | Experts):
        return matrix.widened()
    if matrix.scales is None:
        return Matrix(matrix.weight.astype(mx.float32))
    if matrix.biases is None:  # scales are small floats, whatever the rows' dtype
        return matrix
    scales, biases = (a.astype(mx.float32) for a in (matrix.scales, matrix.biases))
    return matrix._replace(scales=scales, biases=biases)


def enough(matrices: Sequence[Any]) -> list[Any]:
    """The first matrices that together exceed any cache, or all if they don't."""
    some: list[Any] = []
    size = 0
    for matrix in matrices:
        some.append(matrix)
        size += matrix.nbytes
        if size >= TIMED_BYTES:
            break
    return some

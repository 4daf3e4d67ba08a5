"""Metal kernels with plain-MLX references: checked at first use, replaced where they fail."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from dspine_mlx.errors import InputError

Arrays = list[mx.array]


class Lookup(NamedTuple):
    """Rows of a matrix [V, d] by index, read in place.

    The matrix is floating, or packed by MLX's affine quantisation (bits > 0).
    """

    rows: mx.array  # [...] indices
    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    group_size: int = 0
    bits: int = 0

    def take(self) -> mx.array:
        """The rows: [..., d]."""
        if self.scales is None or self.biases is None:
            return self.weight[self.rows]
        return mx.dequantize(
            self.weight[self.rows],
            scales=self.scales[self.rows],
            biases=self.biases[self.rows],
            group_size=self.group_size,
            bits=self.bits,
        )


def source(name: str) -> str:
    return Path(__file__).with_name(f"{name}.metal").read_text(encoding="ascii")


class Kernel:
    """One operation in two forms.

    reference(*args): plain MLX operations, for any floating dtype. launcher(function, *args): one
    launch of the kernel whose body is NAME.metal; function comes from `mx.fast.metal_kernel`.
    limits(*args): why the kernel doesn't serve these arguments, or None. `strided` inputs are
    passed with their strides, so that a broadcast costs no copy. Arguments are arrays, `Lookup`s
    and floats. The .metal files of the headers hold the functions that the body calls.
    """

    def __init__(
        self,
        name: str,
        inputs: list[str],
        outputs: list[str],
        reference: Callable[..., Arrays],
        launcher: Callable[..., Arrays],
        limits: Callable[..., str | None],
        strided: bool = False,
        headers: tuple[str, ...] = ("header",),
    ):
        self.name, self.reference, self.launcher = name, reference, launcher
        self.limits = limits
        self.definition: dict[str, Any] = {
            "name": f"dspine_{name}",
            "input_names": inputs,
            "output_names": outputs,
            "source": source(name),
            "header": "".join(map(source, headers)),
            "ensure_row_contiguous": not strided,
        }
        self.function: Callable[..., Arrays] = mx.fast.metal_kernel(**self.definition)

    def launch(self, *args: Any) -> Arrays:
        return self.launcher(self.function, *args)


@dataclass(frozen=True)
class Check:
    """Result of a kernel's first use on some shapes and dtypes."""

    kernel: str
    shapes: str  # of the array arguments, with their dtypes
    runs: bool  # whether the kernel runs; otherwise the reference does
    reason: str


class Kernels:
    """Whether each kernel runs, decided once per (kernel, shapes, dtypes).

    mode "auto": kernels run where Metal is present, after a check at first use: the error against
    the reference in float32 is at most twice the plain path's plus 2e-3, and nothing is NaN. A
    kernel that fails, or that the driver refuses, is replaced by its reference; `checks` tells.
    "off": references only.
    """

    def __init__(self, mode: str = "auto"):
        if mode not in ("auto", "off"):
            raise InputError(f"kernels is {mode!r}; it must be 'auto' or 'off'")
        self.mode = mode
        self.active = mode == "auto" and mx.metal.is_available()
        self.checks: dict[tuple[Any, ...], Check] = {}

    def run(self, kernel: Kernel, *args: Any) -> Arrays:
        if not self.active:
            return kernel.reference(*args)
        key = (kernel.name, *(signature(a) for a in args))
        if key not in self.checks:
            self.checks[key] = check(kernel, args)
        return kernel.launch(*args) if self.checks[key].runs else kernel.reference(*args)

    def report(self) -> dict[str, Any]:
        """For `doctor` and health pages: what runs, and why not what does not."""
        return {
            "mode": self.mode,
            "active": self.active,
            "checks": [asdict(c) for c in self.checks.values()],
        }


OFF = Kernels("off")


def signature(arg: Any) -> Any:
    """The part of an argument that a check depends on: an array's shape and dtype, nothing of a
    float, any other value."""
    if isinstance(arg, Lookup):
        return tuple(map(signature, arg))
    if isinstance(arg, mx.array):
        return (*arg.shape, arg.dtype)
    return None if isinstance(arg, float) else arg


def describe(args: tuple[Any, ...]) -> str:
    flat = [x for arg in args for x in (arg if isinstance(arg, Lookup) else (arg,))]
    arrays = [x for x in flat if isinstance(x, mx.array)]
    return ", ".join(f"{str(a.dtype).removeprefix('mlx.core.')}{list(a.shape)}" for a in arrays)


def check(kernel: Kernel, args: tuple[Any, ...]) -> Check:
    """Run kernel and reference on these arguments, and compare both with float32."""
    shapes = describe(args)
    limit = kernel.limits(*args)
    if limit:
        return Check(kernel.name, shapes, False, limit)
    exact = kernel.reference(*map(widened, args))
    plain = largest_error(kernel.reference(*args), exact)
    try:
        error = largest_error(kernel.launch(*args), exact)
    except (RuntimeError, ValueError) as refusal:  # the driver's, when compiling or launching
        return Check(kernel.name, shapes, False, f"refused: {str(refusal).splitlines()[0]}")
    bound = 2 * plain + 2e-3
    passed = error <= bound
    return Check(
        kernel.name, shapes, passed, f"error {error:.2g}, plain {plain:.2g}, allowed {bound:.2g}"
    )


def widened(arg: Any) -> Any:
    """Widen floats to float32. Of a table, only the rows looked up: a whole one may be large."""
    if isinstance(arg, Lookup):
        rows = mx.arange(arg.rows.size, dtype=mx.uint32).reshape(arg.rows.shape)
        return Lookup(rows, arg.take().reshape(rows.size, -1).astype(mx.float32))
    if isinstance(arg, mx.array) and mx.issubdtype(arg.dtype, mx.floating):
        return arg.astype(mx.float32)
    return arg


def largest_error(outputs: Arrays, exact: Arrays) -> float:
    """The largest deviation over all outputs, relative to each one's largest value.

    Infinite for NaN, and for integers that differ.
    """
    errors = [mx.array(0.0)]
    for output, wanted in zip(outputs, exact, strict=True):
        if not mx.issubdtype(wanted.dtype, mx.floating):
            errors.append(mx.where((output == wanted).all(), 0.0, mx.inf))
            continue
        difference = mx.abs(output.astype(mx.float32) - wanted).max()
        error = difference / mx.maximum(mx.abs(wanted).max(), 1e-6)
        errors.append(mx.where(mx.isnan(error), mx.inf, error))
    return mx.stack(errors).max().item()

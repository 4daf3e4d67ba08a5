"""Experts of a mixture for a verify forward's rows: those that share an expert share its weights,
and keep the bits of MLX's kernel for one row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.metal.kernel import Arrays, Kernel
from dspine_mlx.metal.rows import MODES, Matrix, packing_limits
from dspine_mlx.metal.rows_exact import SIMDGROUPS, Form

MAX_PAIRS = 512


class Experts(NamedTuple):
    """The weights W [E, N, K] of a mixture's linear layers, packed, and who is asked for: `indices`
    [..., k] are the experts of each row of x."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str
    indices: mx.array
    in_order: bool = False  # indices are sorted

    @classmethod
    def of(cls, layer: nn.Module, indices: mx.array, in_order: bool = False) -> "Experts":
        """The weights of mlx-lm's `QuantizedSwitchLinear`."""
        arrays = (layer.weight, layer.scales, layer.get("biases"))
        return cls(*arrays, layer.group_size, layer.bits, layer.mode, indices, in_order)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        E, N, groups = self.scales.shape
        return E, N, groups * self.group_size

    @property
    def nbytes(self) -> int:
        """Of all experts: more than a product reads."""
        parts = (self.weight, self.scales, self.biases)
        return sum(part.nbytes for part in parts if part is not None)

    def widened(self) -> "Experts":
        """The same weights for rows of float32."""
        if self.biases is None:
            return self
        scales, biases = (a.astype(mx.float32) for a in (self.scales, self.biases))
        return self._replace(scales=scales, biases=biases)

    @property
    def first(self) -> Matrix:
        """The first expert's weights."""
        biases = None if self.biases is None else self.biases[0]
        return Matrix(self.weight[0], self.scales[0], biases, self.group_size, self.bits, self.mode)


@dataclass(frozen=True)
class ExactExperts:
    """A form of one row's bits, and a cut that changes none: pairs and outputs per simdgroup."""

    form: Form
    rows: int = 2
    outputs: int = 4

    def __call__(self, x: mx.array, experts: Experts) -> mx.array:
        return experts_exact(x, experts, self)

    def limits(self, x: mx.array, experts: Experts) -> str | None:
        return EXPERTS_EXACT.limits(x, experts, self)


CUTS = ((2, 4), (4, 4), (1, 4))


def experts_exact(x: mx.array, experts: Experts, cut: ExactExperts | None = None) -> mx.array:
    """y = x W_e^T for every row and each of its experts: [..., k, 1, N]; cut None: MLX's own.

    x: [..., 1, 1, K], one row for all k experts, or [..., k, 1, K].
    """
    if cut is None:
        return gather(x, experts)
    return EXPERTS_EXACT.launch(x, experts, cut)[0]


def gather(x: mx.array, experts: Experts) -> mx.array:
    """Multiply by MLX, which reads an expert's weights for every pair of row and expert."""
    return mx.gather_qmm(
        x,
        experts.weight,
        experts.scales,
        experts.biases,
        rhs_indices=experts.indices,
        transpose=True,
        group_size=experts.group_size,
        bits=experts.bits,
        mode=experts.mode,
        sorted_indices=experts.in_order,
    )


def gather_apart(x: mx.array, experts: Experts) -> mx.array:
    """Multiply row by row, by plain decoding's own calls."""
    indices, K = experts.indices, x.shape[-1]
    chosen = indices.reshape(-1, indices.shape[-1] if indices.ndim > 1 else 1)
    rows = x.reshape(chosen.shape[0], -1, 1, K)
    each = [
        gather(rows[i : i + 1], experts._replace(indices=chosen[i : i + 1], in_order=False))
        for i in range(chosen.shape[0])
    ]
    return mx.concatenate(each).reshape(*indices.shape, 1, -1)


def launch_experts(
    function: Callable[..., Arrays], x: mx.array, experts: Experts, cut: ExactExperts
) -> Arrays:
    indices, (_, N, K) = experts.indices, experts.shape
    pairs, rows = indices.size, x.size // K
    threads = 32 * SIMDGROUPS
    form = cut.form
    sizes = {"BITS": experts.bits, "GROUP": experts.group_size, "MODE": MODES[experts.mode]}
    sizes |= {"ROWS": cut.rows, "OUTS": cut.outputs, "SIMDGROUPS": SIMDGROUPS}
    sizes |= {"PACKS": form.packs, "WIDE": form.wide, "FUSE": form.fuse}
    biases = experts.scales if experts.biases is None else experts.biases  # not read
    return function(
        inputs=[x.reshape(rows, K), experts.weight, experts.scales, biases,
                indices.reshape(-1), pairs // rows],
        template=[("T", x.dtype), *sizes.items()],
        grid=(threads * -(-N // (cut.outputs * SIMDGROUPS)), pairs, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*indices.shape, 1, N)],
        output_dtypes=[x.dtype],
    )  # fmt: skip


def experts_limits(x: mx.array, experts: Experts, cut: Any = None) -> str | None:
    """Why the kernel doesn't serve these arguments, or None."""
    indices, (_, N, K) = experts.indices, experts.shape
    if x.shape[-1] != K or x.shape[-2] != 1:
        return f"x {list(x.shape)} for experts of {N} x {K}"
    if x.shape[:-2] not in (indices.shape, (*indices.shape[:-1], 1)):
        return f"x {list(x.shape)} for indices {list(indices.shape)}"
    if not 2 <= indices.size <= MAX_PAIRS:
        return f"{indices.size} pairs of row and expert; from 2 to {MAX_PAIRS} are served"
    if N < 8 or K % 32 or K in (64, 128):
        return f"experts of {N} x {K}"
    return packing_limits(x, experts.first)


EXPERTS_EXACT = Kernel(
    "experts_exact",
    ["x", "weight", "scales", "biases", "indices", "per"],
    ["y"],
    lambda x, experts, cut: [gather(x, experts)],
    launch_experts,
    experts_limits,
    headers=("rows_header", "rows_exact_header"),
)

"""The plan of a conversion: every tensor to write, before any is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from dspine_mlx.checkpoints.names import pattern_of
from dspine_mlx.checkpoints.open import Checkpoint
from dspine_mlx.checkpoints.packing import Packing, packing_of
from dspine_mlx.drafters.method import Method
from dspine_mlx.drafters.transfer_space import CODES, SPACE
from dspine_mlx.errors import InputError

CODES_GROUPS = (64, 32)


@dataclass(frozen=True)
class Options:
    """Storage options: the flags of mlx_lm.convert, and the bits of the transfer codes."""

    quantize: bool = False
    q_group_size: int | None = None
    q_bits: int | None = None
    q_mode: str = "affine"
    dtype: mx.Dtype | None = None  # of floats that are not packed; None: as they come
    codes_bits: int | None = None  # None: exact

    @property
    def packing(self) -> Packing:
        return packing_of(self.q_mode, self.q_bits, self.q_group_size)

    def codes_packing(self, rank: int) -> Packing | None:
        if self.codes_bits is None:
            return None
        group = next((g for g in CODES_GROUPS if rank % g == 0), None)
        if group is None:
            raise InputError(
                f"codes of rank {rank} can't be packed in groups of {CODES_GROUPS}; "
                "give --codes-bits none"
            )
        return {"group_size": group, "bits": self.codes_bits, "mode": "affine"}


@dataclass(frozen=True)
class Item:
    """One parameter: its source and its storage."""

    path: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: mx.Dtype
    stored: mx.Dtype
    packing: Packing | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the output, packed or not."""
        numbers = 1
        for n in self.shape:
            numbers *= n
        if self.packing is None:
            return numbers * self.stored.size
        groups = numbers // self.packing["group_size"]
        scales = 2 * groups * self.stored.size if self.packing["mode"] == "affine" else groups
        return numbers * self.packing["bits"] // 8 + scales

    def store(self, value: mx.array) -> dict[str, mx.array]:
        """The arrays to save for a value, under their parameter paths."""
        value = value.astype(self.stored)
        if self.packing is None:
            return {self.path: value}
        names = (
            self.path,
            *(self.path.replace(".weight", part) for part in (".scales", ".biases")),
        )
        return dict(zip(names, mx.quantize(value, **self.packing), strict=False))


@dataclass(frozen=True)
class Plan:
    checkpoint: Checkpoint
    options: Options
    items: list[Item]
    computed: dict[str, mx.array] = field(default_factory=dict)  # parameters that no file holds
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    def value(self, item: Item) -> mx.array:
        if item.path in self.computed:
            return self.computed[item.path]
        return self.checkpoint.arrays([item.path])[item.path]

    def quantization(self) -> dict[str, Any] | None:
        """The config block from which mlx-lm and this package rebuild packed modules."""
        packed = {
            item.path.removesuffix(".weight"): item.packing for item in self.items if item.packing
        }
        if not packed:
            return None
        default = self.options.packing if self.options.quantize else next(iter(packed.values()))
        assert default is not None
        return default | {path: packing for path, packing in packed.items() if packing != default}


def make_plan(
    checkpoint: Checkpoint,
    options: Options,
    *,
    drop: Mapping[str, str] | None = None,
    computed: Mapping[str, mx.array] | None = None,
) -> Plan:
    """Plan every parameter of a checkpoint but the dropped ones (path: reason), and computed
    ones."""
    drop, computed = drop or {}, dict(computed or {})
    found = {
        path: (names, checkpoint.shapes[path], checkpoint.tensors[names[0]].dtype)
        for path, names in sorted(checkpoint.sources.items())
        if path not in drop
    }
    found |= {
        path: (("computed",), tuple(value.shape), value.dtype)
        for path, value in sorted(computed.items())
    }
    items = [
        Item(path, names, shape, dtype, stored_dtype(path, dtype, options), packing)
        for path, (names, shape, dtype) in found.items()
        for packing in [packing_for(checkpoint.method, path, shape, options)]
    ]
    notes = checkpoint.notes + tuple(f"{path}: {reason}" for path, reason in drop.items())
    return Plan(checkpoint, options, items, computed, notes)


def packing_for(
    method: Method, path: str, shape: tuple[int, ...], options: Options
) -> Packing | None:
    """The packing of a parameter: transfer codes in their own packing, the method's large matrices
    in the general one. As in mlx-lm, rows that are not a whole number of groups stay unpacked."""
    if path == CODES:
        return options.codes_packing(shape[-1])
    large = options.quantize and pattern_of(path) in method.large
    return options.packing if large and shape[-1] % options.packing["group_size"] == 0 else None


def stored_dtype(path: str, dtype: mx.Dtype, options: Options) -> mx.Dtype:
    if path == "d2t":
        return mx.uint32
    exact = path in SPACE or not mx.issubdtype(dtype, mx.floating)
    return dtype if exact or options.dtype is None else options.dtype

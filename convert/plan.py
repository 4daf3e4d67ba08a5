"""What a conversion will write, tensor by tensor, before it reads one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from dspine_mlx.checkpoints.open import CODES, Checkpoint
from dspine_mlx.checkpoints.transfer_space import SPACE
from dspine_mlx.errors import InputError

MODES = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}  # group, bits
CODES_GROUPS = (64, 32)
# Packed by --quantize: the large matrices. Norms, biases, injections, Markov tables and the
# confidence head stay exact; they are small, and drafts are sensitive to them.
LARGE = re.compile(
    r"(fc|embed_tokens|lm_head|layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj))\.weight"
)
Packing = dict[str, Any]  # group_size, bits and mode, as mlx-lm writes them


def packing_of(mode: Any, bits: Any, group_size: Any) -> Packing:
    """A way of packing that MLX has; absent numbers are the mode's own."""
    if not isinstance(mode, str) or mode not in MODES:
        raise InputError(f"quantisation mode {mode!r} is unknown; {', '.join(MODES)} are known")
    group, width = MODES[mode]
    group_size, bits = group if group_size is None else group_size, width if bits is None else bits
    whole = type(bits) is type(group_size) is int
    if mode == "affine":
        allowed = group_size in (32, 64, 128) and bits in (2, 3, 4, 5, 6, 8)
    else:
        allowed = (group_size, bits) == MODES[mode]
    if not (whole and allowed):
        raise InputError(
            f"{mode} has no {bits!r} bits in groups of {group_size!r}; its defaults are {width} "
            f"bits in groups of {group}"
        )
    return {"group_size": group_size, "bits": bits, "mode": mode}


def stated_packing(block: Any) -> Packing:
    """The packing that a config's quantization block, or a module's entry in it, states."""
    if not isinstance(block, dict):
        raise InputError(f"quantization is {block!r} in config.json; it must be an object")
    return packing_of(block.get("mode", "affine"), block.get("bits"), block.get("group_size"))


@dataclass(frozen=True)
class Options:
    """How to store: the flags of mlx_lm.convert, and the bits of the transfer codes."""

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
    """One parameter: where it comes from, and how it will be stored."""

    path: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: mx.Dtype
    stored: mx.Dtype
    packing: Packing | None = None

    @property
    def nbytes(self) -> int:
        """Bytes it will take, packed or not."""
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
        """The block that mlx-lm and this package rebuild packed modules from."""
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
    """Every parameter of a checkpoint but the dropped ones (path: reason), and computed ones."""
    drop, computed = drop or {}, dict(computed or {})
    items = []
    for path in sorted(checkpoint.sources):
        names = checkpoint.sources[path]
        dtype = checkpoint.tensors[names[0]].dtype
        if path not in drop:
            items.append(item_for(path, names, checkpoint.shapes[path], dtype, options))
    for path, value in sorted(computed.items()):
        items.append(item_for(path, ("computed",), tuple(value.shape), value.dtype, options))
    notes = checkpoint.notes + tuple(f"{path}: {reason}" for path, reason in drop.items())
    return Plan(checkpoint, options, items, computed, notes)


def item_for(
    path: str, names: tuple[str, ...], shape: tuple[int, ...], dtype: mx.Dtype, options: Options
) -> Item:
    how = None
    if path == CODES:
        how = options.codes_packing(shape[-1])
    elif options.quantize and LARGE.fullmatch(path):
        fits = shape[-1] % options.packing["group_size"] == 0  # as mlx-lm: others stay exact
        how = options.packing if fits else None
    floating = mx.issubdtype(dtype, mx.floating) and path not in SPACE
    stored = options.dtype if options.dtype is not None and floating else dtype
    return Item(path, names, shape, dtype, mx.uint32 if path == "d2t" else stored, how)

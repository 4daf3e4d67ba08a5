"""Packing of tensors: MLX's quantisation modes, as mlx-lm's config.json states them."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.errors import InputError

MODES = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}  # group, bits
Packing = dict[str, Any]  # group_size, bits and mode, as mlx-lm writes them


def packing_of(mode: Any, bits: Any, group_size: Any) -> Packing:
    """Check a packing against MLX's modes; absent numbers are the mode's defaults."""
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
    """Read the packing from a config's quantization block, or from a module's entry in it."""
    if not isinstance(block, dict):
        raise InputError(f"quantization is {block!r} in config.json; it must be an object")
    return packing_of(block.get("mode", "affine"), block.get("bits"), block.get("group_size"))


def same_weight(own: nn.Module, shared: nn.Module) -> bool:
    """Whether two modules hold the same weight, neither packed."""
    if "scales" in own or "scales" in shared or own.weight.shape != shared.weight.shape:
        return False
    return mx.array_equal(own.weight, shared.weight).item()

"""Drafter checkpoints in, MLX folders out."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`convert`, on demand: it needs `dspine_mlx.load`, which itself reads through this package."""
    if name != "convert":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dspine_mlx.convert.conversion import convert

    return convert

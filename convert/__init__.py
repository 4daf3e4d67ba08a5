"""Drafter checkpoints in, MLX folders out."""

from dspine_mlx.convert.conversion import convert

__all__ = ["convert"]

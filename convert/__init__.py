"""Drafter checkpoints in, MLX folders out."""

"""The dspine-mlx command."""

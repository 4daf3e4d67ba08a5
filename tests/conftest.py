"""Tiny models with random weights, and what tests compare with."""

import mlx.core as mx

mx.disable_compile()  # on the CPU every compiled shape costs seconds of g++

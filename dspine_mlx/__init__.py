"""Speculative decoding on Apple Silicon with DSpine drafters, on MLX and mlx-lm."""

from dspine_mlx.errors import InputError
from dspine_mlx.generate import generate, stream_generate
from dspine_mlx.load import load, load_drafter
from dspine_mlx.response import GenerationResponse, Statistics
from dspine_mlx.sampling import Sampler

__version__ = "0.1.0"

__all__ = [
    "GenerationResponse",
    "InputError",
    "Sampler",
    "Statistics",
    "generate",
    "load",
    "load_drafter",
    "stream_generate",
]

"""Speculative decoding on Apple Silicon with DSpine drafters, on MLX and mlx-lm."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspine_mlx.errors import InputError
    from dspine_mlx.generate import generate, stream_generate
    from dspine_mlx.load import load, load_drafter
    from dspine_mlx.response import GenerationResponse, Statistics
    from dspine_mlx.sampling import Sampler

__version__ = "0.1.0"

HOMES = {
    "GenerationResponse": "response",
    "InputError": "errors",
    "Sampler": "sampling",
    "Statistics": "response",
    "generate": "generate",
    "load": "load",
    "load_drafter": "load",
    "stream_generate": "generate",
}
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


def __getattr__(name: str) -> Any:
    """Public names load mlx-lm only when first used, so that the command line starts fast."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)

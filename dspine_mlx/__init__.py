"""Speculative decoding on Apple Silicon with DSpine drafters, on MLX and mlx-lm."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspine_mlx.batch.generate import batch_generate, batch_stream_generate
    from dspine_mlx.errors import InputError
    from dspine_mlx.generate import generate, stream_generate
    from dspine_mlx.load import load, load_drafter
    from dspine_mlx.round.sampler import Sampler
    from dspine_mlx.round.statistics import GenerationResponse, Statistics

__version__ = "0.1.0"

__all__ = [
    "GenerationResponse",
    "InputError",
    "Sampler",
    "Statistics",
    "batch_generate",
    "batch_stream_generate",
    "generate",
    "load",
    "load_drafter",
    "stream_generate",
]
HOMES = {
    "GenerationResponse": "round.statistics",
    "InputError": "errors",
    "Sampler": "round.sampler",
    "Statistics": "round.statistics",
    "batch_generate": "batch.generate",
    "batch_stream_generate": "batch.generate",
    "load_drafter": "load",
    "stream_generate": "generate",
}


class Package(ModuleType):
    """Public names load mlx-lm only when first used, so that the command line starts fast.

    `generate` and `load` each name a function and a submodule. Here they are the functions,
    whatever has been imported: the setters ignore the import system's binding.
    """

    def __dir__(self) -> list[str]:
        """The public names, for completion."""
        return sorted(__all__)

    def __getattr__(self, name: str) -> Any:
        if name not in HOMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{self.__name__}.{HOMES[name]}"), name)

    @property
    def generate(self) -> Any:
        return import_module(f"{self.__name__}.generate").generate

    @generate.setter
    def generate(self, module: ModuleType) -> None:
        pass

    @property
    def load(self) -> Any:
        return import_module(f"{self.__name__}.load").load

    @load.setter
    def load(self, module: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = Package

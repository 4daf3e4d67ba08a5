"""--prompt-cache-file: a prompt's caches, as mlx_lm.cache_prompt saves them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, load_prompt_cache
from mlx_lm.models.cache import make_prompt_cache as fresh_cache

from dspine_mlx.checkpoints.files import read_header
from dspine_mlx.errors import InputError


@dataclass(frozen=True)
class SavedPrompt:
    """Caches of a prompt, and the model they belong to."""

    caches: list[Any]
    model: str
    tokenizer_config: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Positions that the caches hold."""
        counted = (KVCache, QuantizedKVCache, RotatingKVCache)
        return next((c.offset for c in self.caches if isinstance(c, counted)), 0)

    def check_target(self, target: nn.Module) -> None:
        wanted = len(fresh_cache(target))
        if len(self.caches) != wanted:
            raise InputError(
                f"the prompt cache has {len(self.caches)} layers, the model has {wanted}; it was "
                f"saved with {self.model}"
            )


def read_saved_prompt(
    path: Path, model: str | None, kv_bits: int | None, kv_group_size: int
) -> SavedPrompt:
    """Read a file of mlx_lm.cache_prompt's; the flags must match those it was saved with."""
    if not path.is_file():
        raise InputError(f"there is no prompt cache {path}; mlx_lm.cache_prompt saves one")
    read_header(path)
    try:
        caches, metadata = load_prompt_cache(str(path), return_metadata=True)
        config = json.loads(metadata["tokenizer_config"])
        saved = SavedPrompt(caches, str(metadata["model"]), dict(config))
    except Exception as error:  # noqa: BLE001  mlx-lm checks neither names nor shapes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path} was not saved by mlx_lm.cache_prompt: {reason}") from error
    if model is not None and model != saved.model:
        raise InputError(
            f"{path} was saved with the model {saved.model}; --model is {model}, so leave it out"
        )
    for cache in caches:
        if isinstance(cache, QuantizedKVCache):
            check_packing(cache, kv_bits, kv_group_size)
    return saved


def check_packing(cache: QuantizedKVCache, kv_bits: int | None, kv_group_size: int) -> None:
    if kv_bits not in (None, cache.bits):
        raise InputError(f"--kv-bits is {kv_bits}; the prompt cache was saved with {cache.bits}")
    if kv_group_size != cache.group_size:
        raise InputError(
            f"--kv-group-size is {kv_group_size}; the prompt cache was saved with "
            f"{cache.group_size}"
        )

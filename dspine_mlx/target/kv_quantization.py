"""mlx-lm's quantised KV caches, started at exactly the step at which plain decoding starts them."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from dspine_mlx.errors import InputError


@dataclass
class KVQuantization:
    """mlx-lm's kv_bits, kv_group_size and quantized_kv_start.

    mlx-lm quantises after each forward that leaves at least `start` rows in the caches. So does
    this package, whose forwards may have several rows: see `width_limit`.
    """

    bits: int | None = None
    group_size: int = 64
    start: int = 5000

    def check(self, cache: list[Any]) -> None:
        if self.bits is not None and any(isinstance(c, RotatingKVCache) for c in cache):
            raise InputError(
                f"kv_bits is {self.bits}, but mlx-lm can't quantise rotating caches, which this "
                "target's sliding windows or max_kv_size need; leave kv_bits out"
            )

    def check_model(self, model: nn.Module, max_kv_size: int | None) -> None:
        """Raise `InputError` if this model's caches can't be quantised so. A forward over one token
        is built, which tells the sizes of the heads, and never run."""
        if self.bits is None:
            return
        cache = make_prompt_cache(model, max_kv_size)
        self.check(cache)
        model(mx.array([[0]]), cache=cache)
        kept = [array for c in cache if isinstance(c, KVCache) for array in (c.keys, c.values)]
        wrong = {array.shape[-1] for array in kept if array.shape[-1] % self.group_size}
        if wrong:
            raise InputError(
                f"kv_bits {self.bits} in groups of {self.group_size} don't suit this target's "
                f"heads of {max(wrong)}: take a kv_group_size that divides it, or no kv_bits"
            )

    def apply(self, cache: list[Any]) -> None:
        """Quantise the caches in the list if it is time. Call this only after a forward, as mlx-lm
        does: rows from before the first forward stay as they are."""
        try:
            maybe_quantize_kv_cache(cache, self.start, self.group_size, self.bits)
        except ValueError as error:
            raise InputError(
                f"kv_bits {self.bits} in groups of {self.group_size} don't suit this target's "
                f"heads: {error}"
            ) from error

    def width_limit(self, cache: list[Any], position: int) -> float:
        """Rows that one forward may feed at this position, so that each sees the caches as in plain
        decoding."""
        if self.bits is None or not any(isinstance(c, KVCache) for c in cache):
            return float("inf")
        return max(1, self.start - position)

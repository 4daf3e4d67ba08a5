"""Plain decoding in a group: the text of `generate` without a drafter, one row per forward."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from dspine_mlx.batch.draft_rows import DraftRows
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.target.model import Target


class NoDrafter(Drafter):
    """Drafts nothing, from no taps and with no caches; its verify length is 0.

    mlx-lm's own loop runs on every rank and can't be left on one of them alone. Through this class
    plain texts have what drafted ones have: rank 0 decides, and may stop anywhere.
    """

    taps: tuple[int, ...] = ()
    layers: list[nn.Module] = []

    def __init__(self, target: Target):
        super().__init__(nn.Module(), target, target)

    def make_cache(self) -> list[KVCache]:
        return []

    def no_features(self) -> mx.array:
        return mx.zeros((1, 0, 0), self.target.dtype)

    def extend(self, features: mx.array, cache: list[KVCache] | list[DraftRows]) -> None: ...

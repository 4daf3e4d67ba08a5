"""The caches of one conversation, which goes on from turn to turn."""

from collections.abc import Callable, Collection
from itertools import takewhile
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from dspine_mlx.target.prompt_cache import PromptCaches

TURNS = 2  # copies of earlier states that are kept of caches that can't be trimmed


class Turns:
    """`cache` holds `tokens`; what it does depends on tokens alone, so all ranks of a group agree.

    The list of caches may get a drafter's appended.
    """

    def __init__(self, model: nn.Module, max_kv_size: int | None = None):
        self.model, self.max_kv_size = model, max_kv_size
        self.earlier = PromptCaches(max_size=TURNS)
        self.start()

    def start(self) -> None:
        """Empty caches."""
        self.cache = make_prompt_cache(self.model, self.max_kv_size)
        self.tokens: list[int] = []

    def go_back(self, tokens: list[int]) -> list[int]:
        """Take the caches back to what they have in common with these tokens; the rest of them."""
        pairs = zip(self.tokens, tokens[:-1], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if common == len(self.tokens):
            return tokens[common:]
        if can_trim_prompt_cache(self.cache):
            trim_prompt_cache(self.cache, len(self.tokens) - common)
        else:
            cache, rest = self.earlier.fetch_nearest_cache("", tokens)
            self.start()
            self.cache, common = cache or self.cache, len(tokens) - len(rest) if cache else 0
        self.tokens = tokens[:common]
        return tokens[common:]

    def checkpoints(
        self, new: list[int], stops: Collection[int]
    ) -> dict[int, Callable[[list[Any]], None]]:
        """Where to copy the caches while the new tokens are fed; see `PromptCaches`."""
        return self.earlier.checkpoints("", [*self.tokens, *new], new, stops)

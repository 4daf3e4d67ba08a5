"""Lookup alone: a drafter without a network, for a target that has none. It drafts nothing; rounds
offer copies of earlier text, and the rest is decoded plainly."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True)
class NoProposals:
    """The settings that all drafters share, of one that neither reads nor proposes."""

    num_proposals: int = 0
    target_layer_ids: tuple[int, ...] = ()


class LookupOnly(nn.Module):
    """A network without layers and parameters."""

    feature_size = 0
    config: Any = NoProposals()

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []

    def make_cache(self) -> list[Any]:
        return []

    def extend(self, features: mx.array, cache: Sequence[Any]) -> None:
        """Take in nothing."""

    def propose(self, *args: Any) -> NoReturn:
        raise TypeError("lookup has no network to propose with; its policy never drafts")

    propose_texts = propose

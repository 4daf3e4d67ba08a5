"""Lookup alone: a drafter without a network, for a target that has none. It drafts nothing; rounds
offer copies of earlier text, and the rest is decoded plainly."""

from dataclasses import dataclass
from typing import Any, NoReturn

import mlx.core as mx

from dspine_mlx.drafters.network import Caches, Network


@dataclass(frozen=True)
class NoProposals:
    """The settings that all drafters share, of one that neither reads nor proposes."""

    num_proposals: int = 0
    target_layer_ids: tuple[int, ...] = ()


class LookupOnly(Network):
    """A network without layers and parameters."""

    feature_size = 0

    def __init__(self) -> None:
        nothing: Any = NoProposals()
        super().__init__(nothing)
        self.layers = []

    def extend(self, features: mx.array, cache: Caches) -> None:
        """Take in nothing."""

    def propose(self, *args: Any) -> NoReturn:
        raise TypeError("lookup has no network to propose with; its policy never drafts")

    def propose_texts(self, *args: Any) -> NoReturn:
        self.propose()

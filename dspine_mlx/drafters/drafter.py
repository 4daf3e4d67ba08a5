"""A drafter: a network bound to the target that it drafts for."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from dspine_mlx.batch.draft_rows import DraftRows
from dspine_mlx.drafters.chain import AnyProposal
from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.network import Network
from dspine_mlx.drafters.proposals import Proposals
from dspine_mlx.metal.kernel import OFF, Kernels
from dspine_mlx.round.lookup import COPIED
from dspine_mlx.target.given_cache import Layout, layout
from dspine_mlx.target.model import Target
from dspine_mlx.verify_length.costs import Costs
from dspine_mlx.verify_length.misfit import Misfit


class Learnt(Protocol):
    """What "auto" has learnt of a pair; `dspine_mlx.verify_length.schedule` has the rest."""

    costs: Costs


@dataclass(eq=False)
class Drafter:
    """A bound network: `load` returns one, generation drafts with it, `network.bind(target)` makes
    one.

    The network's parameters are a checkpoint's; the target's weights are lent to it, never copied.
    """

    network: Network
    target: Target  # with the embedding and head to propose with: a checkpoint's own, or rows
    verifier: Target  # whose distribution it drafts for
    kernels: Kernels = OFF
    folder: Path | None = None  # that it was loaded from
    schedule: Learnt | None = None  # made at first use
    misfit: Misfit = field(default_factory=Misfit)  # of all its texts
    plain: ClassVar[bool] = False  # texts are decoded plainly, whatever is asked for

    @property
    def config(self) -> DrafterConfig:
        return self.network.config

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose outputs it reads."""
        return self.config.target_layer_ids

    @property
    def most_offered(self) -> int:
        """Tokens that a round may offer: all proposals, or as many copied ones."""
        return max(self.config.num_proposals, COPIED)

    @property
    def layers(self) -> list[nn.Module]:
        """The draft layers, one cache each."""
        return self.network.layers

    def make_cache(self) -> list[KVCache]:
        """Empty caches of the context, one per layer."""
        return self.network.make_cache()

    @cached_property
    def cache_layout(self) -> Layout:
        """What its caches hold, without a forward."""
        caches = self.make_cache()
        self.extend(mx.zeros((1, 1, self.network.feature_size), self.target.dtype), caches)
        return layout(caches)

    def no_features(self) -> mx.array:
        """Features of no positions: [1, 0, m*d]."""
        return mx.zeros((1, 0, self.network.feature_size), self.target.dtype)

    def extend(self, features: mx.array, cache: list[KVCache] | list[DraftRows]) -> None:
        """Add target features [1, n, m*d] of the next n context positions to the cache."""
        self.network.extend(features, cache)

    def propose(
        self, anchor: int | mx.array, features: mx.array, cache: list[KVCache]
    ) -> AnyProposal:
        """Propose M tokens after the anchor.

        features: [1, n, m*d], target features of the positions before the anchor, as far as the
        cache lacks them (n may be 0).
        """
        return self.network.propose(anchor, features, cache, self.target, self.kernels)

    def propose_texts(
        self,
        anchors: mx.array,
        features: mx.array,
        cache: list[DraftRows],
        slots: int | None = None,
    ) -> Proposals:
        """Propose M tokens after each text's anchor: one proposal per text, bit-equal to `propose`
        where the backend's rows are.

        slots: propose so many tokens only. A causal block's are the first ones of the full block;
        others may differ, as a block's later slots change its earlier ones.

        anchors: [B]; features: [B, n, m*d], of which the cache's lengths say how many rows each
        text takes in (`DraftLengths.take_in`).
        """
        network = self.network
        return network.propose_texts(anchors, features, cache, slots, self.target, self.kernels)

    def set_dtype(self, dtype: mx.Dtype) -> None:
        """Cast the network's floating-point parameters."""
        self.network.set_dtype(dtype)

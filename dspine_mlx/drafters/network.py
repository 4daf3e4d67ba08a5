"""What every drafter's network has, whatever its method."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from dspine_mlx.batch.draft_rows import DraftRows
from dspine_mlx.drafters.chain import AnyProposal
from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.proposals import Proposals
from dspine_mlx.metal.kernel import OFF, Kernels
from dspine_mlx.target.model import Target

Caches = list[KVCache] | list[DraftRows]  # of one text or several, one per draft layer


class Network(nn.Module):
    """Draft layers that read a target's features. Its parameters are a checkpoint's."""

    feature_size: int  # of the target's features, m*d
    layers: list[nn.Module]

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self.layers]

    def extend(self, features: mx.array, cache: Caches) -> None:
        """See `Drafter.extend`."""
        raise NotImplementedError

    def propose(
        self,
        anchor: int | mx.array,
        features: mx.array,
        cache: list[KVCache],
        target: Target,
        kernels: Kernels = OFF,
    ) -> AnyProposal:
        """See `Drafter.propose`."""
        raise NotImplementedError

    def propose_texts(
        self,
        anchors: mx.array,
        features: mx.array,
        cache: list[DraftRows],
        slots: int | None,
        target: Target,
        kernels: Kernels = OFF,
    ) -> Proposals:
        """See `Drafter.propose_texts`."""
        raise NotImplementedError

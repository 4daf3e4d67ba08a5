"""A drafting method that no package knows: DFlash whose slots each have a shift of their own.

U_t(v) = head(norm(h_t) + e_t), with e [M, d] learnt. All that a method needs is here: the network,
its record, a round in float64 to verify conversions with, and what it is trained on.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from dspine_mlx.convert import reference
from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.dflash import BACKBONE, LARGE, DFlash
from dspine_mlx.drafters.method import Layout, Method
from dspine_mlx.drafters.proposal import SlotwiseProposal
from dspine_mlx.drafters.settings import read_flat
from dspine_mlx.metal.kernel import OFF, Kernels
from dspine_mlx.target.model import Target
from dspine_mlx.train.blocks import Batch, Inputs, States
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.objectives.dflash import Objective


@dataclass(frozen=True)
class ToyConfig(DrafterConfig):
    shift_scale: float = 1.0  # of e when drafting


class Toy(DFlash):
    config: ToyConfig

    def __init__(self, config: ToyConfig):
        super().__init__(config)
        self.shift = nn.Embedding(config.num_proposals, config.hidden_size)

    def propose(
        self,
        anchor: int | mx.array,
        features: mx.array,
        cache: list[KVCache],
        target: Target,
        kernels: Kernels = OFF,
    ) -> SlotwiseProposal:
        states = self.backbone(mx.array(anchor), features, cache, target)
        return self.slotwise(target.head(self.shifted(states)))

    def shifted(self, states: mx.array) -> mx.array:
        return states + self.config.shift_scale * self.shift.weight


class ToyObjective(Objective):
    loss = LossConfig(ce_weight=0.5)
    settings = {"shift_scale": 2.0}

    def start(self, network: Toy, target: Target) -> None:
        network.shift.weight = mx.zeros_like(network.shift.weight)

    def states(self, network: Toy, batch: Batch, inputs: Inputs, config: LossConfig) -> States:
        base = super().states(network, batch, inputs, config).base
        return States(network.shifted(base))


OBJECTIVE = ToyObjective()


def toy_round(
    weights: reference.Weights,
    config: dict[str, Any],
    target: reference.Head,
    features: np.ndarray,
    anchor: int,
    candidates: np.ndarray,
) -> reference.Round:
    w, c = reference.Tensors(weights), {"first_slot": 1} | reference.flat(config)
    h = reference.embed_block(c, target.embedding, anchor)
    context = reference.context_rows(w, c, features)
    for layer in range(c["num_hidden_layers"]):
        h = reference.draft_layer(w, c, layer, h, context)
    states = reference.rms_norm(h[1:], w["norm.weight"], c["rms_norm_eps"])
    base = reference.base_logits(w, c, target, states + c["shift_scale"] * w["slots.shift"])
    scores = np.take_along_axis(base, candidates, axis=1)
    table = np.repeat(scores[1:, None], candidates.shape[1], axis=1)
    return reference.Round(candidates, scores[0], table, base)


def wrong_round(
    weights: reference.Weights, config: dict[str, Any], *rest: Any, **options: Any
) -> reference.Round:
    """The slots shifted the wrong way."""
    return toy_round(weights, config | {"shift_scale": -config["shift_scale"]}, *rest, **options)


METHOD = Method(
    name="toy",
    title="Toy",
    config=ToyConfig,
    network=Toy,
    layouts=(Layout("Toy, tests", BACKBONE | {"slots.shift": "shift.weight"}, read_flat),),
    large=(*LARGE, "shift.weight"),
    architectures=("ToyDraftModel",),
    marks=("slots.shift",),
    reference="tests.support.toy:toy_round",
    objective="tests.support.toy:OBJECTIVE",
)

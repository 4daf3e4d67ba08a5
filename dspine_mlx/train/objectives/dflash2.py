"""DFlash2's objective: the backbone's logits, and the selector's choice among the best."""

from typing import Any

import mlx.core as mx

from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.dflash2 import DFlash2
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.top_k import top_k
from dspine_mlx.target.model import Target
from dspine_mlx.train.blocks import Batch, States
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.losses import LossRows, all_logits, distributions
from dspine_mlx.train.objectives.dflash import Objective, Rows
from dspine_mlx.train.objectives.dspine import candidate_loss

SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
SPREAD = 0.02  # of the predecessors' codes at the start


class DFlash2Objective(Objective):
    """CE of the base logits as for DFlash, and the same among each slot's K best, scored after the
    true predecessor. A slot whose label is not among the K has no selector loss."""

    loss = LossConfig(ce_weight=1.0, position_decay=4.0)
    block_size = 8
    settings = SIZES

    def start(self, network: DFlash2, target: Target) -> None:
        """Start kernels as the identity, and the selector so that it adds nothing."""
        for layer in network.layers:
            for conv in (layer.attention_conv, layer.mlp_conv):
                projection = conv.kernel_projection
                projection.weight = mx.zeros_like(projection.weight)
        selector = network.candidate_selector
        codes = selector.predecessor_codebook.weight
        selector.predecessor_codebook.weight = SPREAD * mx.random.normal(codes.shape)
        selector.successor_codebook.weight = mx.zeros_like(selector.successor_codebook.weight)

    def row_inputs(self, drafter: Drafter, batch: Batch, states: States) -> tuple[Rows, Rows]:
        """Add P[u] * W h [r] of each row's true predecessor u; shared: S [V, r]."""
        inputs, _ = super().row_inputs(drafter, batch, states)
        selector = drafter.network.candidate_selector
        slots = selector.hidden_projection(states.base)
        after = selector.predecessor_codebook(batch.predecessors) * slots
        return [*inputs, after], [selector.successor_codebook.weight]

    def row_loss(
        self, drafter: Drafter, config: LossConfig, alpha: mx.array, *arrays: mx.array
    ) -> LossRows:
        successors, hidden, labels, base, after = arrays
        network: DFlash2 = drafter.network
        selectable = network.config.num_selectable
        pq = distributions(drafter, hidden, all_logits(drafter, base))
        ce = pq.cross_entropy(labels)
        logits = mx.stop_gradient(pq.logits[:, :selectable])
        candidates = mx.stop_gradient(top_k(logits, drafter.config.top_k)[0])
        affinity = (successors[candidates] @ after[..., None])[..., 0]
        scores = mx.take_along_axis(pq.logits, candidates, axis=-1) + affinity
        p = mx.take_along_axis(pq.p, candidates, axis=-1)
        own = candidate_loss(scores, p, candidates == labels[:, None], alpha, config)
        loss = pq.distribution_loss(ce, alpha, config) + config.refined_weight * own
        return pq.candidate_rows(candidates, scores, loss, ce)

    def sections(
        self, config: DrafterConfig, loss: LossConfig, flat: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        keys = [*SIZES, "selector_vocab_size"] if "selector_vocab_size" in flat else SIZES
        own = {key: flat.pop(key) for key in keys}
        return {"dflash_config": super().sections(config, loss, flat)["dflash_config"] | own}


OBJECTIVE = DFlash2Objective()

"""DSpark's objective: logits with the Markov bias, and every slot's confidence."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspark import DSpark, RNNMarkov, VanillaMarkov
from dspine_mlx.drafters.top_k import scale_scores
from dspine_mlx.train.blocks import Batch, States
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.losses import LossRows, all_logits, distributions
from dspine_mlx.train.objectives.dflash import Objective, Rows

KEYS = (  # stated twice: SpecForge nests them, other readers look at the top level
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


class DSparkObjective(Objective):
    """The mix on logits with the Markov bias, and BCE of the confidence against 1 - L1 / 2."""

    loss = LossConfig(position_decay=4.0)
    block_size = 7
    settings = {
        "markov_rank": 256,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    reduced_in_hf = True

    def row_inputs(self, drafter: Drafter, batch: Batch, states: States) -> tuple[Rows, Rows]:
        """Add each row's mixed [r] and confidence; shared: w2 [V, r], and the drafter's own head if
        it has one."""
        inputs, _ = super().row_inputs(drafter, batch, states)
        network: DSpark = drafter.network
        features = states.base
        previous = network.markov_head.markov_w1(batch.predecessors)
        mixed = teacher_forced(network.markov_head, previous, states.base)
        if network.config.confidence_head_with_markov:
            features = mx.concatenate([features, previous], axis=-1)
        confidence = network.confidence_head(features)
        own = [network.lm_head.weight] if "lm_head" in network else []
        return [*inputs, mixed, confidence], [network.markov_head.markov_w2.weight, *own]

    def row_loss(
        self, drafter: Drafter, config: LossConfig, alpha: mx.array, *arrays: mx.array
    ) -> LossRows:
        successors, *head, hidden, labels, base, mixed, confidence = arrays
        own = scale_scores(base @ head[0].T, drafter.config) if head else all_logits(drafter, base)
        pq = distributions(drafter, hidden, own + mixed @ successors.T)
        ce = pq.cross_entropy(labels)
        accepted = nn.losses.binary_cross_entropy(
            confidence, mx.stop_gradient(pq.overlap), with_logits=True, reduction="none"
        )
        loss = pq.distribution_loss(ce, alpha, config) + config.confidence_weight * accepted
        return pq.rows(loss, ce)

    def sections(
        self, config: DrafterConfig, loss: LossConfig, flat: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        nested = super().sections(config, loss, flat)["dflash_config"]
        heads = {key: vars(config)[key] for key in KEYS}
        return {"dflash_config": nested | {"projector_type": "dspark"} | heads}


def teacher_forced(head: VanillaMarkov, previous: mx.array, states: mx.array) -> mx.array:
    """Compute the factors [S, A, M, r] of w2 in the bias, from the true predecessors' w1."""
    if not isinstance(head, RNNMarkov):
        return head.mix(previous, states)
    state, outputs = mx.zeros_like(previous[:, :, 0]), []
    for t in range(previous.shape[2]):
        joint = head.joint_proj(
            mx.concatenate([state, previous[:, :, t], states[:, :, t]], axis=-1)
        )
        gate, candidate, output = mx.split(joint, 3, axis=-1)
        gate = mx.sigmoid(gate)
        state = gate * state + (1 - gate) * mx.tanh(candidate)
        outputs.append(mx.tanh(output))
    return mx.stack(outputs, axis=2)


OBJECTIVE = DSparkObjective()

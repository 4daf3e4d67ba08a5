"""Domino's objective: corrected logits, and at first the backbone's own."""

from typing import Any

import mlx.core as mx

from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.domino import Domino, PrefixGRU
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.target.model import Target
from dspine_mlx.train.blocks import Batch, States
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.losses import LossRows, Schedule, all_logits, distributions
from dspine_mlx.train.objectives.dflash import Objective, Rows

KEYS = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label")


class DominoObjective(Objective):
    """(1 - lambda) CE(corrected) + lambda CE(base); lambda falls to 0 (arXiv:2605.29707)."""

    loss = LossConfig(ce_weight=1.0)
    settings = {
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "pure_draft_prefix_len": 1,
        "shift_label": True,
    }

    def start(self, network: Domino, target: Target) -> None:
        """Start the GRU as PyTorch does, and the correction at zero, with a gradient."""
        gru, bound = network.prefix_gru, network.config.gru_hidden_dim**-0.5
        for name in ("weight_ih_l0", "weight_hh_l0"):
            gru[name] = mx.random.uniform(-bound, bound, gru[name].shape)
        out = network.embed_proj[2]
        out.weight = mx.zeros_like(out.weight)

    def row_inputs(self, drafter: Drafter, batch: Batch, states: States) -> tuple[Rows, Rows]:
        """Add each row's silu(W_1 [h; s]) [E] after the true tokens, which is 0 where the backbone
        proposes alone; shared: W_2 [V, E]."""
        inputs, _ = super().row_inputs(drafter, batch, states)
        network: Domino = drafter.network
        embedded = drafter.target.embed(batch.predecessors).astype(states.base.dtype)
        prefix = teacher_forced(network.prefix_gru, embedded)
        hidden, silu, out = network.embed_proj
        mixed = silu(hidden(mx.concatenate([states.base, prefix], axis=-1)))
        corrected = mx.arange(mixed.shape[2]) >= network.config.pure_draft_prefix_len
        return [*inputs, mixed * corrected[:, None]], [out.weight]

    def scheduled(self, schedule: Schedule) -> list[mx.array]:
        return [schedule.backbone]

    def row_loss(
        self, drafter: Drafter, config: LossConfig, alpha: mx.array, *arrays: mx.array
    ) -> LossRows:
        share, out, hidden, labels, base, mixed = arrays
        logits = all_logits(drafter, base)
        alone = distributions(drafter, hidden, logits)
        pq = distributions(drafter, hidden, logits + (mixed @ out.T).astype(mx.float32))
        ce = alone.cross_entropy(labels)
        corrected = pq.distribution_loss(pq.cross_entropy(labels), alpha, config)
        loss = (1 - share) * corrected + share * alone.distribution_loss(ce, alpha, config)
        return pq.rows(loss, ce)

    def sections(
        self, config: DrafterConfig, loss: LossConfig, flat: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        nested = super().sections(config, loss, flat)["dflash_config"]
        for key in (*KEYS, "first_slot"):  # the slot follows from shift_label
            flat.pop(key, None)
        own = {key: vars(config)[key] for key in KEYS}
        return {"dflash_config": nested | {"projector_type": "domino"} | own}


def teacher_forced(gru: PrefixGRU, embedded: mx.array) -> mx.array:
    """The states [S, A, M, F] after each of the embeddings [S, A, M, H]."""
    state, states = mx.zeros((*embedded.shape[:2], gru.size), embedded.dtype), []
    for slot in range(embedded.shape[2]):
        state = gru(embedded[:, :, slot], state)
        states.append(state)
    return mx.stack(states, axis=2)


OBJECTIVE = DominoObjective()

"""DSpine's objective: base and refined scores, and readouts that predict their own token."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspine import DSpine
from dspine_mlx.drafters.injection import inject, unit
from dspine_mlx.drafters.top_k import scale_scores, top_k
from dspine_mlx.drafters.transfer_space import transfer_codes
from dspine_mlx.target.model import Target
from dspine_mlx.train.blocks import Batch, Inputs, States
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.losses import (
    LossRows,
    all_logits,
    cross_entropy,
    distributions,
    draft_ids,
    softmax,
)
from dspine_mlx.train.objectives.dflash import Objective, Rows

KEYS = ("transfer_rank", "message_size", "top_k")
TRAINING_KEYS = (  # training settings, under SpecForge's names
    "ce_weight",
    "alignment_weight",
    "replacement_layers",
    "replacement_probability",
    "replacement_hold_ratio",
    "replacement_end_ratio",
    "candidate_mass_threshold",
)


class DSpineObjective(Objective):
    """The mix on the base logits, and again on the scores of the base's K candidates, which are the
    refined ones (without refinement: the base's); and an alignment of every layer's readout."""

    loss = LossConfig()
    extensions = {"injection_reach": 2}

    def start(self, network: DSpine, target: Target) -> None:
        """Compute C and the projection P from the target's LM head. Every R_l starts as P^T, so
        that a state's readout is its place in the transfer space. W and G_p start at zero: no
        message, but a gradient.

        C is not trained.
        """
        config = network.config
        head = target.head_rows(mx.arange(target.vocab_size)).astype(mx.float32)
        codes, projection = transfer_codes(head, config.transfer_rank)
        network.transfer_codes.weight = codes.astype(mx.float32)
        network.transfer_codes.freeze()
        injection, a = network.injection, config.message_size
        for readout in injection.readouts:
            readout.weight = projection.T.astype(mx.float32)
        for part in (injection, *([network.earlier] if "earlier" in network else [])):
            for write in part.writes:
                write.weight = mx.zeros_like(write.weight)
            gates = part.gates.weight
            silent = mx.zeros_like(gates[a : 2 * a])
            part.gates.weight = mx.concatenate([gates[:a], silent, gates[2 * a :]])

    def states(self, network: DSpine, batch: Batch, inputs: Inputs, config: LossConfig) -> States:
        """`DSpine.injected_backbone` for many blocks, with every layer's states kept."""
        h = inputs.h
        injection, a = network.injection, network.injection.bias.shape[0]
        codes = network.transfer_codes(batch.predecessors)
        known = injection.from_codes(codes)  # [S, A, M, 2a]
        before = network.earlier.from_codes(codes) if "earlier" in network else None
        # The last layer keeps the predicted predecessor: else the base logits would see the text.
        replace = min(config.replacement_layers, len(inputs.layers) - 1)
        kept = []
        for i, layer in enumerate(inputs.layers):
            block = layer(h, *inputs.context)
            u = block[:, :, 1:]
            if "earlier" in network:
                y, replaced = injection.readouts[i](u), batch.replaced if i < replace else None
                u = network.earlier.receive(i, u, y, before, replaced)
            products = injection.gates(unit(injection.readouts[i](u)))
            receiver = products[..., :a] + injection.bias
            previous = mx.concatenate([known[:, :, :1], products[:, :, :-1, a:]], axis=2)
            if i < replace:
                previous = mx.where(batch.replaced[..., None, None], known, previous)
            written = inject(u, receiver, previous, injection.writes[i]) if config.injection else u
            kept.append(written)
            h = mx.concatenate([block[:, :, :1], written], axis=2)
        refined = inject(u, receiver, known, injection.writes[-1])
        return States(network.norm(written), network.norm(refined), tuple(kept))

    def row_inputs(self, drafter: Drafter, batch: Batch, states: States) -> tuple[Rows, Rows]:
        """Add each row's refined states."""
        inputs, shared = super().row_inputs(drafter, batch, states)
        return [*inputs, states.refined], shared

    def row_loss(
        self, drafter: Drafter, config: LossConfig, alpha: mx.array, *arrays: mx.array
    ) -> LossRows:
        hidden, labels, base, refined = arrays
        pq = distributions(drafter, hidden, all_logits(drafter, base))
        ce = pq.cross_entropy(labels)
        loss = pq.distribution_loss(ce, alpha, config)
        logits = mx.stop_gradient(pq.logits)
        candidates = mx.stop_gradient(top_k(logits, drafter.config.top_k)[0])
        if config.refinement:
            p = mx.take_along_axis(pq.p, candidates, axis=-1)
            head = drafter.target.head_rows(candidates).astype(refined.dtype)  # [R, K, d]
            scores = scale_scores((head @ refined[..., None])[..., 0], drafter.config)
            own = candidate_loss(scores, p, candidates == labels[:, None], alpha, config)
            loss = loss + config.refined_weight * own
        else:
            scores = mx.take_along_axis(pq.logits, candidates, axis=-1)
        return pq.candidate_rows(candidates, scores, loss, ce)

    def alignment(
        self, drafter: Drafter, batch: Batch, states: States, ce: mx.array, config: LossConfig
    ) -> mx.array:
        """Alignment of each layer's states with their own token, per row, the mean over layers.

        1 - cos(R_l h_l, C[y]), weighted with the row's CE (no gradient), so that it fades as the
        drafter learns; `token`: the CE of norm(h_l) in its place, the plain way to supervise a
        layer.
        """
        network, labels, weight = drafter.network, batch.labels, mx.stop_gradient(ce)
        if config.alignment == "token":
            ids = draft_ids(drafter, labels)
            logits = [all_logits(drafter, network.norm(h)) for h in states.layers]
            losses = [cross_entropy(own, mx.logsumexp(own, axis=-1), ids) for own in logits]
            return sum(losses) / len(losses)
        codes = network.transfer_codes(labels)
        cosines = [
            nn.losses.cosine_similarity_loss(readout(h), codes, axis=-1, eps=1e-12)
            for readout, h in zip(network.injection.readouts, states.layers, strict=True)
        ]
        return weight * (1 - sum(cosines) / len(cosines))

    def sections(
        self, config: DrafterConfig, loss: LossConfig, flat: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        own = {key: vars(config)[key] for key in KEYS}
        for key in KEYS:
            flat.pop(key, None)
        own |= {key: vars(loss)[key] for key in TRAINING_KEYS}
        return {"dspine_config": own} | super().sections(config, loss, flat)


def candidate_loss(
    scores: mx.array, p: mx.array, hit: mx.array, alpha: mx.array, config: LossConfig
) -> mx.array:
    """The mix on K candidates, [R]: of scores, the target's p, and hit (it is the label), [R, K].

    p is renormalised on the candidates. CE counts only where the label is one of them, L1 (and CE
    against p) only where they hold more than `candidate_mass_threshold`.
    """
    q, lse = softmax(scores)
    mass = p.sum(axis=-1, keepdims=True)
    inside = (mass > config.candidate_mass_threshold)[:, 0]
    target = p / mx.maximum(mass, config.candidate_mass_threshold)
    if config.reference == "distribution":
        ce = mx.where(inside, lse - (target * scores).sum(axis=-1), 0)
    else:
        ce = mx.where(hit, lse[:, None] - scores, 0).sum(axis=-1)
    l1 = mx.where(inside, mx.abs(target - q).sum(axis=-1), 0)
    return alpha * ce + (1 - alpha) * l1


OBJECTIVE = DSpineObjective()

"""DSpine: adjacent causal injection in every draft layer (arXiv:2609.36173).

After each layer, a slot receives what its predecessor predicts at that depth. After the last layer,
the same injection takes the predecessor's token instead, which gives a K x K transition table.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from dspine_mlx.batch.draft_rows import DraftRows
from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.dflash import BACKBONE, LARGE, Caches, DFlash
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.injection import (
    EarlierInjection,
    Injection,
    one_chain,
    two_chains,
)
from dspine_mlx.drafters.method import Config, Layout, Method, Names, Shapes
from dspine_mlx.drafters.proposal import Proposal
from dspine_mlx.drafters.proposals import Proposals, flat
from dspine_mlx.drafters.settings import is_nested, read_flat, read_reference, section
from dspine_mlx.drafters.top_k import rank, scale_scores
from dspine_mlx.errors import InputError
from dspine_mlx.metal.inject import gated_message, residual_write
from dspine_mlx.metal.kernel import OFF, Kernels, Lookup
from dspine_mlx.metal.transition import candidate_messages, transition_scores
from dspine_mlx.target.model import Target

GATES = ("receiver_gate", "predecessor_gate", "message")  # G_q, G_p, A, as stacked in `gates`


@dataclass(frozen=True)
class DSpineConfig(DrafterConfig):
    """Adjacent causal injection (arXiv:2609.36173). The block is always causal."""

    is_causal: bool | None = True
    transfer_rank: int = 1024  # r
    message_size: int = 512  # a
    injection_reach: int = 1  # slots back that a slot receives from: 1 (the paper) or also 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_causal is False:
            raise InputError("is_causal is false; a DSpine drafter needs a causal block")
        if self.is_causal is None:
            object.__setattr__(self, "is_causal", True)
        if self.first_slot != 1:
            raise InputError(
                f"first_slot is {self.first_slot}; a DSpine drafter proposes from slot 1 on"
            )


class DSpine(DFlash):
    config: DSpineConfig

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        layers, d = config.num_hidden_layers, config.hidden_size
        self.injection = Injection(layers, d, config.transfer_rank, config.message_size)
        if config.injection_reach == 2:
            self.earlier = EarlierInjection(layers, d, config.transfer_rank, config.message_size)
        self.transfer_codes = nn.Embedding(config.vocab_size, config.transfer_rank)

    def next_norm(self, layer: int) -> nn.RMSNorm:
        """The norm that follows a layer."""
        last = layer + 1 == len(self.layers)
        return self.norm if last else self.layers[layer + 1].input_layernorm

    def bind(self, target: Target, kernels: Kernels = OFF) -> Drafter:
        """Bind as `DFlash.bind` does. With kernels, codes kept in full are folded with their
        gates."""
        codes = self.get("transfer_codes", {})  # absent once they are folded
        if kernels.active and "weight" in codes and "scales" not in codes:
            self.folded_codes = self.injection.from_codes(codes.weight)
            mx.eval(self.folded_codes)
            if "earlier" not in self:  # that folds the anchor's code with gates of its own
                del self.transfer_codes
        return super().bind(target, kernels)

    def code_rows(self, tokens: mx.array) -> Lookup:
        """Rows [G_p; A] sqrt(r) C[x] [2a] of tokens.

        A round reads the codes C [V, r] in this form only. Folding them once for the whole
        vocabulary takes no more memory if 2a = r, and saves a product over all candidates in every
        round.
        """
        if "folded_codes" in self:
            return Lookup(tokens, self.folded_codes)
        rows = mx.arange(tokens.size, dtype=mx.uint32).reshape(tokens.shape)
        return Lookup(rows, self.injection.from_codes(self.transfer_codes(tokens.reshape(-1))))

    def earlier_codes(self, anchor: mx.array) -> mx.array:
        """[G2_p; A2] sqrt(r) z of what slots 1 and 2 receive from two back: nothing, and the anchor
        [..., 1]'s code. [2, 2a], or [2B, 2a]."""
        code = self.earlier.from_codes(self.transfer_codes(anchor))
        both = mx.concatenate([mx.zeros_like(code), code], axis=-2)
        return both.reshape(-1, both.shape[-1])

    def inject_earlier(
        self, layer: int, block: mx.array, codes: mx.array, kernels: Kernels = OFF
    ) -> mx.array:
        """Inject from two slots back into a layer's output [..., L, d].

        Slots 1, 3, 5, ... and 2, 4, 6, ... are two chains, in which each slot receives from the one
        before. codes: from `earlier_codes`.
        """
        earlier, norm = self.earlier, self.next_norm(layer)
        u = block[..., 1:, :]
        y = self.injection.readouts[layer](two_chains(u))
        message, _ = gated_message(y, earlier.gates(y), codes, earlier.bias, kernels)
        write = one_chain(earlier.writes[layer](message), u.shape)
        return residual_write(block, write, norm.weight, norm.eps, kernels)[0]

    def inject(
        self, layer: int, block: mx.array, anchor: mx.array, kernels: Kernels = OFF
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Inject after a layer, in five launches. Returns h of all slots [L, d], h normalised for
        the next layer, and the receiver terms s_t G_q y_t + b [M, a] of slots 1..M.

        block: the layer's output [L, d], slot 0 stays as it is; anchor: [G_p; A] sqrt(r) C[x_0].
        Of several texts all have a leading axis.
        """
        injection, norm = self.injection, self.next_norm(layer)
        y = injection.readouts[layer](block[..., 1:, :])
        message, receiver = gated_message(y, injection.gates(y), anchor, injection.bias, kernels)
        write = injection.writes[layer](message)
        h, normed = residual_write(block, write, norm.weight, norm.eps, kernels)
        return h, normed, receiver

    def injected_backbone(
        self,
        anchor: mx.array,
        features: mx.array,
        cache: Caches,
        target: Target,
        kernels: Kernels = OFF,
        slots: int | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Run all layers. Returns, of slots 1..M after the last layer: normalised states [M, d],
        the states u [M, d] before its injection (v where `earlier` is), and its receiver terms
        [M, a]. For several texts, with anchors [B, 1], all have a leading axis."""
        several = anchor.ndim == 2
        h, context = self.embed_block(anchor, target, slots), self.context(features)
        normed = self.layers[0].input_layernorm(h)
        code = self.code_rows(anchor[:, 0] if several else anchor).take()
        if "earlier" in self:
            earlier = self.earlier_codes(anchor if several else anchor[None])
        for i, (layer, c) in enumerate(zip(self.layers, cache, strict=True)):
            block = layer(h, normed, context, c)
            block = block if several else block[0]
            if "earlier" in self:
                block = self.inject_earlier(i, block, earlier, kernels)
            h, normed, receiver = self.inject(i, block, code, kernels)
            h, normed = (h, normed) if several else (h[None], normed[None])
        states = normed if several else normed[0]
        return states[..., 1:, :], block[..., 1:, :], receiver

    def propose(
        self,
        anchor: int | mx.array,
        features: mx.array,
        cache: list[KVCache],
        target: Target,
        kernels: Kernels = OFF,
    ) -> Proposal:
        """Propose M tokens after the anchor. See `Drafter.propose`."""
        anchor = mx.array(anchor).reshape(())
        states, u, receiver = self.injected_backbone(anchor, features, cache, target, kernels)
        return self.refined(target.head(states), u, receiver, target, kernels)

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
        states, u, receiver = self.injected_backbone(
            anchors[:, None], features, cache, target, kernels, slots
        )
        ids, scores = rank(target.head(flat(states)), self.config)
        ids, scores = (x.reshape(*states.shape[:2], -1) for x in (ids, scores))
        # A slot's scores depend on no other text: all slots but the first ones are one long block.
        pairs = (flat(u[:, 1:]), flat(receiver[:, 1:]), flat(ids[:, :-1]), flat(ids[:, 1:]))
        table = self.transition_table(*pairs, target, kernels)
        table = table.reshape(len(ids), -1, *table.shape[1:])
        return Proposals(Proposal(self.tokens(ids), scores[:, 0], table))

    def refined(
        self,
        logits: mx.array,
        u: mx.array,
        receiver: mx.array,
        target: Target,
        kernels: Kernels = OFF,
    ) -> Proposal:
        """T_t[i, j] = S_t(v_i, v_j), the last layer's injection redone with candidate i of slot
        t - 1 as the predecessor. All of slots 1..M: the head's logits [M, Vd], u and receiver."""
        ids, scores = rank(logits, self.config)
        table = self.transition_table(u[1:], receiver[1:], ids[:-1], ids[1:], target, kernels)
        return Proposal(self.tokens(ids), scores[0], table)

    def transition_table(
        self,
        u: mx.array,
        receiver: mx.array,
        before: mx.array,
        ids: mx.array,
        target: Target,
        kernels: Kernels = OFF,
    ) -> mx.array:
        """Last-write refinement for all pairs at once, of candidates ids [n, K] after those of the
        slot before them [n, K]: [n, K, K] float32.

        u [n, d] and receiver [n, a] of these slots come from the last layer, so no readout or
        receiver gate is computed again.
        """
        if not len(ids):  # a block of one slot
            return mx.zeros((0, ids.shape[1], ids.shape[1]))
        predecessors = self.code_rows(self.tokens(before))
        message = candidate_messages(receiver, predecessors, kernels)
        write = self.injection.writes[-1](message)  # [M-1, K, d]
        head, norm = target.head_lookup(ids), self.norm
        scores = transition_scores(u, write, norm.weight, norm.eps, head, kernels)
        return scale_scores(scores, self.config)


def sizes_from_tensors(flat: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Infer rank, message size and reach from tensors, where no key states them."""
    readout, bias = shapes.get("injection.readouts.0.weight"), shapes.get("injection.bias")
    if flat.get("transfer_rank") is None and readout:
        flat["transfer_rank"] = readout[0]
    if flat.get("message_size") is None and bias:
        flat["message_size"] = bias[0]
    if flat.get("injection_reach") is None:
        flat["injection_reach"] = 2 if "earlier.bias" in shapes else 1
    return flat


BRIDGE = "selected_prefix_code_bridge"


def has_bridge(config: Config, names: Collection[str]) -> bool:
    inner = section(config, "config") or config
    return BRIDGE in section(inner, "dflash_config")


INJECTION: Names = {
    "injection.readouts.{i}.weight": "injection.readouts.{i}.weight",  # R_i
    "injection.writes.{i}.weight": "injection.writes.{i}.weight",  # W_i
    "injection.receiver_gate.weight": "injection.gates.weight#0",  # G_q
    "injection.predecessor_gate.weight": "injection.gates.weight#1",  # G_p
    "injection.message.weight": "injection.gates.weight#2",  # A
    "injection.bias": "injection.bias",  # b
    "transfer_codes": "transfer_codes.weight",  # C
    "transfer_ready": "",
    "earlier.writes.{i}.weight": "earlier.writes.{i}.weight",  # W2_i
    "earlier.gates.weight": "earlier.gates.weight",  # G2_q, G2_p and A2, stacked
    "earlier.bias": "earlier.bias",  # b2
}
TENSORS = BACKBONE | INJECTION

METHOD = Method(
    name="dspine",
    title="DSpine",
    config=DSpineConfig,
    network=DSpine,
    layouts=(
        Layout("DSpine, Tencent", TENSORS, read_flat, has_bridge, by_shape=True),
        Layout(
            "DSpine, reference",
            TENSORS | {"codes": "transfer_codes.weight"},
            read_reference,
            is_nested,
        ),
        Layout("DSpine, SpecForge", TENSORS, read_flat),
    ),
    large=LARGE,  # injections stay exact: drafts are sensitive to them, and they are small
    architectures=("DSpineDraftModel",),
    projector_type=("dspine",),
    keys=("dspine_config", f"dflash_config.{BRIDGE}"),
    marks=("injection.",),
    required="injection.",
    fill=sizes_from_tensors,
    codes="transfer_rank",
    flags=("transfer_ready",),
    several_texts=True,
    reference="dspine_mlx.convert.reference:dspine_round",
    objective="dspine_mlx.train.objectives.dspine:OBJECTIVE",
)

"""DSpine: adjacent causal injection in every draft layer (arXiv:2609.36173).

After each layer a slot receives what its predecessor predicts at that depth; after the last layer
the same injection takes the predecessor's token instead, which gives a K x K transition table.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from dspine_mlx.config import DSpineConfig
from dspine_mlx.dflash import DFlash, Proposal
from dspine_mlx.metal.inject import gated_message, residual_write

GATES = ("receiver_gate", "predecessor_gate", "message")  # G_q, G_p, A, as stacked in `gates`


class Injection(nn.Module):
    """h_t = u_t + RMS(u_t) W_l (sigmoid(G_q z_t + G_p z_{t-1} + b) * A z_{t-1})

    z_t = sqrt(r) R_l u_t / ||R_l u_t|| is what slot t predicts, in the space of the codes C.
    `gates.weight` [3a, r] stacks the checkpoint's receiver_gate G_q, predecessor_gate G_p and
    message A, so that one product serves all three.
    """

    def __init__(self, config: DSpineConfig):
        super().__init__()
        d, r, a = config.hidden_size, config.transfer_rank, config.message_size
        self.readouts = [nn.Linear(d, r, bias=False) for _ in range(config.num_hidden_layers)]
        self.writes = [nn.Linear(a, d, bias=False) for _ in range(config.num_hidden_layers)]
        self.gates = nn.Linear(r, 3 * a, bias=False)
        self.bias = mx.zeros((a,))

    def from_codes(self, codes: mx.array) -> mx.array:
        """[G_p; A] sqrt(r) c of known tokens' codes c [..., r]: [..., 2a]."""
        return project_rows(self.gates, codes * codes.shape[-1] ** 0.5, self.bias.shape[0])


class DSpine(DFlash):
    config: DSpineConfig

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        self.injection = Injection(config)
        self.transfer_codes = nn.Embedding(config.vocab_size, config.transfer_rank)

    def next_norm(self, layer: int) -> nn.RMSNorm:
        """The norm that reads what layer writes."""
        last = layer + 1 == len(self.layers)
        return self.norm if last else self.layers[layer + 1].input_layernorm

    def injected_backbone(
        self, anchor: mx.array, features: mx.array, cache: list[KVCache]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Run all layers; of slots 1..M after the last one: normalised states [M, d], the states u
        [M, d] before its injection, and its receiver terms s_t G_q y_t + b [M, a]."""
        h, context = self.embed_block(anchor), self.context(features)
        normed = self.layers[0].input_layernorm(h)
        code = self.injection.from_codes(self.transfer_codes(anchor.reshape(1)))[0]
        for i, (layer, c) in enumerate(zip(self.layers, cache, strict=True)):
            block = layer(h, normed, context, c)[0]
            u, norm = block[1:], self.next_norm(i)
            y = self.injection.readouts[i](u)
            message, receiver = gated_message(y, self.injection.gates(y), code, self.injection.bias)
            written, normed = residual_write(
                u, self.injection.writes[i](message), norm.weight, norm.eps
            )
            if i + 1 < len(self.layers):
                h = mx.concatenate([block[:1], written])[None]
                normed = mx.concatenate([norm(block[:1]), normed])[None]
        return normed, u, receiver

    def propose(self, anchor: int | mx.array, features: mx.array, cache: list[KVCache]) -> Proposal:
        """Propose M tokens after the anchor: T_t[i, j] = S_t(v_i, v_j), the last layer's injection
        redone with candidate i of slot t - 1 as the predecessor. See `DFlash.propose`."""
        states, u, receiver = self.injected_backbone(mx.array(anchor), features, cache)
        candidates, scores = self.candidates(states)
        table = self.transition_table(u[1:], receiver[1:], candidates)
        return Proposal(candidates, scores[0], table)

    def transition_table(self, u: mx.array, receiver: mx.array, candidates: mx.array) -> mx.array:
        """Last-write refinement for all pairs at once: [M-1, K, K] float32.

        u [M-1, d] and receiver [M-1, a] of slots 2..M are kept from the last layer: no readout or
        gate of theirs is computed again.
        """
        a = receiver.shape[-1]
        codes = self.transfer_codes(candidates[:-1])  # [M-1, K, r]
        previous = self.injection.from_codes(codes)
        message = mx.sigmoid(receiver[:, None] + previous[..., :a]) * previous[..., a:]
        write = self.injection.writes[-1](message)  # [M-1, K, d]
        _, states = residual_write(u[:, None], write, self.norm.weight, self.norm.eps)
        rows = self.target.head_rows(candidates[1:])  # [M-1, K, d]
        return self.scale_scores(states @ rows.swapaxes(-1, -2))


def project_rows(linear: nn.Linear, x: mx.array, first: int) -> mx.array:
    """x times the output rows of a Linear, quantised or not, from row `first` on."""
    if "scales" not in linear:
        return x @ linear.weight[first:].T
    biases = linear.get("biases")
    return mx.quantized_matmul(
        x,
        linear.weight[first:],
        scales=linear.scales[first:],
        biases=None if biases is None else biases[first:],
        group_size=linear.group_size,
        bits=linear.bits,
        mode=linear.mode,
    )

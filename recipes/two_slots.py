"""An experiment: DSpine with injection from two slots back as well as one (arXiv:2609.36173 leaves
it open).

After each layer a slot first receives what the slot two before it predicts there, and then, as in
DSpine, what its predecessor does:

    v_t = u_t + RMS(u_t) W2_l (sigmoid(G2_q z_t + G2_p z_{t-2} + b2) * A2 z_{t-2})
    h_t = v_t + RMS(v_t) W_l (sigmoid(G_q z'_t + G_p z'_{t-1} + b) * A z'_{t-1})

z are the readouts of u, and z' those of v, by the same R_l. Slot 2 receives from the anchor's code,
slot 1 nothing from two back. The transition table redoes only the second line, so it stays K x K.
`python -m recipes.ablation --only "DSpine, two slots back"` trains it.
"""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.drafters import dspine
from dspine_mlx.drafters.dflash import Caches
from dspine_mlx.drafters.dspine import DSpine, DSpineConfig, project_rows
from dspine_mlx.metal.kernel import OFF, Kernels
from dspine_mlx.target.model import Target
from dspine_mlx.train.blocks import Batch, Inputs, Layer, States
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.objectives.dspine import DSpineObjective, inject, unit


class Earlier(nn.Module):
    """W2_l, the stacked G2_q, G2_p, A2, and b2."""

    def __init__(self, config: DSpineConfig):
        super().__init__()
        r, a = config.transfer_rank, config.message_size
        self.writes = [
            nn.Linear(a, config.hidden_size, bias=False) for _ in range(config.num_hidden_layers)
        ]
        self.gates = nn.Linear(r, 3 * a, bias=False)
        self.bias = mx.zeros((a,))


class TwoSlots(DSpine):
    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        self.earlier = Earlier(config)

    def known(self, tokens: mx.array) -> mx.array:
        """[G2_p; A2] sqrt(r) C[x] of tokens [...]: [..., 2a]."""
        codes = self.transfer_codes(tokens)
        size = self.earlier.bias.shape[0]
        return project_rows(self.earlier.gates, codes * codes.shape[-1] ** 0.5, size)

    def receive(
        self, layer: int, u: mx.array, known: mx.array, replaced: mx.array | None = None
    ) -> mx.array:
        """v of slots [..., M, d]. known [..., 1, 2a]: the anchor's; with `replaced`, all M
        predecessors', which blocks that are marked receive in place of predictions."""
        size = self.earlier.bias.shape[0]
        products = self.earlier.gates(unit(self.injection.readouts[layer](u)))
        predicted = products[..., :-2, size:]
        if replaced is not None:
            predicted = mx.where(replaced[..., None, None], known[..., 1:-1, :], predicted)
        first = known[..., :1, :]
        previous = mx.concatenate([mx.zeros_like(first), first, predicted], axis=-2)
        previous = previous[..., : u.shape[-2], :]  # a block of one slot has no second
        receiver = products[..., :size] + self.earlier.bias
        return inject(u, receiver, previous, self.earlier.writes[layer])

    def injected_backbone(
        self,
        anchor: mx.array,
        features: mx.array,
        cache: Caches,
        target: Target,
        kernels: Kernels = OFF,
        slots: int | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """`DSpine.injected_backbone` of one text, with v in place of u."""
        h, context = self.embed_block(anchor, target, slots), self.context(features)
        normed = self.layers[0].input_layernorm(h)
        code, known = self.code_rows(anchor).take(), self.known(anchor[None])
        for i, (layer, c) in enumerate(zip(self.layers, cache, strict=True)):
            u = layer(h, normed, context, c)[0]
            v = mx.concatenate([u[:1], self.receive(i, u[1:], known)])
            h, normed, receiver = self.inject(i, v, code, kernels)
            h, normed = h[None], normed[None]
        return normed[0, 1:], v[1:], receiver


class TwoSlotsObjective(DSpineObjective):
    def start(self, network: TwoSlots, target: Target) -> None:
        """Start W2 and G2_p at zero, as W and G_p."""
        super().start(network, target)
        earlier, a = network.earlier, network.earlier.bias.shape[0]
        for write in earlier.writes:
            write.weight = mx.zeros_like(write.weight)
        gates = earlier.gates.weight
        earlier.gates.weight = mx.concatenate(
            [gates[:a], mx.zeros_like(gates[a : 2 * a]), gates[2 * a :]]
        )

    def states(self, network: TwoSlots, batch: Batch, inputs: Inputs, config: LossConfig) -> States:
        """`DSpine.states` of layers that end with v."""
        known = network.known(batch.predecessors)
        count = len(inputs.layers)
        replace_in = min(config.replacement_layers, count - 1)

        def receiving(i: int, layer: Layer) -> Layer:
            def run(h: mx.array, rows: mx.array, anchors: mx.array) -> mx.array:
                u = layer(h, rows, anchors)
                replaced = batch.replaced if i < replace_in else None
                v = network.receive(i, u[:, :, 1:], known, replaced)
                return mx.concatenate([u[:, :, :1], v], axis=2)

            return run

        layers = [receiving(i, layer) for i, layer in enumerate(inputs.layers)]
        return super().states(network, batch, inputs._replace(layers=layers), config)


OBJECTIVE = TwoSlotsObjective()
METHOD = replace(
    dspine.METHOD,
    name="dspine-two-slots",
    title="DSpine, two slots back",
    network=TwoSlots,
    architectures=(),
    keys=(),
    reference=None,
    objective="recipes.two_slots:OBJECTIVE",
)

"""What earlier slots predict, written into a slot's state after every layer (arXiv:2609.36173)."""

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.metal.inject import root_mean_square


class Messages(nn.Module):
    """Messages gated by receiver and sender, and each layer's write W_l [d, a].

    `gates.weight` [3a, r] stacks the receiver's gate G_q, the sender's gate G_p and the message A,
    so that one product serves all three.
    """

    def __init__(self, layers: int, hidden: int, rank: int, size: int):
        super().__init__()
        self.writes = [nn.Linear(size, hidden, bias=False) for _ in range(layers)]
        self.gates = nn.Linear(rank, 3 * size, bias=False)
        self.bias = mx.zeros((size,))

    def from_codes(self, codes: mx.array) -> mx.array:
        """Fold known tokens' codes c [..., r] with the gates: [G_p; A] sqrt(r) c [..., 2a]."""
        return project_rows(self.gates, codes * codes.shape[-1] ** 0.5, self.bias.shape[0])


class Injection(Messages):
    """h_t = u_t + RMS(u_t) W_l (sigmoid(G_q z_t + G_p z_{t-1} + b) * A z_{t-1})

    z_t = sqrt(r) R_l u_t / ||R_l u_t|| is what slot t predicts, in the space of the codes C.
    """

    def __init__(self, layers: int, hidden: int, rank: int, size: int):
        super().__init__(layers, hidden, rank, size)
        self.readouts = [nn.Linear(hidden, rank, bias=False) for _ in range(layers)]


class EarlierInjection(Messages):
    """The same from two slots back, before `Injection`, which takes v in place of u:

        v_t = u_t + RMS(u_t) W2_l (sigmoid(G2_q z_t + G2_p z_{t-2} + b2) * A2 z_{t-2})

    z are the readouts of u, by the same R_l. Slot 2 receives from the anchor's code, slot 1
    nothing. The paper injects from one slot back only.
    """

    def receive(
        self,
        layer: int,
        u: mx.array,
        y: mx.array,
        known: mx.array,
        replaced: mx.array | None = None,
    ) -> mx.array:
        """Compute v of the slots' states u [..., M, d], with y = R_l u [..., M, r].

        For training, many blocks at once. known [..., M, 2a]: all slots' predecessors, by
        `from_codes`, which blocks marked in `replaced` [...] receive in place of predictions.
        """
        size = self.bias.shape[0]
        products = self.gates(unit(y))
        predicted = products[..., :-2, size:]
        if replaced is not None:
            predicted = mx.where(replaced[..., None, None], known[..., 1:-1, :], predicted)
        first = known[..., :1, :]
        previous = mx.concatenate([mx.zeros_like(first), first, predicted], axis=-2)
        previous = previous[..., : u.shape[-2], :]  # a block of one slot has no second
        return inject(u, products[..., :size] + self.bias, previous, self.writes[layer])


def two_chains(u: mx.array) -> mx.array:
    """The slots' states [M, d], or [B, M, d], as slots 1, 3, 5, ... and slots 2, 4, 6, ... of each
    text: [2, n, d], or [2B, n, d]; if M is odd the second ends with zeros."""
    slots, size = u.shape[-2:]
    if slots % 2:
        u = mx.concatenate([u, mx.zeros_like(u[..., :1, :])], axis=-2)
    pairs = u.reshape(-1, (slots + 1) // 2, 2, size)
    return pairs.swapaxes(1, 2).reshape(-1, pairs.shape[1], size)


def one_chain(chains: mx.array, shape: tuple[int, ...]) -> mx.array:
    """The inverse of `two_chains`; shape: of its input."""
    n, size = chains.shape[1:]
    slots = chains.reshape(-1, 2, n, size).swapaxes(1, 2).reshape(-1, 2 * n, size)
    return slots[:, : shape[-2]].reshape(shape)


def inject(u: mx.array, receiver: mx.array, previous: mx.array, write: nn.Linear) -> mx.array:
    """u + RMS(u) W (sigmoid(receiver + G_p z) * A z), with previous = [G_p z, A z]."""
    a = receiver.shape[-1]
    message = mx.sigmoid(receiver + previous[..., :a]) * previous[..., a:]
    return u + root_mean_square(u) * write(message)


def unit(y: mx.array) -> mx.array:
    """sqrt(r) y / ||y||, the norm in float32 and at least 1e-12."""
    wide = y.astype(mx.float32)
    # the floor goes under the root, whose gradient at 0 is infinite
    norm = mx.sqrt(mx.maximum(wide.square().sum(axis=-1, keepdims=True), 1e-24))
    return (wide * (y.shape[-1] ** 0.5 / norm)).astype(y.dtype)


def project_rows(linear: nn.Linear, x: mx.array, first: int) -> mx.array:
    """Multiply x by a Linear's output rows from row `first` on, quantised or not."""
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

"""The K x K transition table: the last injection redone for every predecessor candidate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from dspine_mlx.metal.inject import root_mean_square, size_limit
from dspine_mlx.metal.kernel import OFF, Arrays, Kernel, Kernels, looked_up

MAX_CANDIDATES = 32  # one lane of a simdgroup each
COLUMNS = 128  # columns of the head's rows in threadgroup memory at a time: 16 KB at K = 32
PREDECESSORS = 8  # simdgroups of a threadgroup
PACKED_BITS = (2, 4, 8)  # fields that don't straddle 32-bit words


def candidates_limit(rows: mx.array) -> str | None:
    K = rows.shape[-1]
    return None if K <= MAX_CANDIDATES else f"{K} candidates are more than {MAX_CANDIDATES}"


def candidate_messages(
    receiver: mx.array, table: mx.array, rows: mx.array, kernels: Kernels = OFF
) -> mx.array:
    """Messages after every predecessor candidate: sigmoid(receiver_t + G_p z_i) * A z_i.

    receiver: [n, a], s_t G_q y_t + b; table: [N, 2a], rows [G_p; A] z of known tokens; rows:
    [n, K], the table's row of candidate i of slot t - 1. Returns [n, K, a].
    """
    return kernels.run(CANDIDATE_MESSAGES, receiver, table, rows)[0]


def candidate_messages_reference(receiver: mx.array, table: mx.array, rows: mx.array) -> Arrays:
    a = receiver.shape[-1]
    previous = table[rows]
    return [mx.sigmoid(receiver[:, None] + previous[..., :a]) * previous[..., a:]]


def launch_candidate_messages(
    function: Callable[..., Arrays], receiver: mx.array, table: mx.array, rows: mx.array
) -> Arrays:
    a = receiver.shape[-1]
    return function(
        inputs=[receiver, table, rows],
        template=[("T", receiver.dtype)],
        grid=(a, rows.size, 1),
        threadgroup=(min(a, 256), 1, 1),
        output_shapes=[(*rows.shape, a)],
        output_dtypes=[receiver.dtype],
    )


def compact_candidate_messages(
    receiver: mx.array, table: mx.array, rows: mx.array
) -> tuple[mx.array, ...]:
    rows, table = looked_up(rows, table)
    return receiver, table, rows


CANDIDATE_MESSAGES = Kernel(
    "candidate_messages",
    ["receiver", "table", "rows"],
    ["message"],
    candidate_messages_reference,
    launch_candidate_messages,
    limits=lambda *_: None,
    compact=compact_candidate_messages,
)


class Rows(NamedTuple):
    """A matrix [V, d] to look rows up in: floating, or packed by MLX's affine quantisation."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    group_size: int = 0
    bits: int = 0  # 0: floating

    def take(self, rows: mx.array) -> mx.array:
        if self.scales is None or self.biases is None:
            return self.weight[rows]
        return mx.dequantize(
            self.weight[rows],
            scales=self.scales[rows],
            biases=self.biases[rows],
            group_size=self.group_size,
            bits=self.bits,
        )


def transition_scores(
    u: mx.array,
    write: mx.array,
    norm: tuple[mx.array, float],
    head: Rows,
    rows: mx.array,
    kernels: Kernels = OFF,
) -> mx.array:
    """scores[t, i, j] = norm(u_t + RMS(u_t) write_{t,i}) . head[rows[t, j]], float32 [n, K, K].

    u: [n, d]; write: [n, K, d]; norm: weight [d] and eps; rows: [n, K].
    """
    scales, biases = (norm[0], norm[0]) if head.scales is None else (head.scales, head.biases)
    arrays = (u, write, norm[0], head.weight, scales, biases, rows)
    return kernels.run(TRANSITION_SCORES, *arrays, norm[1], head.group_size, head.bits)[0]


def transition_scores_reference(
    u: mx.array,
    write: mx.array,
    weight: mx.array,
    head: mx.array,
    scales: mx.array,
    biases: mx.array,
    rows: mx.array,
    eps: float,
    group_size: int,
    bits: int,
) -> Arrays:
    h = u[:, None] + root_mean_square(u)[:, None] * write
    states = mx.fast.rms_norm(h, weight, eps)
    table = Rows(head, scales, biases, group_size, bits) if bits else Rows(head)
    return [(states @ table.take(rows).swapaxes(-1, -2)).astype(mx.float32)]


def launch_transition_scores(
    function: Callable[..., Arrays],
    u: mx.array,
    write: mx.array,
    weight: mx.array,
    head: mx.array,
    scales: mx.array,
    biases: mx.array,
    rows: mx.array,
    eps: float,
    group_size: int,
    bits: int,
) -> Arrays:
    n, K = rows.shape
    groups = min(PREDECESSORS, K)
    sizes = {"K": K, "G": groups, "COLUMNS": COLUMNS, "BITS": bits, "GROUP": group_size}
    return function(
        inputs=[u, write, weight, head, scales, biases, rows, eps],
        template=list(sizes.items()),
        grid=(-(-K // groups) * groups * 32, n, 1),
        threadgroup=(groups * 32, 1, 1),
        output_shapes=[(n, K, K)],
        output_dtypes=[mx.float32],
    )


def transition_scores_limits(
    u: mx.array,
    write: mx.array,
    weight: mx.array,
    head: mx.array,
    scales: mx.array,
    biases: mx.array,
    rows: mx.array,
    eps: float,
    group_size: int,
    bits: int,
) -> str | None:
    if bits and bits not in PACKED_BITS:
        return f"{bits}-bit rows are not read packed"
    return size_limit(u.shape[-1]) or candidates_limit(rows)


def compact_transition_scores(
    u: mx.array,
    write: mx.array,
    weight: mx.array,
    head: mx.array,
    scales: mx.array,
    biases: mx.array,
    rows: mx.array,
    eps: float,
    group_size: int,
    bits: int,
) -> tuple[Any, ...]:
    if bits:
        rows, head, scales, biases = looked_up(rows, head, scales, biases)
    else:
        rows, head = looked_up(rows, head)
    return u, write, weight, head, scales, biases, rows, eps, group_size, bits


TRANSITION_SCORES = Kernel(
    "transition_scores",
    ["u", "write", "weight", "head", "scales", "biases", "rows", "eps"],
    ["scores"],
    transition_scores_reference,
    launch_transition_scores,
    transition_scores_limits,
    compact_transition_scores,
)

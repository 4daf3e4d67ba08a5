"""The K x K transition table: the last injection redone for every predecessor candidate."""

from collections.abc import Callable

import mlx.core as mx

from dspine_mlx.metal.inject import root_mean_square, size_limit
from dspine_mlx.metal.kernel import OFF, Arrays, Kernel, Kernels, Lookup

MAX_CANDIDATES = 32  # one lane of a simdgroup each
COLUMNS = 128  # columns of the head's rows in threadgroup memory at once: 16 KB at K = 32
PREDECESSORS = 8  # simdgroups per threadgroup
PACKED_BITS = (2, 4, 8)  # fields that don't straddle 32-bit words


def candidates_limit(rows: mx.array) -> str | None:
    K = rows.shape[-1]
    return None if K <= MAX_CANDIDATES else f"{K} candidates are more than {MAX_CANDIDATES}"


def candidate_messages(receiver: mx.array, codes: Lookup, kernels: Kernels = OFF) -> mx.array:
    """Messages after every predecessor candidate: sigmoid(receiver_t + G_p z_i) * A z_i.

    receiver: [n, a], s_t G_q y_t + b; codes: rows [G_p; A] z_i [2a] of known tokens, the indices
    [n, K] those of candidate i of slot t - 1. Returns [n, K, a].
    """
    return kernels.run(CANDIDATE_MESSAGES, receiver, codes)[0]


def candidate_messages_reference(receiver: mx.array, codes: Lookup) -> Arrays:
    a, previous = receiver.shape[-1], codes.take()
    return [mx.sigmoid(receiver[:, None] + previous[..., :a]) * previous[..., a:]]


def launch_candidate_messages(
    function: Callable[..., Arrays], receiver: mx.array, codes: Lookup
) -> Arrays:
    a, rows = receiver.shape[-1], codes.rows
    return function(
        inputs=[receiver, codes.weight, rows],
        template=[("T", receiver.dtype)],
        grid=(a, rows.size, 1),
        threadgroup=(min(a, 256), 1, 1),
        output_shapes=[(*rows.shape, a)],
        output_dtypes=[receiver.dtype],
    )


CANDIDATE_MESSAGES = Kernel(
    "candidate_messages",
    ["receiver", "table", "rows"],
    ["message"],
    candidate_messages_reference,
    launch_candidate_messages,
    limits=lambda _, codes: "packed codes are not read" if codes.bits else None,
)


def transition_scores(
    u: mx.array,
    write: mx.array,
    weight: mx.array,
    eps: float,
    head: Lookup,
    kernels: Kernels = OFF,
) -> mx.array:
    """scores[t, i, j] = norm(u_t + RMS(u_t) write_{t,i}) . head_{t,j}, float32 [n, K, K].

    u: [n, d]; write: [n, K, d]; weight [d] and eps: the norm's; head: rows [d] of the LM head, the
    indices [n, K] those of candidate j of slot t.
    """
    return kernels.run(TRANSITION_SCORES, u, write, weight, eps, head)[0]


def transition_scores_reference(
    u: mx.array, write: mx.array, weight: mx.array, eps: float, head: Lookup
) -> Arrays:
    h = u[:, None] + root_mean_square(u)[:, None] * write
    states = mx.fast.rms_norm(h, weight, eps)
    return [(states @ head.take().swapaxes(-1, -2)).astype(mx.float32)]


def launch_transition_scores(
    function: Callable[..., Arrays],
    u: mx.array,
    write: mx.array,
    weight: mx.array,
    eps: float,
    head: Lookup,
) -> Arrays:
    n, K = head.rows.shape
    groups = min(PREDECESSORS, K)
    sizes = {"K": K, "G": groups, "COLUMNS": COLUMNS, "BITS": head.bits, "GROUP": head.group_size}
    packing = [head.scales, head.biases] if head.bits else [weight, weight]  # the latter not read
    return function(
        inputs=[u, write, weight, head.weight, *packing, head.rows, eps],
        template=list(sizes.items()),
        grid=(-(-K // groups) * groups * 32, n, 1),
        threadgroup=(groups * 32, 1, 1),
        output_shapes=[(n, K, K)],
        output_dtypes=[mx.float32],
    )


def transition_scores_limits(
    u: mx.array, write: mx.array, weight: mx.array, eps: float, head: Lookup
) -> str | None:
    if head.bits and head.bits not in PACKED_BITS:
        return f"{head.bits}-bit rows are not read packed"
    return size_limit(u.shape[-1]) or candidates_limit(head.rows)


TRANSITION_SCORES = Kernel(
    "transition_scores",
    ["u", "write", "weight", "head", "scales", "biases", "rows", "eps"],
    ["scores"],
    transition_scores_reference,
    launch_transition_scores,
    transition_scores_limits,
)

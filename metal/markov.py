"""DSpark's transition table: base scores and a low-rank bias of each pair of candidates."""

from collections.abc import Callable

import mlx.core as mx

from dspine_mlx.metal.kernel import OFF, Arrays, Kernel, Kernels, Lookup
from dspine_mlx.metal.transition import candidates_limit

COLUMNS = 32  # columns of the rows in threadgroup memory at a time
THREADS = 256


def markov_scores(
    base: mx.array, predecessors: Lookup, successors: Lookup, kernels: Kernels = OFF
) -> mx.array:
    """scores[t, i, j] = base[t, j] + predecessor_{t,i} . successor_{t,j}, float32 [M, K, K].

    base: [M, K] float32; the others: rows [r] of w1 and w2, with indices [M, K].
    """
    return kernels.run(MARKOV_SCORES, base, predecessors, successors)[0]


def markov_scores_reference(base: mx.array, predecessors: Lookup, successors: Lookup) -> Arrays:
    bias = predecessors.take() @ successors.take().swapaxes(-1, -2)
    return [base[:, None] + bias.astype(mx.float32)]


def launch_markov_scores(
    function: Callable[..., Arrays], base: mx.array, predecessors: Lookup, successors: Lookup
) -> Arrays:
    M, K = base.shape
    sizes = {"K": K, "COLUMNS": COLUMNS, "TG": THREADS, "N": -(-K * K // THREADS)}
    return function(
        inputs=[base, predecessors.weight, successors.weight, predecessors.rows, successors.rows],
        template=list(sizes.items()),
        grid=(M * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(M, K, K)],
        output_dtypes=[mx.float32],
    )


def markov_scores_limits(base: mx.array, predecessors: Lookup, successors: Lookup) -> str | None:
    if predecessors.bits or successors.bits:
        return "packed rows are not read"
    return candidates_limit(base)


MARKOV_SCORES = Kernel(
    "markov_scores",
    ["base", "w1", "w2", "predecessors", "successors"],
    ["scores"],
    markov_scores_reference,
    launch_markov_scores,
    markov_scores_limits,
)

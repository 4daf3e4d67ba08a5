"""DSpark's transition table: base scores and a low-rank bias of each pair of candidates."""

from collections.abc import Callable

import mlx.core as mx

from dspine_mlx.metal.kernel import OFF, Arrays, Kernel, Kernels, looked_up
from dspine_mlx.metal.transition import candidates_limit

COLUMNS = 32  # columns of the rows in threadgroup memory at a time
THREADS = 256


def markov_scores(
    base: mx.array,
    w1: mx.array,
    w2: mx.array,
    predecessors: mx.array,
    successors: mx.array,
    kernels: Kernels = OFF,
) -> mx.array:
    """scores[t, i, j] = base[t, j] + w1[predecessors[t, i]] . w2[successors[t, j]], float32.

    base: [M, K] float32; w1: [V, r] and w2: [V', r]; predecessors, successors: [M, K], their rows.
    Returns [M, K, K].
    """
    return kernels.run(MARKOV_SCORES, base, w1, w2, predecessors, successors)[0]


def markov_scores_reference(
    base: mx.array, w1: mx.array, w2: mx.array, predecessors: mx.array, successors: mx.array
) -> Arrays:
    bias = w1[predecessors] @ w2[successors].swapaxes(-1, -2)
    return [base[:, None] + bias.astype(mx.float32)]


def launch_markov_scores(
    function: Callable[..., Arrays],
    base: mx.array,
    w1: mx.array,
    w2: mx.array,
    predecessors: mx.array,
    successors: mx.array,
) -> Arrays:
    M, K = base.shape
    sizes = {"K": K, "COLUMNS": COLUMNS, "TG": THREADS, "N": -(-K * K // THREADS)}
    return function(
        inputs=[base, w1, w2, predecessors, successors],
        template=list(sizes.items()),
        grid=(M * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(M, K, K)],
        output_dtypes=[mx.float32],
    )


def compact_markov_scores(
    base: mx.array, w1: mx.array, w2: mx.array, predecessors: mx.array, successors: mx.array
) -> tuple[mx.array, ...]:
    predecessors, w1 = looked_up(predecessors, w1)
    successors, w2 = looked_up(successors, w2)
    return base, w1, w2, predecessors, successors


MARKOV_SCORES = Kernel(
    "markov_scores",
    ["base", "w1", "w2", "predecessors", "successors"],
    ["scores"],
    markov_scores_reference,
    launch_markov_scores,
    limits=lambda base, *_: candidates_limit(base),
    compact=compact_markov_scores,
)

"""The selection walk: left to right over the transition table."""

import mlx.core as mx


def walk(first: mx.array, transitions: mx.array, noise: mx.array) -> mx.array:
    """path[t] = argmax_j(T_t[path[t-1], j] + noise[t, j]), the first maximum winning ties.

    first: [K]; transitions: [M-1, K, K]; noise: [M, K] (zeros: greedy; standard Gumbel: a sample of
    every row's softmax); the path: [M] candidate indices. All rows move at once; the moves are then
    composed by pointer doubling, ceil(log2(M)) steps in place of M.
    """
    start = mx.argmax(first + noise[0])
    if not len(transitions):
        return start[None]
    moves = mx.argmax(transitions + noise[1:, None, :], axis=-1)  # [M-1, K]
    step = 1
    while step < moves.shape[0]:
        joined = mx.take_along_axis(moves[step:], moves[:-step], axis=-1)
        moves = mx.concatenate([moves[:step], joined])
        step *= 2
    return mx.concatenate([start[None], moves[:, start]])

"""The selection walk: left to right over the transition table."""

from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx

from dspine_mlx.metal.kernel import OFF, Arrays, Kernel, Kernels

MAX_SLOTS, MAX_CANDIDATES = 31, 32
Scale: TypeAlias = float | mx.array


def walk(
    first: mx.array,
    transitions: mx.array,
    noise: mx.array,
    scale: Scale = 1.0,
    kernels: Kernels = OFF,
) -> tuple[mx.array, mx.array]:
    """path[t] = argmax_j(T_t[path[t-1], j] + noise[t, j]), the first maximum winning ties.

    first: [K]; transitions: [M-1, K, K]; noise: [M, K], all float32. Zero noise: the greedy path;
    noise = standard Gumbel / scale: a sample, slot by slot, of softmax(scale * row). Returns the
    path [M], candidate indices, and the float32 probs softmax(scale * T_t[path[t-1]]) of each row
    that was met [M, K]. Of B texts all arrays have a leading axis, and each text has a scale [B].
    """
    path, probs = kernels.run(WALK, first, transitions, noise, scale)
    return path, probs


def walk_reference(first: mx.array, transitions: mx.array, noise: mx.array, scale: Scale) -> Arrays:
    """Find every row's move at once, then compose the moves by pointer doubling: ceil(log2(M))
    steps in place of M."""
    path, rows = mx.argmax(first + noise[..., 0, :], axis=-1, keepdims=True), first[..., None, :]
    if transitions.shape[-3]:
        moves = mx.argmax(transitions + noise[..., 1:, None, :], axis=-1)  # [..., M-1, K]
        step = 1
        while step < moves.shape[-2]:
            later, earlier = moves[..., step:, :], moves[..., :-step, :]
            joined = mx.take_along_axis(later, earlier, axis=-1)
            moves = mx.concatenate([moves[..., :step, :], joined], axis=-2)
            step *= 2
        moves = mx.take_along_axis(moves, path[..., None], axis=-1)[..., 0]
        path = mx.concatenate([path, moves], axis=-1)
        met = mx.take_along_axis(transitions, path[..., :-1, None, None], axis=-2)[..., 0, :]
        rows = mx.concatenate([rows, met], axis=-2)
    if isinstance(scale, mx.array):
        scale = scale[..., None, None]
    return [path, mx.softmax(rows * scale, axis=-1)]


def launch_walk(
    function: Callable[..., Arrays],
    first: mx.array,
    transitions: mx.array,
    noise: mx.array,
    scale: Scale,
) -> Arrays:
    threads, shape = 256, noise.shape
    if noise.ndim == 2:
        first, transitions, noise = first[None], transitions[None], noise[None]
    texts = len(noise)
    return function(
        inputs=[first, transitions, noise, mx.broadcast_to(mx.array(scale), (texts,))],
        template=[("TG", threads)],
        grid=(threads, texts, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape[:-1], shape],
        output_dtypes=[mx.uint32, mx.float32],
    )


def walk_limits(
    first: mx.array, transitions: mx.array, noise: mx.array, scale: Scale
) -> str | None:
    M, K = noise.shape[-2:]
    if {first.dtype, transitions.dtype, noise.dtype} != {mx.float32}:
        return "scores and noise are not all float32"
    if 2 <= M <= MAX_SLOTS and K <= MAX_CANDIDATES:
        return None
    return f"{M} slots of {K} candidates; it takes 2 to {MAX_SLOTS} of up to {MAX_CANDIDATES}"


WALK = Kernel(
    "walk",
    ["first", "transitions", "noise", "scale"],
    ["path", "probs"],
    walk_reference,
    launch_walk,
    walk_limits,
    strided=True,
)

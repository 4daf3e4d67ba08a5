"""A slot's K best tokens of a large vocabulary, and their scores."""

import mlx.core as mx

from dspine_mlx.drafters.config import DrafterConfig

CHUNK = 128


def scale_scores(logits: mx.array, config: DrafterConfig) -> mx.array:
    """Float32 scores of raw logits: the config's multiplier, then cap * tanh(logits / cap).

    Both keep the order, so they are applied to the K candidates only.
    """
    scores = logits.astype(mx.float32)
    if config.output_multiplier != 1.0:
        scores = scores * config.output_multiplier
    if config.final_logit_softcapping is not None:
        cap = config.final_logit_softcapping
        scores = cap * mx.tanh(scores / cap)
    return scores


def rank(logits: mx.array, config: DrafterConfig) -> tuple[mx.array, mx.array]:
    """Indices of each row's K best entries of the head's logits [M, V], and their scores."""
    ids, values = top_k(logits, config.top_k)
    return ids, scale_scores(values, config)


def top_k(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest entries of each row [n, V], descending: indices and values, each [n, k].

    Equal values are listed in index order.
    """
    return sorted_top(*shortlist(logits, k), min(k, logits.shape[1]))


def shortlist(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Values and indices, each [n, m], that include each row's k largest.

    They lie in the k chunks with the largest maxima, so only chunk maxima and k chunks are
    partitioned, never a large vocabulary.
    """
    n, V = logits.shape
    if 4 * k * CHUNK > V:
        return logits, mx.broadcast_to(mx.arange(V, dtype=mx.uint32), (n, V))
    whole = V - V % CHUNK
    chunks = logits[:, :whole].reshape(n, -1, CHUNK)
    best = mx.argpartition(-chunks.max(axis=-1), k - 1, axis=-1)[:, :k]
    indices = (best[..., None] * CHUNK + mx.arange(CHUNK, dtype=mx.uint32)).reshape(n, -1)
    values = mx.take_along_axis(chunks, best[..., None], axis=1).reshape(n, -1)
    if whole < V:
        rest = mx.broadcast_to(mx.arange(whole, V, dtype=mx.uint32), (n, V - whole))
        indices = mx.concatenate([indices, rest], axis=1)
        values = mx.concatenate([values, logits[:, whole:]], axis=1)
    return values, indices


def sorted_top(values: mx.array, indices: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest values of each row, descending, and their entries of indices."""
    picked = mx.argpartition(-values, k - 1, axis=-1)[:, :k]
    indices = mx.take_along_axis(indices, picked, axis=-1)
    values = mx.take_along_axis(values, picked, axis=-1)
    order = mx.argsort(indices, axis=-1)  # argsort is stable: equal values stay in index order
    order = mx.take_along_axis(order, mx.argsort(-mx.take_along_axis(values, order, -1), -1), -1)
    return mx.take_along_axis(indices, order, axis=-1), mx.take_along_axis(values, order, axis=-1)

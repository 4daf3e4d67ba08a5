"""Batches: which sequences, which anchors, which draws, the same for a step in every run."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from dspine_mlx.train.blocks import Batch
from dspine_mlx.train.config import LossConfig, TrainConfig
from dspine_mlx.train.data import Sequence, order

Observe = Callable[[list[Sequence], int], tuple[mx.array, mx.array]]  # features and hidden, padded
ROUND = 32  # sequences are padded to a multiple of this, to keep the shapes few


def draw(sequences: list[Sequence], config: TrainConfig, step: int) -> list[Sequence]:
    """The sequences of optimiser step `step`: epochs of all of them, each shuffled anew."""
    count, picked = len(sequences), []
    for i in range(step * config.batch_size, (step + 1) * config.batch_size):
        picked.append(sequences[order(count, i // count, config.seed)[i % count]])
    return picked


def draw_anchors(sequence: Sequence, count: int, rng: np.random.Generator) -> np.ndarray:
    """Up to count positions whose next token belongs to the answer, in order."""
    possible = np.arange(sequence.start - 1, len(sequence.tokens) - 1)
    if len(possible) <= count:
        return possible
    return np.sort(rng.choice(possible, count, replace=False))


def assemble(
    sequences: list[Sequence],
    observe: Observe,
    num_anchors: int,
    slot_weights: np.ndarray,
    replacement: float,
    rng: np.random.Generator,
) -> Batch:
    """One forward's batch. slot_weights: [M]; replacement: the chance of a true predecessor."""
    S, M = len(sequences), len(slot_weights)
    longest = max(len(s.tokens) for s in sequences)
    n = -(-longest // ROUND) * ROUND
    anchors = [draw_anchors(s, num_anchors, rng) for s in sequences]
    A = max(map(len, anchors))
    tokens = np.zeros((S, n), np.int32)
    starts = np.zeros((S, A), np.int32)
    weights = np.zeros((S, A, M), np.float32)
    for i, (sequence, chosen) in enumerate(zip(sequences, anchors, strict=True)):
        tokens[i, : len(sequence.tokens)] = sequence.tokens
        starts[i, : len(chosen)] = chosen
        inside = chosen[:, None] + 1 + np.arange(M) < len(sequence.tokens)
        weights[i, : len(chosen)] = inside * slot_weights
    features, hidden = observe(sequences, n)
    replaced = rng.random((S, A)) < replacement
    return Batch(
        mx.array(tokens), features, hidden, mx.array(starts), mx.array(weights), mx.array(replaced)
    )


def slot_weights(config: LossConfig, count: int) -> np.ndarray:
    """exp(-i / position_decay) of the proposals i = 0 .. count - 1."""
    return np.exp(-np.arange(count) / config.position_decay).astype(np.float32)

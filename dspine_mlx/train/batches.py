"""Batches: a step's sequences, anchors and draws, the same in every run."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dspine_mlx.train.blocks import Batch
from dspine_mlx.train.config import LossConfig, TrainConfig
from dspine_mlx.train.data import Sequence, order

Observe = Callable[[list[Sequence], int], tuple[mx.array, mx.array]]  # features and hidden, padded
ROUND = 32  # sequences are padded to a multiple of this, to keep the shapes few


def draw(sequences: list[Sequence], config: TrainConfig, step: int) -> list[Sequence]:
    """Sequences of optimiser step `step`: epochs over all of them, each shuffled anew."""
    count, picked = len(sequences), []
    for i in range(step * config.batch_size, (step + 1) * config.batch_size):
        picked.append(sequences[order(count, i // count, config.seed)[i % count]])
    return picked


def draw_anchors(sequence: Sequence, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw up to count positions whose next token belongs to the answer, in order."""
    possible = np.arange(sequence.start - 1, len(sequence.tokens) - 1)
    if len(possible) <= count:
        return possible
    return np.sort(rng.choice(possible, count, replace=False))


@dataclass(frozen=True)
class Blocks:
    """The blocks of one sequence: their anchors [A], and which ones see true predecessors [A]."""

    sequence: Sequence
    anchors: np.ndarray
    replaced: np.ndarray


def draw_blocks(
    sequence: Sequence, count: int, replacement: float, seed: list[int] | int
) -> Blocks:
    """Draw up to count random blocks; replacement is each one's chance of true predecessors."""
    rng = np.random.default_rng(seed)
    anchors = draw_anchors(sequence, count, rng)
    return Blocks(sequence, anchors, rng.random(len(anchors)) < replacement)


def assemble(blocks: list[Blocks], observe: Observe, slot_weights: np.ndarray) -> Batch:
    """Assemble one forward's batch; slot_weights: [M]."""
    S, M = len(blocks), len(slot_weights)
    sequences = [b.sequence for b in blocks]
    A, n = max(len(b.anchors) for b in blocks), max(len(s.tokens) for s in sequences)
    n = -(-n // ROUND) * ROUND
    tokens, anchors = np.zeros((S, n), np.int32), np.zeros((S, A), np.int32)
    weights, replaced = np.zeros((S, A, M), np.float32), np.zeros((S, A), bool)
    for i, b in enumerate(blocks):
        length, count = len(b.sequence.tokens), len(b.anchors)
        tokens[i, :length] = b.sequence.tokens
        anchors[i, :count], replaced[i, :count] = b.anchors, b.replaced
        inside = b.anchors[:, None] + 1 + np.arange(M) < length
        weights[i, :count] = inside * slot_weights
    features, hidden = observe(sequences, n)
    arrays = (mx.array(x) for x in (anchors, weights, replaced))
    return Batch(mx.array(tokens), features, hidden, *arrays)


def slot_weights(config: LossConfig, count: int) -> np.ndarray:
    """exp(-i / position_decay) of the proposals i = 0 .. count - 1."""
    return np.exp(-np.arange(count) / config.position_decay).astype(np.float32)

"""Peak memory of an optimiser step against the rows of full-vocabulary logits held at once.

    python -m tests.bench.train_memory

A DSpine drafter with random weights, a vocabulary of 49,152, 2 sequences x 64 blocks x 7 proposals;
the last line holds all of the rows at once, as without chunks.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from dspine_mlx.train.config import LossConfig, TrainConfig
from dspine_mlx.train.data import Sequence
from dspine_mlx.train.features import observe
from dspine_mlx.train.loop import Source, Trainer
from tests.bench.prefill_memory import SHAPE, random_pair

VOCABULARY, SEQUENCES, BLOCKS, PROPOSALS, LAYERS = 49_152, 2, 64, 7, 4
ROWS = SEQUENCES * BLOCKS * PROPOSALS


def peak(step: Callable[[], object]) -> float:
    """MB beyond what was held before, of the second step (the first one makes the optimiser)."""
    step()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    step()
    return (mx.get_peak_memory() - before) / 1e6


def main() -> None:
    settings: dict[str, Any] = {"num_hidden_layers": 2, "transfer_rank": 64, "message_size": 32}
    settings |= {"block_size": PROPOSALS + 1, "target_layer_ids": [1, 2]}
    _, drafter = random_pair(SHAPE | {"vocab_size": VOCABULARY}, LAYERS, settings)
    rng = np.random.default_rng(0)
    sequences = [
        Sequence(i, rng.integers(4, VOCABULARY, 192).astype(np.int32), 32) for i in range(SEQUENCES)
    ]
    source = Source(sequences, observe(drafter.target, drafter.config.target_layer_ids))
    one = ROWS * VOCABULARY * 4 / 1e6
    print(f"{ROWS} rows x {VOCABULARY} logits in float32: {one:.0f} MB an array")
    for rows in (56, 112, 224, 448, ROWS):
        config = TrainConfig(
            steps=4, batch_size=SEQUENCES, num_anchors=BLOCKS, logit_rows=rows, learning_rate=1e-4
        )
        trainer = Trainer(drafter, source, config, LossConfig())
        print(f"logit_rows {rows}: peak {peak(trainer.train_step):.0f} MB", flush=True)


if __name__ == "__main__":
    main()

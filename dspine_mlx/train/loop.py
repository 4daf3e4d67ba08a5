"""The training loop: steps, log, checkpoints, evaluation, early stop."""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.train.batches import Observe, assemble, draw, draw_blocks, slot_weights
from dspine_mlx.train.blocks import Batch
from dspine_mlx.train.config import LossConfig, TrainConfig
from dspine_mlx.train.data import Sequence
from dspine_mlx.train.losses import LossRows, Schedule, acceptance_length
from dspine_mlx.train.step import drafter_loss

CHECKPOINT, BEST = "checkpoint.safetensors", "best.safetensors"
Record = dict[str, float | int]


@dataclass
class Source:
    """Sequences and the target's features of them."""

    sequences: list[Sequence]
    observe: Observe


class Trainer:
    """A drafter, its optimiser and a step count: the content of a checkpoint.

    A step's draws depend only on the seed and its number, so a resumed run repeats an uninterrupted
    one bit for bit.
    """

    def __init__(self, drafter: Drafter, source: Source, config: TrainConfig, loss: LossConfig):
        network = drafter.network
        causal = all(layer.self_attn.causal for layer in network.layers)
        if config.short_block_size is not None and not causal:
            raise InputError(
                "short_block_size needs slots that see earlier slots only; this drafter's see all"
            )
        self.drafter, self.source, self.config, self.loss = drafter, source, config, loss
        self.optimizer = optim.AdamW(
            learning_rate=config.learning_rate,
            betas=list(config.betas),
            weight_decay=0.0,
            bias_correction=True,
        )
        network.train()
        self.optimizer.init(network.trainable_parameters())
        self.gradient = nn.value_and_grad(network, self.forward)
        self.step = 0
        self.best, self.bad = -math.inf, 0

    def forward(self, batch: Batch, schedule: Schedule) -> tuple[mx.array, LossRows]:
        return drafter_loss(
            self.drafter,
            batch,
            schedule,
            self.loss,
            checkpoint=self.config.checkpoint_layers,
            logit_rows=self.config.logit_rows,
        )

    @property
    def progress(self) -> float:
        return self.step / self.config.steps

    @property
    def warmup(self) -> int:
        return math.ceil(self.config.warmup_ratio * self.config.steps)

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine to 0."""
        if self.step < self.warmup:
            return self.config.learning_rate * (self.step + 1) / self.warmup
        x = (self.step - self.warmup) / max(1, self.config.steps - self.warmup)
        return self.config.learning_rate * 0.5 * (1 + math.cos(math.pi * x))

    @property
    def proposals(self) -> int:
        """Number of proposals trained in this step. Slots of a causal block don't see later ones,
        so a shorter block teaches them the same at less cost."""
        config, drafter = self.config, self.drafter.config
        if config.short_block_size is None or self.progress >= config.short_ratio:
            return drafter.num_proposals
        return config.short_block_size - drafter.num_unused_slots

    def batches(self) -> list[Batch]:
        """The micro-batches of this step."""
        config, weights = self.config, slot_weights(self.loss, self.proposals)
        replacement = self.loss.replacement(self.progress)
        blocks = [
            draw_blocks(s, config.num_anchors, replacement, [config.seed, self.step, i])
            for i, s in enumerate(draw(self.source.sequences, config, self.step))
        ]
        size = config.batch_size // config.accumulation
        return [
            assemble(blocks[i : i + size], self.source.observe, weights)
            for i in range(0, len(blocks), size)
        ]

    def train_step(self) -> Record:
        """Run one optimiser step; returns its record for the log."""
        batches = self.batches()
        schedule = Schedule(
            mx.array(self.loss.alpha(self.progress)),
            mx.array(self.loss.alignment_weight * min(1.0, (self.step + 1) / max(1, self.warmup))),
            sum(batch.weights.sum() for batch in batches),
            mx.array(self.loss.backbone(self.progress)),
            mx.array(self.loss.length(self.progress)),
            sum((batch.weights > 0).sum() for batch in batches),
        )
        total, grads, estimate = mx.array(0.0), None, Estimate()
        for batch in batches:
            (loss, rows), part = self.gradient(batch, schedule)
            grads = part if grads is None else tree_map(mx.add, grads, part)
            total = total + loss
            estimate.add(batch, rows)
            mx.eval(total, grads, estimate.sums)
        grads, norm = optim.clip_grad_norm(grads, self.config.clip)
        if not mx.isfinite(norm).item():
            raise FloatingPointError(
                f"the gradient is not finite at step {self.step}; try a lower learning rate"
            )
        rate = self.learning_rate()
        self.optimizer.learning_rate = mx.array(rate)
        self.optimizer.update(self.drafter.network, grads)
        mx.eval(self.drafter.network.parameters(), self.optimizer.state)
        self.step += 1
        record: Record = {"step": self.step, "loss": total.item(), **estimate.record()}
        return record | {"norm": norm.item(), "learning_rate": rate}

    def evaluate(self, held_out: Source) -> Record:
        """Compute teacher-forced estimates on held-out sequences, with the same anchors every
        time."""
        estimate, count = Estimate(), min(32, self.config.num_anchors)
        weights = slot_weights(self.loss, self.drafter.config.num_proposals)
        schedule = Schedule(mx.array(self.loss.ce_weight), mx.array(0.0), mx.array(1.0))
        blocks = [draw_blocks(s, count, 0.0, i) for i, s in enumerate(held_out.sequences)]
        size = self.config.batch_size // self.config.accumulation
        for i in range(0, len(blocks), size):
            batch = assemble(blocks[i : i + size], held_out.observe, weights)
            _, rows = self.forward(batch, schedule)
            estimate.add(batch, rows)
            mx.eval(estimate.sums)
        return {f"held_out_{name}": value for name, value in estimate.record().items()}

    def improved(self, acceptance: float) -> bool:
        """Record a held-out acceptance; returns whether it is the best so far."""
        better = acceptance > self.best
        self.best, self.bad = (acceptance, 0) if better else (self.best, self.bad + 1)
        return better

    @property
    def finished(self) -> bool:
        patience = self.config.patience
        return self.step >= self.config.steps or (patience is not None and self.bad >= patience)

    def save(self, folder: Path) -> None:
        """Write the checkpoint beside the old one and move it into place."""
        weights = {f"drafter.{n}": v for n, v in tree_flatten(self.drafter.network.parameters())}
        state = {f"optimizer.{n}": v for n, v in tree_flatten(self.optimizer.state)}
        metadata = {"step": self.step, "best": self.best, "bad": self.bad}
        write_safely(folder / CHECKPOINT, weights | state, metadata)

    def restore(self, folder: Path) -> None:
        path = folder / CHECKPOINT
        try:
            tensors, metadata = mx.load(str(path), return_metadata=True)
        except RuntimeError as error:
            raise InputError(f"{path} can't be read: {error}") from error
        parts: dict[str, list[tuple[str, mx.array]]] = {"drafter": [], "optimizer": []}
        for name, value in tensors.items():
            part, _, rest = name.partition(".")
            parts[part].append((rest, value))
        network = self.drafter.network
        network.load_weights(parts["drafter"])
        self.drafter = network.bind(self.drafter.verifier)  # d2t decides the head's rows
        self.optimizer.state = tree_unflatten(parts["optimizer"])
        self.step, self.bad = int(metadata["step"]), int(metadata["bad"])
        self.best = float(metadata["best"])

    def save_best(self, folder: Path) -> None:
        """Keep the drafter's present weights while training continues."""
        write_safely(folder / BEST, dict(tree_flatten(self.drafter.network.parameters())), {})

    def restore_best(self, folder: Path) -> None:
        """Restore the drafter that `save_best` kept, if it kept one."""
        if (folder / BEST).exists():
            self.drafter.network.load_weights(str(folder / BEST))


class Estimate:
    """Sums of teacher-forced results over batches."""

    def __init__(self) -> None:
        self.sums = mx.zeros((5,))

    def add(self, batch: Batch, rows: LossRows) -> None:
        greedy, blocks = acceptance_length(batch.weights, rows.agree)
        sampled, _ = acceptance_length(batch.weights, rows.overlap)
        ce, weight = (batch.weights * rows.ce).sum(), batch.weights.sum()
        self.sums = self.sums + mx.stack([greedy, sampled, blocks, ce, weight])

    def record(self) -> Record:
        """Acceptance lengths, greedy and at temperature 1, and the base logits' cross-entropy."""
        greedy, sampled, blocks, ce, weight = self.sums.tolist()
        return {"greedy": greedy / blocks, "sampled": sampled / blocks, "ce": ce / weight}


def write_safely(path: Path, tensors: dict[str, mx.array], metadata: dict[str, Any]) -> None:
    """Write a safetensors file so that it is either complete or absent, whatever happens
    meanwhile."""
    temporary = path.with_name(f".{path.stem}.part.safetensors")
    try:
        mx.save_safetensors(str(temporary), tensors, {k: str(v) for k, v in metadata.items()})
    except RuntimeError:
        temporary.unlink(missing_ok=True)
        raise
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Log:
    """One JSON object per line. After a resume it continues from the checkpoint's step."""

    def __init__(self, path: Path, step: int):
        kept = [r for r in read_log(path) if r["step"] <= step]
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(temporary, path)
        self.file = path.open("a")

    def add(self, record: Record) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()


def read_log(path: Path) -> Iterator[Record]:
    """Read the records of a log; a line cut off by the end of the process is skipped."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def train(
    trainer: Trainer,
    held_out: Source,
    folder: Path,
    *,
    export: Callable[[], None],
    report: Callable[[Record], None] = lambda record: None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Train until the end, an early stop or `stop()`; returns whether training is finished.

    Checkpoints go to folder. `export` is called whenever the held-out acceptance is the best so
    far, or after the last step if nothing is held out.
    """
    log, config = Log(folder / "log.jsonl", trainer.step), trainer.config
    finished_before = trainer.finished
    while not trainer.finished and not stop():
        record = trainer.train_step()
        due = trainer.step % config.evaluate_every == 0 or trainer.step == config.steps
        if held_out.sequences and due:
            record |= trainer.evaluate(held_out)
            if trainer.improved(record["held_out_greedy"]):
                export()
        log.add(record)
        report(record)
        if trainer.step % config.save_every == 0:
            trainer.save(folder)
    trainer.save(folder)
    if trainer.finished and not (finished_before or held_out.sequences):
        export()
    return trainer.finished

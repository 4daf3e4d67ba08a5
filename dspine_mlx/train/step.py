"""The forward and the loss of a training step, with the terms of the drafter's own method."""

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.train.blocks import Batch, Context, Inputs, States, embed, run
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.losses import LossRows, Schedule, length_loss
from dspine_mlx.train.objectives import objective_of


def forward(
    drafter: Drafter, batch: Batch, config: LossConfig, *, checkpoint: bool = False
) -> States:
    """Compute the states that `drafter.propose` would reach for each block after the true
    tokens."""
    network = drafter.network
    features = batch.features.astype(network.fc.weight.dtype)
    context = Context(network.context(features), batch.anchors)
    h = embed(drafter, batch)
    layers = [run(layer, checkpoint) for layer in network.layers]
    return objective_of(drafter).states(network, batch, Inputs(layers, h, context), config)


def drafter_loss(
    drafter: Drafter,
    batch: Batch,
    schedule: Schedule,
    config: LossConfig,
    *,
    checkpoint: bool = False,
    logit_rows: int = 2048,
) -> tuple[mx.array, LossRows]:
    """Compute this batch's share of the step's loss, and the rows [S, A, M] it is made of."""
    objective = objective_of(drafter)
    states = forward(drafter, batch, config, checkpoint=checkpoint)
    inputs, shared = objective.row_inputs(drafter, batch, states)
    flat = [x.reshape(-1, *x.shape[3:]) for x in inputs]
    row_loss: Callable[..., LossRows] = partial(objective.row_loss, drafter, config)
    count = flat[0].shape[0]
    if count > logit_rows:
        row_loss = mx.checkpoint(row_loss)  # a chunk's logits are recomputed in the backward pass
    chunks = [
        row_loss(
            schedule.alpha,
            *objective.scheduled(schedule),
            *shared,
            *(x[i : i + logit_rows] for x in flat),
        )
        for i in range(0, count, logit_rows)
    ]
    parts = [mx.concatenate(part) for part in zip(*chunks, strict=True)]
    rows = LossRows(*(part.reshape(batch.weights.shape) for part in parts))
    loss, aligned = rows.loss, objective.alignment(drafter, batch, states, rows.ce, config)
    if aligned is not None:
        loss = loss + schedule.beta * aligned
    loss = (batch.weights * loss).sum() / schedule.denominator
    if config.length_weight:
        length = length_loss(batch.weights, rows, config) / schedule.proposals
        loss = (1 - schedule.length) * loss + schedule.length * length
    return loss, rows

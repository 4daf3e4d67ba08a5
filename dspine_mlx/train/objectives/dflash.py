"""DFlash's objective, and the base of all others: hooks with the backbone's defaults."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.target.model import Target
from dspine_mlx.train.blocks import Batch, Inputs, States
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.losses import LossRows, Schedule, all_logits, distributions, draft_ids

DFLASH_KEYS = ("mask_token_id", "target_layer_ids")
Rows = list[mx.array]


class Objective:
    """CE of every slot's base logits (alpha = 1), or the papers' mix with L1."""

    loss = LossConfig(ce_weight=1.0)  # the published constants
    block_size = 16  # of a new drafter
    settings: Mapping[str, Any] = {}  # of a new drafter's config
    extensions: Mapping[str, Any] = {}  # the same, unpublished: only this package reads them
    reduced_in_hf = False  # whether the hf layout has a place for a reduced draft vocabulary

    def start(self, network: DFlash, target: Target) -> None:
        """Set starting weights that are not random."""

    def states(self, network: DFlash, batch: Batch, inputs: Inputs, config: LossConfig) -> States:
        """Compute the states that `network.propose` would reach, for all blocks."""
        h, first = inputs.h, network.config.first_slot
        for layer in inputs.layers:
            h = layer(h, *inputs.context)
        return States(network.norm(h[:, :, first : first + batch.weights.shape[2]]))

    def row_inputs(self, drafter: Drafter, batch: Batch, states: States) -> tuple[Rows, Rows]:
        """Inputs of `row_loss` besides alpha: those of every row, [S, A, M, ...] each, and those
        that all rows share. Trained parameters must be among them: chunks of rows are
        checkpointed."""
        labels = draft_ids(drafter, batch.labels)
        return [batch.gather(batch.hidden, 0), labels, states.base], []

    def scheduled(self, schedule: Schedule) -> list[mx.array]:
        """Inputs of `row_loss` right after alpha: other quantities that change from step to
        step."""
        return []

    def row_loss(
        self, drafter: Drafter, config: LossConfig, alpha: mx.array, *arrays: mx.array
    ) -> LossRows:
        """The loss of R rows; arrays: the shared inputs, then each row's, flat."""
        hidden, labels, base = arrays
        pq = distributions(drafter, hidden, all_logits(drafter, base))
        ce = pq.cross_entropy(labels)
        return pq.rows(pq.distribution_loss(ce, alpha, config), ce)

    def alignment(
        self, drafter: Drafter, batch: Batch, states: States, ce: mx.array, config: LossConfig
    ) -> mx.array | None:
        """A loss [S, A, M] on the states of every layer, whose weight is `alignment_weight`."""
        return None

    def sections(
        self, config: DrafterConfig, loss: LossConfig, flat: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Sections of a published config.json. Keys moved into one are removed from flat."""
        return {"dflash_config": {key: flat.pop(key) for key in DFLASH_KEYS}}


OBJECTIVE = Objective()

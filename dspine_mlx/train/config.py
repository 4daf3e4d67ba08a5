"""Training constants, with the papers' values as defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dspine_mlx.arguments import check_real
from dspine_mlx.errors import InputError

Reference = Literal["token", "distribution"]
Alignment = Literal["embedding", "token"]
COUNTS = (
    *("steps", "batch_size", "accumulation", "num_anchors", "max_length", "logit_rows"),
    *("save_every", "evaluate_every", "short_block_size", "patience"),
)


@dataclass(frozen=True)
class LossConfig:
    """Constants of the loss.

    The distribution loss of a slot is alpha CE + (1 - alpha) L1. alpha goes linearly from ce_start
    to ce_weight between the shares ce_hold and ce_end of the run; the papers keep it at ce_weight.
    """

    ce_weight: float = 0.1  # alpha; DFlash: 1
    ce_start: float | None = None  # None: ce_weight, throughout
    ce_hold: float = 0.0
    ce_end: float = 0.5
    reference: Reference = "token"  # CE against the text's token, or the target's distribution
    position_decay: float = 7.0  # slot i of 0, 1, ... has the weight exp(-i / decay); DSpark: 4
    refined_weight: float = 1.0
    candidate_mass_threshold: float = 1e-4  # L1 on candidates only where they hold more than this
    alignment: Alignment = (
        "embedding"  # 1 - cos with the label's code, or CE of the layer's own token
    )
    alignment_weight: float = 0.5  # beta, reached when the learning rate's warm-up ends
    replacement_layers: int = 3  # layers whose predecessor may be the true one
    replacement_probability: float = 0.5
    replacement_hold_ratio: float = 1 / 6  # at that probability until this share of the run,
    replacement_end_ratio: float = 1 / 3  # then linearly down to 0 at this one
    confidence_weight: float = 1.0  # DSpark
    backbone_start: float = 1.0  # Domino: share of the backbone's own loss, which falls
    backbone_ratio: float = 1.0  # to 0 over this share of the run
    length_weight: float = 0.0  # share of the loss on the expected accepted length,
    length_start: float = 0.7  # from this share of the run on
    length_greedy: float = 0.5  # share of greedy decoding in it; the rest is temperature 1
    injection: bool = True  # False: the base states get no message (ablation)
    refinement: bool = True  # False: no loss on refined scores (ablation)

    def __post_init__(self) -> None:
        for name in ("length_weight", "length_start", "length_greedy"):
            check_real(f"loss.{name}", getattr(self, name), 0, 1)

    def alpha(self, progress: float) -> float:
        """Share of CE at a share of the run in [0, 1]."""
        start = self.ce_weight if self.ce_start is None else self.ce_start
        return ramp(progress, self.ce_hold, self.ce_end, start, self.ce_weight)

    def backbone(self, progress: float) -> float:
        """Share of the loss on logits without the correction."""
        return ramp(progress, 0.0, self.backbone_ratio, self.backbone_start, 0.0)

    def length(self, progress: float) -> float:
        """Share of the loss on the expected accepted length."""
        return self.length_weight if progress >= self.length_start else 0.0

    def replacement(self, progress: float) -> float:
        """Chance that a block's first layers see the true predecessor."""
        first, end = self.replacement_hold_ratio, self.replacement_end_ratio
        return ramp(progress, first, end, self.replacement_probability, 0.0)


@dataclass(frozen=True)
class TrainConfig:
    """Constants of the training loop."""

    steps: int = 2000
    batch_size: int = 8  # sequences per optimiser step
    accumulation: int = 1  # forwards that a step is split into
    num_anchors: int = 512  # blocks per sequence
    learning_rate: float = 6e-4
    warmup_ratio: float = 0.04
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 1.0
    short_block_size: int | None = None  # slots of the first steps: a causal block may grow
    short_ratio: float = 0.5  # share of the run after which the whole block is trained
    max_length: int = 4096
    seed: int = 0
    checkpoint_layers: bool = False  # recompute the layers in the backward pass, to save memory
    logit_rows: int = 2048  # rows of full-vocabulary logits held at once
    save_every: int = 200
    evaluate_every: int = 200
    patience: int | None = None  # evaluations without a better acceptance before an early stop

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1")
        for name in ("learning_rate", "clip", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for name in ("warmup_ratio", "short_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must lie in [0, 1]")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas are {self.betas}; each must be from 0 to below 1")
        if self.batch_size % self.accumulation:
            raise InputError(
                f"batch_size {self.batch_size} can't be split into {self.accumulation} equal parts "
                "(accumulation)"
            )


def read_loss(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they were stored or typed; `distribution` had another name once."""
    renamed = {"reference": "distribution"} if settings.get("reference") == "law" else {}
    return {**settings, **renamed}


def ramp(x: float, start: float, end: float, first: float, last: float) -> float:
    """Linear from `first` at `start` to `last` at `end`, clamped outside."""
    if x >= end:
        return last
    return first + (last - first) * max(0.0, x - start) / (end - start)

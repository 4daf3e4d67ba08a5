"""Recording full-width rounds, and fitting a calibration to them."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.sample_utils import Sampler as SamplerFunction
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.generate import stream_generate
from dspine_mlx.round.policy import Fixed
from dspine_mlx.round.select import Draft
from dspine_mlx.verify_length.calibration import (
    Calibration,
    chance_errors,
    fit,
    survival_errors,
    uncalibrated,
)

log = logging.getLogger(__name__)
LEAST_ROUNDS = 60  # with fewer, a fit is no better than none


class Recorder(Fixed):
    """Offers every block whole, and keeps its evidence and how many of its tokens stood."""

    def __init__(self, slots: int):
        super().__init__(slots, needs_evidence=True)
        self.evidence: list[list[float]] = []
        self.accepted: list[int] = []
        self.whole = False

    def length(self, draft: Draft, limit: int, depth: int, seconds: float) -> int:
        self.whole = limit >= self.tokens
        if self.whole:
            assert draft.evidence is not None
            self.evidence.append(draft.evidence.log_odds())
        return min(self.tokens, limit)

    def learn(self, accepted: int, offered: int) -> None:
        if self.whole and offered == self.tokens:
            self.accepted.append(accepted)


@dataclass
class Rounds:
    """n rounds that offered all M tokens."""

    evidence: np.ndarray  # [n, M]
    accepted: np.ndarray  # [n]

    def __add__(self, other: "Rounds") -> "Rounds":
        return Rounds(
            np.concatenate([self.evidence, other.evidence]),
            np.concatenate([self.accepted, other.accepted]),
        )

    def __getitem__(self, part: slice) -> "Rounds":
        return Rounds(self.evidence[part], self.accepted[part])


def record(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    drafter: Drafter,
    prompt: str | list[int],
    sampler: SamplerFunction,
    max_tokens: int,
) -> Rounds:
    """The rounds of one text."""
    M = drafter.config.num_proposals
    recorder = Recorder(M)
    options: dict[str, Any] = {"sampler": sampler, "max_tokens": max_tokens}
    for _ in stream_generate(model, tokenizer, prompt, drafter, verify_length=recorder, **options):
        pass
    evidence = np.array(recorder.evidence[: len(recorder.accepted)], np.float64).reshape(-1, M)
    return Rounds(evidence, np.array(recorder.accepted, int))


@dataclass
class Fit:
    """A calibration, and the errors [M] of each slot's survival on rounds that `trial`, which may
    have been fitted on fewer rounds than it, has not seen."""

    calibration: Calibration
    trial: Calibration
    held_out: Rounds
    before: np.ndarray
    after: np.ndarray
    by_chance: np.ndarray  # what an exact calibration would show on as many rounds


def calibrate(texts: list[Rounds], held_out: list[Rounds] | None = None) -> Fit:
    """Fit on texts and measure on held-out ones.

    Without these, every other text is held out at first, and then all of them are fitted on; a
    single text is halved. With too few rounds the evidence stays uncalibrated, with a warning.
    """
    fitted, measured = (sum_of(texts), sum_of(held_out)) if held_out else split(texts)
    plain = uncalibrated(measured.evidence.shape[1])
    before = survival_errors(plain, measured.evidence, measured.accepted)
    every = fitted if held_out else measured + fitted
    if min(len(fitted.accepted), len(measured.accepted)) < LEAST_ROUNDS // 2:
        log.warning(
            "%s rounds are too few to calibrate on, %s are needed; give more or longer prompts",
            len(every.accepted),
            LEAST_ROUNDS,
        )
        by_chance = chance_errors(plain, measured.evidence)
        return Fit(plain, plain, measured, before, before, by_chance)
    trial = fit(fitted.evidence, fitted.accepted)
    after = survival_errors(trial, measured.evidence, measured.accepted)
    final = trial if held_out else fit(every.evidence, every.accepted)
    final = replace(final, ece_before=float(before.mean()), ece_after=float(after.mean()))
    return Fit(final, trial, measured, before, after, chance_errors(trial, measured.evidence))


def split(texts: list[Rounds]) -> tuple[Rounds, Rounds]:
    """Rounds to fit and others to measure."""
    if len(texts) == 1:
        log.warning("there is one prompt only: its second half stands for held-out text")
        half = len(texts[0].accepted) // 2
        return texts[0][:half], texts[0][half:]
    return sum_of(texts[1::2]), sum_of(texts[::2])


def sum_of(texts: Iterable[Rounds]) -> Rounds:
    total, *rest = texts
    for rounds in rest:
        total = total + rounds
    return total

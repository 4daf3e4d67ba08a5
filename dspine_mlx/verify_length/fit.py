"""Recording full-width rounds, and fitting a calibration to them."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.sample_utils import Sampler as SamplerFunction
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.generate import stream_generate
from dspine_mlx.round.lookup import Copy, CopyChances, Lookup
from dspine_mlx.round.policy import Fixed
from dspine_mlx.round.select import Draft
from dspine_mlx.verify_length.calibration import (
    LIMIT,
    Calibration,
    calibrated,
    sigmoid,
    uncalibrated,
)
from dspine_mlx.verify_length.disagreement import DRAFTED, INDEPENDENT, Disagreement, logit

log = logging.getLogger(__name__)
LEAST_ROUNDS = 60  # with fewer, a fit is no better than none
TEMPERATURES = np.logspace(-1, 1, 41)
PRIOR = 2.0  # information in the priors b = 0, s = 1 / T and log T = 0 each
STEPS = 6  # of `scoring`, each temperature starts where the previous one ended
BINS = 15


class Recorder(Fixed):
    """Offers every block whole; keeps its evidence, the number of accepted tokens, and what copies
    in its place would have brought."""

    def __init__(self, slots: int):
        super().__init__(slots, needs_evidence=True, copies=CopyChances())
        self.evidence: list[list[float]] = []
        self.accepted: list[int] = []
        self.disagreements: list[list[float]] = []
        self.found: list[tuple[Copy, list[float]]] = []  # this round's copies, with their facts
        self.lookup, self.begun = Lookup(), 0  # of the text, and its tokens when the round began
        self.whole = False

    def copy_pays(self, copy: Copy, depth: int, running: int = 0) -> bool:
        return False

    def choose(
        self, draft: Draft, lookup: Lookup | None, limit: int, depth: int, seconds: float
    ) -> tuple[Copy | None, int]:
        assert draft.evidence is not None
        odds = draft.evidence.log_odds()
        self.note_copies(draft, odds, lookup)
        self.whole = limit >= self.tokens
        if self.whole:
            self.evidence.append(odds)
        return None, min(self.tokens, limit)

    def note_copies(self, draft: Draft, odds: list[float], lookup: Lookup | None) -> None:
        """Take note of what copies say that leave this draft, whose evidence is `odds`."""
        self.found = []
        known = None if lookup is None else Disagreement.of(draft, lookup)
        if lookup is None or known is None or self.copies is None:
            return
        self.lookup, self.begun = lookup, len(lookup.tokens)
        for copy in lookup.splices(draft.tokens.tolist()):
            if copy.after < self.tokens:
                facts = known.facts(copy, self.copies.of(copy)[0], 0.5)
                facts[DRAFTED] = odds[copy.after]  # until it is calibrated
                self.found.append((copy, facts))

    def learn(self, accepted: int, offered: int) -> None:
        if self.whole and offered == self.tokens:
            self.accepted.append(accepted)
            self.disagreements += self.decided(accepted)

    def decided(self, accepted: int) -> list[list[float]]:
        """Where the round's copies and its draft differed and one of them was right: slot,
        facts, and 1 for the copy."""
        came, rows = self.lookup.tokens[self.begun :], []
        for copy, facts in self.found:
            if copy.after < min(accepted + 1, len(came)):
                won = came[copy.after] == copy.tokens[0]
                if won or copy.after < accepted:
                    rows.append([copy.after, *facts, won])
        return rows


@dataclass
class Rounds:
    """n rounds that offered all M tokens."""

    evidence: np.ndarray  # [n, M]
    accepted: np.ndarray  # [n]
    # [k, 8] where a copy or the draft was right and the other was not: the slot, six facts, with
    # the slot's evidence in place of its chance, and 1 if it was the copy.
    disagreements: np.ndarray = field(default_factory=lambda: np.zeros((0, 2 + len(INDEPENDENT))))

    def __add__(self, other: "Rounds") -> "Rounds":
        return Rounds(
            np.concatenate([self.evidence, other.evidence]),
            np.concatenate([self.accepted, other.accepted]),
            np.concatenate([self.disagreements, other.disagreements]),
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
    """Decode one text and return its rounds."""
    M = drafter.config.num_proposals
    recorder = Recorder(M)
    options: dict[str, Any] = {"sampler": sampler, "max_tokens": max_tokens}
    for _ in stream_generate(model, tokenizer, prompt, drafter, verify_length=recorder, **options):
        pass
    evidence = np.array(recorder.evidence[: len(recorder.accepted)], np.float64).reshape(-1, M)
    disagreements = np.array(recorder.disagreements, np.float64).reshape(-1, 2 + len(INDEPENDENT))
    return Rounds(evidence, np.array(recorder.accepted, int), disagreements)


@dataclass
class Fit:
    """A calibration, and the errors [M] of each slot's survival on held-out rounds, measured with
    `trial` (fitted on the rest)."""

    calibration: Calibration
    trial: Calibration
    held_out: Rounds
    before: np.ndarray
    after: np.ndarray
    by_chance: np.ndarray  # what an exact calibration would show on as many rounds


def calibrate(texts: list[Rounds], held_out: list[Rounds] | None = None) -> Fit:
    """Fit on texts and measure on held-out ones.

    Without held-out texts, every other text is held out at first, then all of them are fitted on. A
    single text is halved. With too few rounds the evidence stays uncalibrated, with a warning; with
    none to measure on, `InputError`.
    """
    fitted, measured = (sum_of(texts), sum_of(held_out)) if held_out else split(texts)
    if not len(measured.accepted):
        raise InputError(
            "no round was recorded to measure on; raise --max-tokens, or give more prompts"
        )
    plain = uncalibrated(measured.evidence.shape[1])
    before = survival_errors(plain, measured.evidence, measured.accepted)
    every = fitted if held_out else measured + fitted
    if min(len(fitted.accepted), len(measured.accepted)) < LEAST_ROUNDS // 2:
        log.warning(
            "%s rounds are too few to calibrate on, %s are needed; raise --limit or --max-tokens",
            len(every.accepted),
            LEAST_ROUNDS,
        )
        by_chance = chance_errors(plain, measured.evidence)
        return Fit(plain, plain, measured, before, before, by_chance)
    trial = fit(fitted.evidence, fitted.accepted)
    after = survival_errors(trial, measured.evidence, measured.accepted)
    final = trial if held_out else fit(every.evidence, every.accepted)
    final = replace(final, ece_before=float(before.mean()), ece_after=float(after.mean()))
    final = replace(final, copy_weights=fit_copy_weights(final, sum_of(texts).disagreements))
    return Fit(final, trial, measured, before, after, chance_errors(trial, measured.evidence))


def split(texts: list[Rounds]) -> tuple[Rounds, Rounds]:
    """Rounds to fit and others to measure."""
    if len(texts) == 1:
        log.warning("there is one prompt only: its second half serves as held-out text")
        half = len(texts[0].accepted) // 2
        return texts[0][:half], texts[0][half:]
    return sum_of(texts[1::2]), sum_of(texts[::2])


def sum_of(texts: Iterable[Rounds]) -> Rounds:
    total, *rest = texts
    for rounds in rest:
        total = total + rounds
    return total


def fit(logits: np.ndarray, accepted: np.ndarray, biased: bool = True) -> Calibration:
    """Sequential temperature scaling (DSpark), left to right, with a bias and a slope per slot.

    logits: [n, M] evidence of n rounds that offered all M tokens; accepted: [n] tokens.
    Each slot gets the most likely of 41 temperatures for its outcomes, given the calibrated
    survival up to it. So the product is right even where a slot's evidence says something about
    earlier slots. (Temperatures picked by the smallest 15-bin calibration error, as published,
    predict other rounds worse.)
    """
    survival, slots = np.ones(len(logits)), []
    for slot in range(logits.shape[1]):
        fitted = fit_slot(logits[:, slot], survival, accepted > slot, biased)
        survival = survival * sigmoid(calibrated(logits[:, slot], *fitted))
        slots.append(fitted)
    temperatures, biases, slopes = (tuple(column) for column in zip(*slots, strict=True))
    return Calibration(temperatures, biases, len(logits), slopes=slopes if biased else ())


def fit_slot(
    evidence: np.ndarray, survival: np.ndarray, accepted: np.ndarray, biased: bool
) -> tuple[float, float, float]:
    """T, b and s of one slot; unbiased: b = 0 and s = 1 / T."""
    survival = np.where(np.isneginf(evidence), 0, survival)  # settled already
    x = np.clip(np.nan_to_num(evidence, nan=0.0), -LIMIT, LIMIT)
    features = np.stack([np.ones_like(x), np.minimum(x, 0)], axis=1)
    weights, tried = np.zeros(2), []
    for T in TEMPERATURES.tolist():
        prior, offset = np.array([0, 1 / T]), np.maximum(x, 0) / T
        start = (weights, prior)
        weights = scoring(features, offset, survival, accepted, start) if biased else prior
        chances = np.clip(survival * sigmoid(offset + features @ weights), 1e-12, 1 - 1e-12)
        likelihood = np.log(np.where(accepted, chances, 1 - chances)).sum()
        distance = np.square(weights - prior).sum() + np.log(T) ** 2
        tried.append((likelihood - PRIOR / 2 * distance, T, *weights.tolist()))
    _, T, b, s = max(tried)
    return T, b, s


def scoring(
    features: np.ndarray,
    offset: np.ndarray,
    survival: np.ndarray,
    accepted: np.ndarray,
    begin: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """Maximum-likelihood weights w by Newton / Fisher-scoring steps.

    Chances are c = survival * sigmoid(offset + features w), w ~ N(prior, 1 / PRIOR); begin: where
    to start, and the prior.
    """
    weights, prior = begin
    prior_information = PRIOR * np.eye(len(prior))
    for _ in range(STEPS):
        p = sigmoid(offset + features @ weights)
        c = np.minimum(survival * p, 1 - 1e-9)
        share = (1 - p) / (1 - c)
        slope = features.T @ ((accepted - c) * share) - PRIOR * (weights - prior)
        bends = np.where(accepted, p * (1 - p), c * (1 - p) * share)
        curvature = features.T @ (features * bends[:, None]) + prior_information
        weights = weights + np.clip(np.linalg.solve(curvature, slope), -1, 1)
    return weights


def fit_copy_weights(calibration: Calibration, disagreements: np.ndarray) -> tuple[float, ...]:
    """The most likely weights between copies and drafts, N(INDEPENDENT, 1 / PRIOR) beforehand;
    with too few disagreements, none."""
    if len(disagreements) < LEAST_ROUNDS:
        return ()
    slots, won = disagreements[:, 0].astype(int), disagreements[:, -1] > 0
    facts = disagreements[:, 1:-1].copy()
    chances = [
        sigmoid(calibrated(x, *calibration.slots[slot]))
        for slot, x in zip(slots, facts[:, DRAFTED], strict=True)
    ]
    facts[:, DRAFTED] = [logit(float(c)) for c in chances]
    prior = np.array(INDEPENDENT)
    weights = scoring(facts, np.zeros(len(won)), np.ones(len(won)), won, (prior, prior))
    return tuple(weights.tolist())


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """The temperatures [M] alone, without biases: see `fit`."""
    return np.array(fit(np.asarray(logits), np.asarray(accepted), biased=False).temperatures)


def ece(chances: np.ndarray, outcomes: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error: mean |chance - frequency| over equal bins, weighted by size."""
    index = np.minimum((chances * bins).astype(int), bins - 1)
    gaps = np.bincount(index, chances - outcomes, bins)
    return float(np.abs(gaps).sum() / len(chances))


def survival_errors(
    calibration: Calibration, logits: np.ndarray, accepted: np.ndarray
) -> np.ndarray:
    """The calibration error [M] of each slot's survival."""
    return errors(sigmoid(calibration.log_odds(logits)), accepted)


def errors(chances: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    survival = np.cumprod(chances, axis=1)
    return np.array([ece(survival[:, t], accepted > t) for t in range(chances.shape[1])])


def chance_errors(calibration: Calibration, logits: np.ndarray, draws: int = 20) -> np.ndarray:
    """The error [M] that as many rounds would show by chance if the calibration were exact."""
    chances = sigmoid(calibration.log_odds(logits))
    rng = np.random.default_rng(0)
    drawn = (rng.uniform(size=chances.shape) < chances for _ in range(draws))
    accepted = (np.cumprod(tokens, axis=1).sum(axis=1) for tokens in drawn)
    return np.mean([errors(chances, n) for n in accepted], axis=0)

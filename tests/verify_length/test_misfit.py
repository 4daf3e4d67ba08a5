"""The warning about a drafter that loads but does not fit: its error rate, by simulation."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from dspine_mlx import load, stream_generate
from dspine_mlx.verify_length.auto import Auto
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.costs import Costs, Curve
from dspine_mlx.verify_length.misfit import ERROR_RATE, ROUNDS, Misfit
from dspine_mlx.verify_length.store import load_calibrations

PAIRS = 4000


def warned(misfit: Misfit, accepted: np.ndarray, chances: np.ndarray | None = None) -> int | None:
    """The round of the warning, if there is one."""
    for i, n in enumerate(accepted.tolist()):
        chance = None if chances is None else float(chances[i])
        if misfit.round_over(n, chance) is not None:
            return i + 1
    return None


def drawn(random: np.random.Generator, rate: float, rounds: int = ROUNDS) -> np.ndarray:
    """Accepted tokens of rounds whose tokens are accepted at this rate, one after another."""
    return np.minimum(random.geometric(1 - rate, rounds) - 1, 7)


@pytest.mark.parametrize("expected", [0.4, 0.6, 0.8])
def test_hard_text_on_a_good_pair_raises_no_warning(expected: float) -> None:
    """At the limit of what counts as hard text, an eighth of the average rate, in 4000 pairs."""
    random = np.random.default_rng(5)
    false = sum(
        warned(Misfit(expected), drawn(random, expected / 8)) is not None for _ in range(PAIRS)
    )
    assert false / PAIRS <= ERROR_RATE + 3 * (ERROR_RATE / PAIRS) ** 0.5


def test_hard_text_of_the_shipped_pairs_rate_is_far_from_a_warning() -> None:
    """1.1 tokens per round where 2.5 are average."""
    random = np.random.default_rng(6)
    false = sum(warned(Misfit(0.6), drawn(random, 0.1)) is not None for _ in range(PAIRS))
    assert false <= PAIRS * ERROR_RATE / 2


def test_hard_text_on_a_pair_without_a_history_raises_none() -> None:
    random = np.random.default_rng(11)
    false = sum(warned(Misfit(), drawn(random, 0.08)) is not None for _ in range(PAIRS // 4))
    assert false / (PAIRS // 4) <= ERROR_RATE + 3 * (ERROR_RATE / (PAIRS // 4)) ** 0.5


def test_rounds_that_depend_on_each_other_keep_the_error_rate() -> None:
    """Text whose ease changes slowly: stretches without an accepted token, between easy ones."""
    random, false = np.random.default_rng(7), 0
    for _ in range(PAIRS):
        rates = np.repeat(np.maximum(0.075, random.uniform(-0.3, 0.4, ROUNDS // 16 + 1)), 16)
        accepted = (random.random(len(rates)) < rates).astype(int)
        false += warned(Misfit(0.6), accepted) is not None
    assert false / PAIRS <= ERROR_RATE


@pytest.mark.parametrize(("expected", "most"), [(None, 64), (0.6, 80), (0.75, 60)])
def test_a_drafter_that_knows_nothing_is_noticed(expected: float | None, most: int) -> None:
    rounds = warned(Misfit(expected), np.zeros(ROUNDS, int))
    assert rounds is not None
    assert rounds <= most


def test_chance_hits_do_not_hide_it() -> None:
    """One first token in a hundred agrees by chance: nine of ten such drafters are noticed."""
    random = np.random.default_rng(8)
    found = [warned(Misfit(0.7), drawn(random, 0.01)) is not None for _ in range(400)]
    assert np.mean(found) >= 0.9


def test_calibrated_chances_tell_sooner_and_excuse_hard_text() -> None:
    rounds = warned(Misfit(0.6), np.zeros(ROUNDS, int), np.full(ROUNDS, 0.6))
    assert rounds is not None
    assert rounds <= 36  # of 60 and more without them
    random, false = np.random.default_rng(9), 0
    for _ in range(PAIRS):
        chances = random.beta(0.5, 3, ROUNDS)  # the drafter knows that it does not know
        accepted = (random.random(ROUNDS) < chances / 4).astype(int)
        false += warned(Misfit(0.6), accepted, chances) is not None
    assert false / PAIRS <= ERROR_RATE


def test_it_is_said_once_with_what_was_expected() -> None:
    misfit = Misfit(0.6)
    said = [text for _ in range(2 * ROUNDS) if (text := misfit.round_over(0)) is not None]
    assert len(said) == 1
    assert f"60% of first drafted tokens accepted, got 0 of {misfit.rounds} (1.00 tokens" in said[0]


def test_a_pair_that_fits_is_watched_for_its_first_rounds_only() -> None:
    misfit = Misfit(0.6)
    assert [misfit.round_over(3) for _ in range(ROUNDS)] == [None] * ROUNDS
    assert [misfit.round_over(0) for _ in range(ROUNDS)] == [None] * ROUNDS


def test_a_texts_rounds_are_counted_from_its_histograms() -> None:
    """A text's order inside does not matter."""
    by_text, by_round = Misfit(0.6), Misfit(0.6)
    assert by_text.text_over(Counter({0: 5, 2: 3, 1: 1})) is None
    for n in (2, 2, 2, 1, *[0] * 5):
        by_round.round_over(n)
    assert (by_text.rounds, by_text.accepted, by_text.tokens) == (9, 4, 9 + 7)
    assert by_text.log_ratio == pytest.approx(by_round.log_ratio)
    nothing = Misfit(0.6)
    said = [nothing.text_over(Counter({0: 50})) for _ in range(4)]
    assert [text is None for text in said] == [True, False, True, True]


def test_a_texts_calibrated_chances_are_counted_with_their_drafts() -> None:
    """Of four drafts two have a calibrated chance."""
    by_text, by_round = Misfit(0.6), Misfit(0.6)
    assert by_text.text_over(Counter({0: 3, 2: 1}), [(0, 0.7), (2, 0.9)]) is None
    for accepted, chance in ((2, 0.9), (0, 0.7), (0, None), (0, None)):
        by_round.round_over(accepted, chance)
    assert by_text.as_dict() == pytest.approx(by_round.as_dict())
    assert by_text.promised == pytest.approx(0.9 + 0.7 + 0.6 + 0.6)


def test_the_test_goes_on_in_the_next_process() -> None:
    """A drafter that is parked after a few rounds of every text is noticed all the same."""
    misfit, rounds = Misfit(), 0
    for _ in range(ROUNDS // 6):
        misfit = Misfit.from_dict(json.loads(json.dumps(misfit.as_dict())))
        said = warned(misfit, np.zeros(6, int))
        rounds += 6
        if said is not None:
            break
    whole = warned(Misfit(), np.zeros(ROUNDS, int))
    assert whole is not None
    assert whole <= rounds < whole + 6


def test_a_test_that_ended_well_says_what_to_expect() -> None:
    random, misfit = np.random.default_rng(8), Misfit()
    assert warned(misfit, drawn(random, 0.7)) is None
    share = misfit.accepted / misfit.rounds
    following = Misfit.from_dict(misfit.as_dict())
    assert (following.expected, following.rounds, following.over) == (share, 0, False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"accepted": 3},
        {"rounds": -1},
        {"log_ratio": float("nan")},
        {"expected": 2},
        {"tokens": "x"},
    ],
)
def test_counts_that_contradict_each_other_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Misfit.from_dict(Misfit(None, 2, 1, 0.8, 3, 0.1).as_dict() | wrong)


@pytest.mark.parametrize("calibrated", [True, False])
def test_rounds_tell_their_calibrated_chance(calibrated: bool) -> None:
    """The pair that ships has a calibration. Only drafts that were counted have a chance."""
    model, tokenizer, drafter = load()
    assert drafter is not None
    costs = Costs(Curve((64, 2048), (1.0, 1.0), (1e-3, 1e-3), ((1.0,) * 16, (1.0,) * 16)))
    M = drafter.config.num_proposals
    calibration = load_calibrations(drafter)["greedy"] if calibrated else uncalibrated(M)
    *_, last = stream_generate(
        model,
        tokenizer,
        "Maria has 9 toys.",
        drafter,
        max_tokens=32,
        verify_length=Auto(costs, calibration),
        lookup=False,
    )
    promised = last.statistics.promised
    assert bool(promised) is calibrated
    assert not Counter(n for n, _ in promised) - last.statistics.own_drafts
    assert all(0 < chance < 1 for _, chance in promised)

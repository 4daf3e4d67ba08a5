"""Calibration: distributions with a known answer, and files that don't fit."""

import json
import logging
from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.errors import InputError
from dspine_mlx.load import load
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.verify_length.calibration import Calibration, mode_of, sigmoid, uncalibrated
from dspine_mlx.verify_length.fit import (
    PRIOR,
    TEMPERATURES,
    Rounds,
    calibrate,
    ece,
    fit,
    fit_temperatures,
    record,
    scoring,
    survival_errors,
)
from dspine_mlx.verify_length.store import calibration_path, load_calibrations, save_calibrations
from tests.support.cache import cache_folder
from tests.support.tiny import plain_steps, random_prompt, scripted, tiny_dflash


def rounds_of(logits: np.ndarray, seed: int) -> np.ndarray:
    """Accepted tokens of rounds whose true conditional log-odds are given."""
    accepted = np.random.default_rng(seed).uniform(size=logits.shape) < sigmoid(logits)
    return np.cumprod(accepted, axis=1).sum(axis=1)


def test_ece_by_hand() -> None:
    """Two bins: .1 and .12 against 0 and 1, .9 against 1: (|.22 - 1| + |.9 - 1|) / 3."""
    assert ece(np.array([0.1, 0.12, 0.9]), np.array([0, 1, 1])) == pytest.approx(0.88 / 3)
    assert ece(np.array([0.0, 1.0]), np.array([0, 1])) == 0


def test_temperatures_are_those_of_the_paper() -> None:
    assert len(TEMPERATURES) == 41
    assert TEMPERATURES[[0, 20, 40]] == pytest.approx([0.1, 1, 10])
    np.testing.assert_allclose(np.diff(np.log(TEMPERATURES)), np.log(100) / 40)


@settings(deadline=None, max_examples=8)
@given(st.lists(st.sampled_from([0.25, 1.0, 4.0]), min_size=2, max_size=3), st.integers(0, 99))
def test_known_temperatures_are_found(true: list[float], seed: int) -> None:
    """Evidence that overstates or understates by a factor: found within two steps of the grid."""
    rng = np.random.default_rng(seed)
    logits = 0.8 + 1.5 * rng.standard_normal((20_000, len(true)))
    accepted = rounds_of(logits, seed + 1)
    found = fit_temperatures(logits * np.array(true), accepted)
    assert np.abs(np.log(found / true)).max() < 0.45


def test_a_bias_is_found_where_no_temperature_helps() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((20_000, 3))
    accepted = rounds_of(logits - np.array([0.0, 1.5, -1.0]), 1)
    found = fit(logits, accepted)
    np.testing.assert_allclose(found.biases, [0, -1.5, 1], atol=0.25)
    after = survival_errors(found, logits, accepted)
    before = survival_errors(uncalibrated(3), logits, accepted)
    assert after.max() < 0.01 < before[1]


def test_the_fit_is_better_on_other_rounds_too() -> None:
    rng = np.random.default_rng(0)
    logits = 0.5 + rng.standard_normal((3000, 7))
    accepted = rounds_of(0.4 * logits - 0.3, 1)
    texts = [Rounds(logits[i : i + 100], accepted[i : i + 100]) for i in range(0, 3000, 100)]
    result = calibrate(texts)
    assert result.after.mean() < 0.02 < result.before.mean()
    assert result.calibration.rounds == 3000
    assert result.calibration.ece_after == pytest.approx(result.after.mean())


def test_a_slope_below_even_odds_is_found() -> None:
    """Flat distributions overlap in sampled drafts, so chances rise again below 0."""
    rng = np.random.default_rng(0)
    logits = 4 * rng.standard_normal((20_000, 2))
    accepted = rounds_of(np.where(logits < 0, -0.5, 0.8) * logits - 0.7, 1)
    found = fit(logits, accepted)
    np.testing.assert_allclose(found.slopes, -0.5, atol=0.1)
    np.testing.assert_allclose(found.temperatures, 1 / 0.8, rtol=0.13)
    np.testing.assert_allclose(found.biases, -0.7, atol=0.15)
    assert survival_errors(found, logits, accepted).max() < 0.01
    monotone = Calibration(found.temperatures, found.biases)
    assert survival_errors(monotone, logits, accepted).max() > 0.05


def test_it_is_the_product_that_is_right() -> None:
    """Slot 2's evidence tells what became of slot 1. The chance of slot 2 alone, among the rounds
    that reached it, is 0.8 whatever its evidence; the product has to follow the evidence."""
    rng = np.random.default_rng(0)
    first, second = rng.uniform(size=(2, 20_000)) < [[0.6], [0.8]]
    logits = np.stack([np.full(20_000, 0.4), np.where(first, 2.0, -2.0)], axis=1)
    accepted = np.where(first, 1 + second, 0)
    found = fit(logits, accepted)
    survival = np.cumprod(sigmoid(found.log_odds(logits)), axis=1)[:, 1]
    assert survival[~first].max() < 0.05
    assert survival[first].min() > 0.55


log_odds = st.floats(-20, 20)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(log_odds, st.floats(0, 1), st.booleans()), max_size=12),
    st.lists(st.floats(-0.3, 0.3), min_size=2, max_size=2),
)
def test_no_weights_nearby_are_likelier(
    rounds: list[tuple[float, float, bool]], step: list[float]
) -> None:
    """Against the log posterior, written down again; also with no rounds or one kind of them."""
    x, survival, accepted = np.array(rounds, float).reshape(-1, 3).T
    features, offset = np.stack([np.ones_like(x), np.minimum(x, 0)], axis=1), np.maximum(x, 0)
    survival, prior = 0.01 + 0.98 * survival, np.array([0.0, 1.0])

    def posterior(w: np.ndarray) -> float:
        chance = survival / (1 + np.exp(-(offset + features @ w)))
        likelihood = np.prod(np.where(accepted == 1, chance, 1 - chance))
        return float(np.log(likelihood) - PRIOR / 2 * ((w - prior) ** 2).sum())

    w = prior
    for _ in range(20):
        w = scoring(features, offset, survival, accepted == 1, (w, prior))
    assert posterior(w) >= posterior(w + np.array(step)) - 1e-4


def test_slots_after_a_stop_token_are_left_out() -> None:
    """Evidence of -inf is never accepted, and does not affect the other rounds' fit."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((500, 2))
    accepted = rounds_of(logits, 1)
    ended = np.concatenate([logits, np.tile([20.0, -np.inf], (500, 1))])
    found = fit(ended, np.concatenate([accepted, np.ones(500, int)]))
    alone = fit(logits, accepted)
    assert abs(np.log(found.temperatures[1] / alone.temperatures[1])) < 0.12  # a step of the grid
    np.testing.assert_allclose(found.biases[1], alone.biases[1], atol=0.1)
    assert sigmoid(found.log_odds(ended))[500:, 1].max() < 1e-8


def test_odd_evidence_stays_finite() -> None:
    odds = uncalibrated(3).log_odds(np.array([np.inf, -np.inf, np.nan]))
    np.testing.assert_array_equal(odds, [20, -20, 0])


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=3, max_size=3),
    st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
    st.lists(st.floats(-5, 5), min_size=3, max_size=3),
    st.lists(st.floats(-2, 2), max_size=3).filter(lambda s: len(s) in (0, 3)),
)
def test_a_block_is_calibrated_as_all_rounds_are(
    evidence: list[float], temperatures: list[float], biases: list[float], slopes: list[float]
) -> None:
    one = Calibration(tuple(temperatures), tuple(biases), slopes=tuple(slopes))
    wanted = one.log_odds(np.array([evidence]))[0]
    np.testing.assert_allclose(one.block_log_odds(evidence), wanted, rtol=1e-12)


def test_modes() -> None:
    assert mode_of(make_sampler(temp=0.7)) == "greedy"  # compared with: one-hot drafts
    assert mode_of(Sampler(temp=0.0)) == "greedy"
    assert mode_of(Sampler(temp=0.3)) == "sampled from 0.0"
    assert mode_of(Sampler(temp=0.5)) == "sampled from 0.5"
    assert mode_of(Sampler(temp=1.5)) == "sampled from 0.9"


def test_files_come_back(model: nn.Module) -> None:
    drafter = tiny_dflash(model)
    weights = (0.5, 0.7, -0.6, 0.2, -0.8, 0.9)
    modes = {"greedy": Calibration((0.5,) * 7, (0.1,) * 7, 99, 0.2, 0.01, copy_weights=weights)}
    save_calibrations(calibration_path(drafter), drafter, modes)
    assert load_calibrations(drafter) == modes
    assert load_calibrations(tiny_dflash(model, seed=8)) == {}  # same shapes, other weights


def test_a_file_from_before_copy_weights_is_read(model: nn.Module, tmp_path: Path) -> None:
    drafter, path = tiny_dflash(model), tmp_path / "calibration.json"
    calibration = Calibration((0.5,) * 7, (0.1,) * 7, 99, 0.2, 0.01)
    save_calibrations(path, drafter, {"greedy": calibration})
    data = json.loads(path.read_text())
    del data["modes"]["greedy"]["copy_weights"]
    path.write_text(json.dumps(data))
    assert load_calibrations(drafter, path) == {"greedy": calibration}


@pytest.mark.parametrize("bad", ["other pair", "slots", "zero", "json", "null", "text", "weights"])
def test_a_bad_file_is_a_warning(
    bad: str, model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafter, path = tiny_dflash(model), tmp_path / "calibration.json"
    save_calibrations(path, drafter, {"greedy": Calibration((1.0,) * 7, (0.0,) * 7)})
    data = json.loads(path.read_text())
    if bad == "other pair":
        data["key"]["values"] = "0"
    if bad == "slots":
        data["modes"]["greedy"] |= {"temperatures": [1.0], "biases": [0.0]}
    if bad == "zero":
        data["modes"]["greedy"]["temperatures"][2] = 0
    if bad == "null":
        data["modes"] = None
    if bad == "weights":
        data["modes"]["greedy"]["copy_weights"] = [1.0]
    if bad == "text":
        data["modes"]["greedy"]["biases"][0] = "x"
    path.write_text("{" if bad == "json" else json.dumps(data))
    with caplog.at_level(logging.WARNING):
        assert load_calibrations(drafter, path) == {}
    assert len(caplog.records) == 1


def test_recording_counts_accepted_tokens(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    prompt = random_prompt(12)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=30)
    text = prompt + [token for token, _ in plain]
    drafter = scripted(model, text, "right but the last")
    seen = record(model, tokenizer, drafter, prompt, make_sampler(0), 30)
    assert set(seen.accepted.tolist()) == {6}
    assert seen.evidence.shape == (len(seen.accepted), 7)
    np.testing.assert_allclose(
        seen.evidence[0], -np.log(np.exp(-np.arange(1, 4)).sum()), rtol=1e-5
    )  # scores 0, -1, -2, -3


def test_a_text_ends_at_its_stop_token(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    """Tokens drafted after it count as rejected, even those the target would go on with, and the
    evidence says so."""
    prompt = random_prompt(12)
    plain = [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=30)]
    place = next(i for i in range(2, 30) if i % 8 < 7 and plain[i] not in plain[:i])
    ending = TokenizerWrapper(tokenizer, eos_token_ids={plain[place]})
    drafter = scripted(model, prompt + plain, "right")
    seen = record(model, ending, drafter, prompt, make_sampler(0), 30)
    slot = place % 8  # a round is 7 drafted tokens and one of the target's
    assert seen.accepted.tolist() == [7] * (place // 8) + [slot + 1]
    assert np.isneginf(seen.evidence[-1]).tolist() == [i > slot for i in range(7)]


def test_one_prompt_or_few_rounds_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    few = Rounds(np.zeros((10, 3)), np.zeros(10, int))
    result = calibrate([few])
    assert result.calibration == uncalibrated(3)
    assert "one prompt only" in caplog.text
    assert "too few" in caplog.text
    with pytest.raises(InputError, match="no round was recorded .*; raise --max-tokens"):
        calibrate([few], [few[:0]])


def test_calibrations_stay_out_of_the_model_folder(model: nn.Module) -> None:
    assert calibration_path(tiny_dflash(model)).parent == cache_folder()


def test_the_shipped_pair_brings_its_calibration(tmp_path: Path) -> None:
    """It is used from the drafter's folder, and one made on this machine is preferred to it."""
    _, _, drafter = load()
    assert drafter is not None
    shipped = load_calibrations(drafter)
    assert {"greedy", "sampled from 0.9"} <= shipped.keys()
    assert all(c.rounds > 60 and (c.ece_after or 1) < (c.ece_before or 0) for c in shipped.values())
    own = {"greedy": uncalibrated(drafter.config.num_proposals)}
    save_calibrations(calibration_path(drafter), drafter, own)
    assert load_calibrations(drafter) == own

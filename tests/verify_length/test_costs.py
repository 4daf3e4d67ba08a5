"""Cost curves: interpolation, what real steps teach, the cache and its accidents."""

import json
import logging
from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.verify_length import costs
from dspine_mlx.verify_length.costs import Bench, Costs, Curve, costs_of, guess, pair_key
from tests.support.tiny import tiny_dflash, tiny_dspine, tiny_target

measure = costs.measure  # before the fixture for all tests replaces it


def curve(slope: float = 0.0) -> Curve:
    low = (1.0, 1.5, 2.0, 2.5)
    return Curve((100, 1100), (1.0, 1.2), (0.3, 0.3), (low, tuple(s + slope for s in low)))


def test_linear_in_the_depth_and_never_falling() -> None:
    np.testing.assert_allclose(curve(1.0).at(600)[1:-1], [1.5, 2.0, 2.5, 3.0])
    np.testing.assert_allclose(curve(1.0).at(2100)[1:-1], [3.0, 3.5, 4.0, 4.5])
    np.testing.assert_allclose(curve(1.0).at(0), curve().at(100))
    np.testing.assert_allclose(curve(-0.4).at(5000)[1:-1], [1.0, 1.5, 2.0, 2.5])


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(-0.5, 0.5), min_size=6, max_size=6), st.integers(0, 999))
def test_wrong_curves_are_learnt(errors: list[float], seed: int) -> None:
    """True costs off by a factor per kind, observed with 10 % of noise: predictions come within
    10 % of the truth for every kind that was seen."""
    rng = np.random.default_rng(seed)
    taught = Costs(curve())
    truth = np.array(curve().at(100)) * np.exp(errors)
    for _ in range(60):
        for kind in range(6):
            taught.observe(kind, truth[kind] * np.exp(0.1 * rng.standard_normal()), 100)
    np.testing.assert_allclose(np.log(np.array(taught.predict(100)) / truth), 0, atol=0.15)


def test_load_on_the_machine_is_common_to_all_steps() -> None:
    """Rounds of one width that all take three times as long raise what plain decoding is
    expected to take, seen or not."""
    taught = Costs(curve())
    for _ in range(30):
        taught.observe_round(0.9, 6.0, 3, 100)
    assert 2 < taught.plain(100) < 3.2
    assert taught.verify(100)[2] == pytest.approx(6.0, rel=0.05)


def test_a_single_pause_changes_little() -> None:
    taught = Costs(curve())
    for _ in range(20):
        taught.observe_plain(1.0, 100)
    before = taught.plain(100)
    taught.observe_plain(500.0, 100)
    assert taught.plain(100) < 1.25 * before


def test_a_guess_takes_its_scale_from_the_first_step() -> None:
    guessed = Curve((1, 2), (1.0, 1.0), (0.1, 0.1), ((1.0, 1.2), (1.0, 1.2)), measured=False)
    taught = Costs(guessed)
    for _ in range(3):
        taught.observe_round(0.001, 0.012, 2, 1)
    np.testing.assert_allclose(taught.predict(1), [0.01, 0.01, 0.012, 0.001], rtol=0.2)


@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("nan")])
def test_a_clock_that_goes_backwards(seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    taught = Costs(curve())
    taught.observe_plain(seconds, 100)
    assert "a clock went backwards" in caplog.text
    np.testing.assert_array_equal(taught.predict(100), curve().at(100))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_curves_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be above 0"):
        Curve((1, 2), (seconds, 1), (1, 1), ((1, 1), (1, 1)))


def test_the_cache_is_used_and_keyed_by_the_pair(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def count(drafter: object) -> Curve:
        calls.append(drafter)
        return Curve((1, 2), (1, 1), (1, 1), ((1.0,) * 8, (1.0,) * 8))

    monkeypatch.setattr(costs, "measure", count)
    drafter = tiny_dflash(model)
    first = costs_of(drafter).curve
    assert costs_of(drafter).curve == first
    assert len(calls) == 1
    costs_of(tiny_dspine(model))
    assert len(calls) == 2
    other = tiny_target(head_dim=16)
    assert pair_key(tiny_dflash(other)) != pair_key(drafter)
    nn.quantize(other, group_size=32, bits=8)
    assert pair_key(tiny_dflash(other)) != pair_key(tiny_dflash(tiny_target(head_dim=16)))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "not json",
        '{"key": {}, "curve": {}}',
        json.dumps({"key": 1, "curve": {"depths": [1, 2], "plain": [1, 1], "draft": [1, 1]}}),
        "other pair",
    ],
)
def test_a_bad_cache_file_is_measured_again(
    model: nn.Module, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = tiny_dflash(model)
    good = costs_of(drafter).curve
    (path,) = costs.CACHE.glob("costs-*.json")
    if content == "other pair":
        data = json.loads(path.read_text())
        data["key"]["target"] = "another"
        content = json.dumps(data)
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert costs_of(drafter).curve == good
    assert len(caplog.records) == 1
    assert "measured again" in caplog.text
    assert costs_of(drafter).curve == good  # and the file is whole again
    assert len(caplog.records) == 1


def test_a_cache_folder_that_cannot_be_written(
    model: nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(costs, "CACHE", tmp_path / "file" / "cache")
    costs_of(tiny_dflash(model))
    assert "can't be written" in caplog.text


def test_measuring_leaves_no_trace_and_covers_all_widths(model: nn.Module) -> None:
    drafter = tiny_dspine(model, block_size=6)
    measured = measure(drafter, seconds=0.0)
    assert len(measured.verify[0]) == 6
    assert measured.measured
    bench = Bench(drafter)
    bench.deepen(50)
    before = [c.offset for c in (*bench.cache, *bench.draft_cache)]
    bench.verify(3)
    bench.draft()
    bench.plain()
    assert [c.offset for c in (*bench.cache, *bench.draft_cache)] == before


def test_the_guess_is_a_curve(model: nn.Module) -> None:
    guessed = guess(tiny_dflash(model))
    assert not guessed.measured
    assert (np.diff(guessed.verify[0]) > 0).all()
    assert costs_of(tiny_dflash(model), measured=False).curve == guessed

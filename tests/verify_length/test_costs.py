"""Cost curves: interpolation, learning from real steps, and the file, damaged or not."""

import json
import logging
from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest

from dspine_mlx.verify_length import profile, store
from dspine_mlx.verify_length.costs import Costs, Curve
from dspine_mlx.verify_length.profile import StepTimer, guess
from dspine_mlx.verify_length.schedule import prepare
from dspine_mlx.verify_length.store import pair_key
from tests.support.cache import cache_folder
from tests.support.tiny import tiny_dflash, tiny_dspine, tiny_target

measure = profile.measure  # before the fixture for all tests replaces it


def curve(slope: float = 0.0) -> Curve:
    low = (1.0, 1.5, 2.0, 2.5)
    return Curve((100, 1100), (1.0, 1.2), (0.3, 0.3), (low, tuple(s + slope for s in low)))


def observe_round(taught: Costs, draft: float, verify: float, rows: int, depth: int) -> None:
    taught.observe("verify", verify, depth, rows)
    taught.observe("draft", draft, depth)


def test_linear_in_the_depth_and_never_falling() -> None:
    np.testing.assert_allclose(curve(1.0).at(600)[1:-1], [1.5, 2.0, 2.5, 3.0])
    np.testing.assert_allclose(curve(1.0).at(2100)[1:-1], [3.0, 3.5, 4.0, 4.5])
    np.testing.assert_allclose(curve(1.0).at(0), curve().at(100))
    np.testing.assert_allclose(curve(-0.4).at(5000)[1:-1], [1.0, 1.5, 2.0, 2.5])


def test_wrong_curves_are_learnt() -> None:
    """True costs off by a factor per kind, up to exp(0.5), observed with 10 % of noise: every kind
    is predicted within 20 %, and within 5 % in the root mean square."""
    left = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        taught, truth = Costs(curve()), np.array(curve().at(100))
        truth *= np.exp(rng.uniform(-0.5, 0.5, 6))
        for _ in range(60):
            for kind in range(6):
                name = "plain" if kind == 0 else "draft" if kind == 5 else "verify"
                seconds = truth[kind] * np.exp(0.1 * rng.standard_normal())
                taught.observe(name, seconds, 100, kind)
        left.append(np.log(np.array(taught.predict(100)) / truth))
    assert np.abs(left).max() < 0.2
    assert np.sqrt(np.mean(np.square(left))) < 0.05


def test_load_on_the_machine_is_common_to_all_steps() -> None:
    """Rounds of one width that all take three times as long raise what plain decoding is
    expected to take, seen or not."""
    taught = Costs(curve())
    for _ in range(30):
        observe_round(taught, 0.9, 6.0, 3, 100)
    assert 2 < taught.plain(100) < 3.2
    assert taught.verify(100)[2] == pytest.approx(6.0, rel=0.05)


def test_a_single_pause_changes_little() -> None:
    taught = Costs(curve())
    for _ in range(20):
        taught.observe("plain", 1.0, 100)
    before = taught.plain(100)
    taught.observe("plain", 500.0, 100)
    assert taught.plain(100) < 1.25 * before
    taught.observe("plain", 1.0, 100)
    assert taught.plain(100) == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("factor", [0.1, 0.2, 5.0, 10.0])
def test_a_curve_that_is_far_off_is_seen_at_once(factor: float) -> None:
    """A shorter time counts at once, a longer one when it comes twice."""
    taught = Costs(curve())
    for _ in range(1 if factor < 1 else 2):
        taught.observe("plain", factor * curve().at(100)[0], 100)
    assert taught.plain(100) == pytest.approx(factor * curve().at(100)[0], rel=0.15)


def test_all_widths_are_off_if_one_is() -> None:
    taught, file = Costs(curve()), curve().at(100)
    observe_round(taught, file[-1], 0.2 * file[1], 1, 100)
    np.testing.assert_allclose(taught.verify(100), 0.2 * np.array(file[1:-1]), rtol=0.3)


def test_what_was_learnt_changes_the_file_by_a_factor_of_two_at_most() -> None:
    taught, file = Costs(curve()), curve()
    for _ in range(5):
        taught.observe("plain", 5.0, 100)
        observe_round(taught, 0.25, 1.4, 2, 100)
    learnt = taught.learnt()
    assert learnt.plain[0] == pytest.approx(2 * file.plain[0])
    assert learnt.verify[0][1] == pytest.approx(1.4, rel=0.1)
    assert learnt.depths == file.depths


def test_times_that_scatter_are_known_as_disturbed() -> None:
    rng = np.random.default_rng(0)
    for noise, disturbed in ((0.1, False), (0.8, True)):
        taught = Costs(curve())
        for _ in range(100):
            taught.observe("plain", float(np.exp(noise * rng.standard_normal())), 100)
        assert taught.disturbed == disturbed


def test_a_guess_takes_its_scale_from_the_first_step() -> None:
    guessed = Curve((1, 2), (1.0, 1.0), (0.1, 0.1), ((1.0, 1.2), (1.0, 1.2)), measured=False)
    taught = Costs(guessed)
    for _ in range(3):
        observe_round(taught, 0.001, 0.012, 2, 1)
    np.testing.assert_allclose(taught.predict(1), [0.01, 0.01, 0.012, 0.001], rtol=0.2)


@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("nan")])
def test_a_clock_that_goes_backwards(seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    taught = Costs(curve())
    taught.observe("plain", seconds, 100)
    assert "a clock went backwards" in caplog.text
    np.testing.assert_array_equal(taught.predict(100), curve().at(100))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_curves_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="a step takes"):
        Curve((1, 2), (seconds, 1), (1, 1), ((1, 1), (1, 1)))


def test_the_cache_is_used_and_keyed_by_the_pair(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def count(drafter: object) -> Curve:
        calls.append(drafter)
        return Curve((1, 2), (1, 1), (1, 1), ((1.0,) * 16, (1.0,) * 16))

    monkeypatch.setattr(profile, "measure", count)
    drafter = tiny_dflash(model)
    first = prepare(drafter).costs.curve
    assert prepare(drafter).costs.curve == first
    assert len(calls) == 1
    prepare(tiny_dspine(model))
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
    good = prepare(drafter).costs.curve
    (path,) = cache_folder().glob("costs-*.json")
    if content == "other pair":
        data = json.loads(path.read_text())
        data["key"]["target"] = "another"
        content = json.dumps(data)
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert prepare(drafter).costs.curve == good
    assert len(caplog.records) == 1
    assert "measured again" in caplog.text
    assert prepare(drafter).costs.curve == good  # and the file is whole again
    assert len(caplog.records) == 1


def test_a_cache_folder_that_cannot_be_written(
    model: nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path / "file" / "cache")
    prepare(tiny_dflash(model))
    assert "can't be written" in caplog.text


def test_measuring_leaves_no_trace_and_covers_all_widths(model: nn.Module) -> None:
    drafter = tiny_dspine(model, block_size=6)
    measured = measure(drafter, seconds=0.0)
    assert len(measured.verify[0]) == 16  # lookups go beyond its 5 proposals
    assert measured.measured
    bench = StepTimer(drafter)
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
    assert prepare(tiny_dflash(model), profile=False).costs.curve == guessed


@pytest.mark.parametrize("quiet_at", [1, 2, 3])
def test_costs_that_contradict_themselves_are_measured_once_more(
    model: nn.Module,
    quiet_at: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = []

    def measured(_: object) -> Curve:
        calls.append(1)
        rows = (1.0,) * 8 if len(calls) >= quiet_at else (1.0, 9.0, *[1.0] * 6)
        return Curve((1, 2), (1, 1), (1, 1), (rows, rows))

    monkeypatch.setattr(profile, "measure", measured)
    prepare(tiny_dflash(model))
    assert len(calls) == min(2, quiet_at)
    assert bool([*cache_folder().glob("costs-*")]) == (quiet_at < 3)
    assert len(caplog.records) == (quiet_at == 3)
    assert ("3 rows took 11% of the time of 2" in caplog.text) == (quiet_at == 3)


def test_costs_on_file_that_contradict_themselves_are_measured_again(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = tiny_dflash(model)
    good = prepare(drafter).costs.curve
    (path,) = cache_folder().glob("costs-*.json")
    data = json.loads(path.read_text())
    data["curve"]["plain"] = [0.01, 0.01]
    path.write_text(json.dumps(data))
    assert prepare(drafter).costs.curve == good
    assert "a plain token took 10 times a forward over one row" in caplog.text

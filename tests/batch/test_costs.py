"""What steps of several texts cost: measured numbers, those between, corrections, and the file."""

import json
from pathlib import Path

import numpy as np
import pytest

from dspine_mlx.batch import profile
from dspine_mlx.batch.costs import BatchCosts, BatchCurve, between, guess
from dspine_mlx.batch.policies import batch_policy
from dspine_mlx.batch.scheduled import Scheduled
from dspine_mlx.verify_length.costs import Curve
from dspine_mlx.verify_length.schedule import prepare
from tests.support.cache import cache_folder
from tests.support.tiny import tiny_dspine, tiny_target

M = 7
DEPTH = 64


def seconds(rows: int) -> float:
    """A machine whose forwards take the time of whole tiles of 32 rows."""
    return 1.0 + 0.5 * (-(-rows // 32))


def curve_of(texts: int) -> BatchCurve:
    rows = tuple(seconds(texts * width) for width in range(1, M + 2))
    drafts = [0.1 + 0.01 * texts * (1 + m) for m in range(1, M + 1)]
    full = (drafts[-1], drafts[-1])
    curve = Curve((64, 2048), (rows[0], rows[0]), full, (rows, rows))
    return BatchCurve(texts, curve, tuple(s / drafts[-1] for s in drafts))


def test_numbers_between_cost_what_their_rows_cost() -> None:
    """Drafts are a line in rows, so they are right to the last digit; tiles are met where both
    neighbours know of the rows."""
    known = [curve_of(4), curve_of(16)]
    for texts in (4, 6, 8, 13, 16):
        found, true = between(known, texts), curve_of(texts)
        mine = np.array(found.shares) * found.curve.draft[0]
        assert mine == pytest.approx(np.array(true.shares) * true.curve.draft[0], rel=0.03)
    eight = between(known, 8).curve.verify[0]
    assert eight[:3] == pytest.approx([1.5] * 3, rel=0.2)  # 24 rows are one tile
    assert eight[4] > 1.7  # 40 are two
    assert between(known, 32).curve.verify[0][0] == pytest.approx(seconds(32), rel=0.35)


def test_one_text_alone_is_a_guess_for_more() -> None:
    rows = tuple(1 + 0.1 * n for n in range(M + 1))
    wider = (*rows, 9.0, 9.0)  # as the costs of copies may be
    one = guess(Curve((64, 2048), (1.0, 1.2), (0.5, 0.5), (wider, wider)), M)
    costs = BatchCosts([one])
    assert costs.verify(1, 3, DEPTH) == pytest.approx(1.2)
    assert costs.verify(4, M + 1, DEPTH) == pytest.approx(1 + 0.1 * 31)
    assert costs.plain(4, DEPTH) == pytest.approx(1.3)
    assert costs.draft(1, M, DEPTH) == pytest.approx(0.5)
    assert costs.draft(1, 1, DEPTH) < 0.5


def test_real_steps_correct_their_own_number_first_and_new_ones_too() -> None:
    costs = BatchCosts([curve_of(1), curve_of(16)])
    before = costs.steps(8, DEPTH)
    for _ in range(60):
        costs.learn_draft(8, 3, 2 * before.draft[2], DEPTH)
        costs.learn_verify(8, 4, 1.5 * before.verify[3], DEPTH)
        costs.learn_plain(8, 1.5 * before.plain, DEPTH)
    after = costs.steps(8, DEPTH)
    assert after.draft[2] == pytest.approx(2 * before.draft[2], rel=0.1)
    assert after.verify[3] == pytest.approx(1.5 * before.verify[3], rel=0.1)
    assert after.plain == pytest.approx(1.5 * before.plain, rel=0.1)
    assert costs.plain(7, DEPTH) == pytest.approx(
        1.5 * BatchCosts(costs.known).plain(7, DEPTH), rel=0.1
    )
    kept = {one.texts: one for one in costs.learnt()}
    assert set(kept) == {1, 7, 8, 16}
    assert kept[8].curve.plain[0] == pytest.approx(after.plain)
    assert kept[16] == curve_of(16)


def test_widths_of_drafts_are_corrected_one_by_one() -> None:
    costs = BatchCosts([curve_of(1), curve_of(4)])
    before = costs.steps(4, DEPTH).draft
    for _ in range(80):
        costs.learn_draft(4, 1, 0.8 * before[0], DEPTH)
        costs.learn_draft(4, M, 1.2 * before[-1], DEPTH)
    after = costs.steps(4, DEPTH).draft
    assert after[0] == pytest.approx(0.8 * before[0], rel=0.1)
    assert after[-1] == pytest.approx(1.2 * before[-1], rel=0.1)


@pytest.fixture
def home() -> Path:
    return cache_folder()


def test_costs_are_measured_once_and_kept_on_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "measure", lambda *_: [curve_of(1), curve_of(3)])
    drafter = tiny_dspine(tiny_target())
    prepare(drafter)
    policy = batch_policy("auto", drafter)
    assert isinstance(policy, Scheduled)
    assert [one.texts for one in policy.costs.known] == [1, 3]
    (path,) = home.glob("batch-*.json")
    monkeypatch.setattr(profile, "measure", lambda *_: pytest.fail("measured again"))
    again = tiny_dspine(tiny_target())
    prepare(again)
    read = batch_policy("auto", again)
    assert isinstance(read, Scheduled)
    assert read.costs.known == policy.costs.known

    data = json.loads(path.read_text())
    data["curves"][0]["shares"] = [0.0]
    path.write_text(json.dumps(data))
    assert profile.read(again) == []


def test_measuring_covers_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are timed, and the others lie between; depth adds what one text's does for each, but
    for a factor."""
    monkeypatch.setattr(profile, "SIZES", {1: (1, 2, 4), 3: (1, 2)})
    drafter = tiny_dspine(tiny_target())
    one = Curve((64, 2048), (1.0, 1.5), (0.5, 0.6), ((1.0,) * 8, (1.5,) * 8))
    curves = profile.measure(drafter, one)
    assert [curve.texts for curve in curves] == [1, 3]
    for curve in curves:
        low, high = curve.curve.verify
        assert len(low) == drafter.config.num_proposals + 1
        assert curve.curve.depths == (profile.PROMPT, profile.DEEP)
        expected = 0.5 * curve.texts * (profile.DEEP - profile.PROMPT) / (2048 - 64)
        added = np.subtract(high, low)
        assert (added >= expected / profile.APART - 1e-9).all()
        assert (added <= profile.APART * expected + np.array(low) / 10 + 1e-9).all()
    first = curves[0].curve.verify[0]
    assert first[2] == pytest.approx((first[1] + first[3]) / 2)


def test_nothing_is_measured_where_one_texts_costs_are_a_guess(home: Path) -> None:
    drafter = tiny_dspine(tiny_target())
    prepare(drafter, profile=False)
    policy = batch_policy("auto", drafter)
    assert isinstance(policy, Scheduled)
    assert [one.texts for one in policy.costs.known] == [1]
    assert not list(home.glob("batch-*"))

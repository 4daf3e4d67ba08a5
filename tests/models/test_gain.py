"""The predicted gain, against closed forms, and the costs that it takes from this machine."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dspine_mlx.load import DEMO, load
from dspine_mlx.models.gain import chance, gains, measured_curve, predict
from dspine_mlx.models.registry import Published, entry_from
from dspine_mlx.verify_length import store
from dspine_mlx.verify_length.costs import Curve
from tests.support.hub import entry

PUBLISHED = Published((1 - 0.8**5) / 0.2, "texts", "a machine", "https://example.org", offered=4)


def curve(verify: list[float], draft: float = 1.0, plain: float = 10.0) -> Curve:
    rows = tuple(verify)
    return Curve((64, 2048), (plain, plain), (draft, draft), (rows, rows))


@pytest.mark.parametrize("c", [0.0, 0.3, 0.8, 0.99])
@pytest.mark.parametrize("offered", [1, 4, 15])
def test_the_chance_gives_the_published_figure_back(c: float, offered: int) -> None:
    tokens = sum(c**i for i in range(offered + 1))
    assert chance(tokens, offered) == pytest.approx(c, abs=1e-9)


def test_where_rows_are_free_the_whole_block_is_offered() -> None:
    found = predict(curve([10.0] * 8), PUBLISHED)
    assert found is not None
    assert found.length == 7
    assert found.tokens_per_round == pytest.approx((1 - 0.8**8) / 0.2)
    assert found.speedup == pytest.approx(10 * (1 - 0.8**8) / 0.2 / 11)
    assert "predicted" in found.words()


def test_where_rows_cost_the_best_length_is_in_between() -> None:
    found = predict(curve([10.0, 11, 12, 30, 40, 50]), PUBLISHED)
    assert found is not None
    assert found.length == 2
    assert found.speedup == pytest.approx(10 * (1 + 0.8 + 0.64) / 13)


def test_a_drafter_that_cant_pay_is_predicted_to_lose() -> None:
    found = predict(curve([10.0, 40, 80], draft=30.0), PUBLISHED)
    assert found is not None
    assert found.speedup < 1
    assert predict(curve([10.0, 10.0]), replace(PUBLISHED, offered=None)) is None


def test_costs_count_for_the_same_target_and_a_like_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path)
    _, _, drafter = load()
    assert drafter is not None
    block = drafter.config.block_size
    mine = curve([0.01] * block, 0.001, 0.01)
    target = DEMO / "target"
    one = entry_from(entry(block=block, published=[asdict(PUBLISHED)]), "here")
    assert measured_curve(target, one) is None
    file = {"key": store.pair_key(drafter), "pair": store.describe(drafter), "curve": asdict(mine)}
    store.write_json(tmp_path / "costs-1.json", file)
    assert measured_curve(target, one) == mine
    assert [g.length for g in gains(target, one)] == [block - 1]
    assert gains(None, one) == []
    for other in (replace(one, block=7), replace(one, method="dflash"), replace(one, block=None)):
        assert measured_curve(target, other) is None
    foreign = file | {"key": store.pair_key(drafter) | {"device": "another"}}
    store.write_json(tmp_path / "costs-1.json", foreign)
    assert measured_curve(target, one) is None

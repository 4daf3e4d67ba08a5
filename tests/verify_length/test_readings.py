"""A calibration chooses the pool of candidates by tokens per round and by what a round costs."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.drafters.chain import POOL
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.load import load_drafter
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.export import export
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.fit import record
from dspine_mlx.verify_length.readings import Reading, compare_readings, fastest, use_reading
from dspine_mlx.verify_length.schedule import prepare
from dspine_mlx.verify_length.store import calibration_path, load_reading, save_calibrations
from tests.support.bigrams import bigram_target, knowing_dspark
from tests.support.tiny import tiny_dflash


def pool_of(drafter: Drafter) -> int:
    return int(vars(drafter.network.config)["candidate_pool"])


def costs(draft: dict[int, float], row: float = 0.0) -> Any:
    """Seconds of steps, drafts by pool."""

    def seconds(drafter: Drafter, widths: list[int]) -> dict[int | str, float]:
        rows: dict[int | str, float] = {n: 1 + row * (n - 1) for n in widths}
        return rows | {"draft": draft[pool_of(drafter)]}

    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("knows", [True, False])
def test_the_pool_that_makes_most_tokens_per_second(
    knows: bool, temp: float, tokenizer: TokenizerWrapper
) -> None:
    """A head stronger than its backbone needs a large pool, which costs more; one that knows
    nothing does with a table."""
    model = bigram_target(2048, spread=4.0, frequency=2.0)
    drafter = knowing_dspark(model, 0.2)
    if not knows:
        head = drafter.network.markov_head
        head.markov_w2.weight = mx.zeros_like(head.markov_w2.weight)

    def accepted() -> np.ndarray:
        mx.random.seed(0)
        texts = [record(model, tokenizer, drafter, [i], Sampler(temp=temp), 40) for i in range(2)]
        return np.concatenate([text.accepted for text in texts])

    draft = {POOL: 0.3, 1024: 0.25, 64: 0.15, 0: 0.1}
    misfit = drafter.misfit
    found = compare_readings(drafter, accepted, costs(draft))
    assert pool_of(drafter) == POOL  # as it was
    assert drafter.misfit is misfit
    by_pool = {reading.changes.get("candidate_pool", POOL): reading for reading in found}
    assert list(by_pool) == [POOL, 0, 64, 1024]
    if knows:
        assert by_pool[0].acceptance_length < 0.9 * by_pool[POOL].acceptance_length
    use_reading(drafter, fastest(found).changes)
    assert (pool_of(drafter) == 0) == (not knows)


def test_a_reading_is_judged_at_its_fastest_length() -> None:
    """Half of the rounds accept 1 token, half of them 3, and each row costs half a draft."""
    seconds: dict[int | str, float] = {"draft": 1.0, 1: 1.0, 2: 1.5, 3: 2.0, 4: 2.5}
    reading = Reading.of("", {}, np.array([1, 3, 1, 3]), seconds)
    assert reading.acceptance_length == 3
    assert reading.length == 3
    assert reading.speed == pytest.approx(3 / 3.5)
    steep = seconds | {3: 4.0, 4: 5.0}
    assert Reading.of("", {}, np.array([1, 3, 1, 3]), steep)[3:] == (1, pytest.approx(2 / 2.5))


def test_the_checkpoint_stays_as_it_is_unless_another_reading_is_clearly_faster() -> None:
    own, other = (Reading(name, {}, 2.0, 3, speed) for name, speed in (("a", 1.0), ("b", 1.01)))
    assert fastest([own, other]) == own
    assert fastest([own, other._replace(speed=1.05)]).name == "b"


def test_a_method_with_one_reading_is_not_measured() -> None:
    drafter = tiny_dflash(bigram_target(64))
    assert compare_readings(drafter, lambda: pytest.fail("decoded"), costs({})) == []


def test_what_was_chosen_is_what_loads(tmp_path: Path) -> None:
    model = bigram_target(2048)
    folder = tmp_path / "drafter"
    export(knowing_dspark(model), folder, LossConfig(), dtype=mx.float32)
    drafter = load_drafter(folder, model)
    assert pool_of(drafter) == POOL
    modes = {"greedy": uncalibrated(drafter.config.num_proposals)}
    elsewhere = tmp_path / "elsewhere.json"
    save_calibrations(calibration_path(drafter), drafter, modes, {"candidate_pool": 64})
    save_calibrations(elsewhere, drafter, modes, {"candidate_pool": 0})
    again = load_drafter(folder, model)
    assert pool_of(again) == 64
    prepare(again, profile=False, calibration=elsewhere)
    assert pool_of(again) == 0


@pytest.mark.parametrize("change", [{"candidate_pool": -3}, {"top_k": 1}, {"candidate_pool": "x"}])
def test_a_reading_that_is_not_offered_is_ignored(change: dict[str, Any], tmp_path: Path) -> None:
    model = bigram_target(2048)
    drafter = knowing_dspark(model)
    path = tmp_path / "calibration.json"
    save_calibrations(path, drafter, {}, change)
    own = drafter.network.config
    use_reading(drafter, load_reading(drafter, path))
    assert drafter.network.config == own
    path.write_text(json.dumps(json.loads(path.read_text()) | {"reading": None}))
    assert load_reading(drafter, path) == {}
    path.write_text("{")
    assert load_reading(drafter, path) == {}

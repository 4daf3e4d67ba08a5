"""A probe compares a checkpoint's possible readings, and keeps the best for the pair."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.checkpoints.open import open_checkpoint
from dspine_mlx.convert import probe as module
from dspine_mlx.convert.probe import Reading, probe, settle
from dspine_mlx.drafters import METHODS
from dspine_mlx.drafters.chain import POOL
from dspine_mlx.drafters.dflash2 import DFlash2Config
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.target.model import Target
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.export import export
from tests.support.bigrams import bigram_target, knowing_dspark
from tests.support.dflash2 import dflash2_zlab
from tests.support.families import build


def folder_of(drafter: Drafter, path: Path) -> Path:
    export(drafter, path, LossConfig(), dtype=mx.float32)
    return path


@pytest.mark.parametrize(("knows", "kept"), [(True, False), (False, True)])
def test_a_table_is_kept_where_it_costs_no_tokens(
    knows: bool,
    kept: bool,
    tmp_path: Path,
    tokenizer: TokenizerWrapper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The walk is chosen for a head that proposes tokens the backbone ranks low, whatever the
    speeds; for other heads, the faster of the two."""
    model = bigram_target(2048, spread=4.0, frequency=2.0)
    drafter = knowing_dspark(model, 0.2)
    if not knows:
        head = drafter.network.markov_head
        head.markov_w2.weight = mx.zeros_like(head.markov_w2.weight)
    monkeypatch.setattr(module, "load", lambda *_: (model, tokenizer, drafter))
    calls: list[int] = []

    def timed(*args: Any, **options: Any) -> Any:
        pool = vars(drafter.network.config)["candidate_pool"]
        calls.append(pool)
        for response in stream(*args, **options):
            response.generation_tps = 1.0 if pool else 2.0
            yield response

    stream = module.stream_generate
    monkeypatch.setattr(module, "stream_generate", timed)
    found = probe("drafter", "target", max_tokens=60)
    assert calls == [POOL, 0, 64, 1024] * 2
    assert vars(drafter.config)["candidate_pool"]  # as it was
    assert found.chosen is not None
    assert (found.chosen.changes == {"candidate_pool": 0}) == kept
    walk, table, *_ = (reading.acceptance_length for reading in found.readings)
    assert table == walk if kept else table < 0.9 * walk


def test_the_kept_reading_is_what_loads(tmp_path: Path) -> None:
    drafter = knowing_dspark(bigram_target(64))
    folder = folder_of(drafter, tmp_path / "out")
    before = json.loads((folder / "config.json").read_text())
    settle(folder, Reading("a table", {"candidate_pool": 0}, 2.0, 1.0))
    assert vars(open_checkpoint(folder).config)["candidate_pool"] == 0
    after = json.loads((folder / "config.json").read_text())
    assert before | {"candidate_pool": 0} == after
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(("family", "told"), [("gemma3_text", True), ("qwen3", False)])
def test_the_scale_of_embeddings_is_asked_of_gemma_like_targets(family: str, told: bool) -> None:
    config = DFlash2Config.from_dict(dflash2_zlab(input_embedding_scale=3.0)[0])
    readings = METHODS["dflash2"].readings(config, Target(build(family)))
    scales = [changes["input_embedding_scale"] for changes in readings.values()]
    assert scales == ([pytest.approx(3.0 * np.sqrt(32))] if told else [])


@pytest.mark.parametrize(
    ("changes", "others"),
    [
        ({"markov_rank": 0}, []),
        ({}, [0, 64]),  # 1024 is more than there are
        ({"candidate_pool": 64}, [0, 200]),
        ({"candidate_pool": 0}, [64, 200]),
        ({"candidate_pool": 5000}, [0, 64]),
    ],
)
def test_only_a_markov_head_has_pools_to_compare(
    changes: dict[str, int], others: list[int]
) -> None:
    model = bigram_target(200)
    config = vars(knowing_dspark(model).config) | changes
    own = METHODS["dspark"].config.from_dict(config)
    offered = METHODS["dspark"].readings(own, Target(model)).values()
    assert [change["candidate_pool"] for change in offered] == others

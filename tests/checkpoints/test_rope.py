"""A rope theta missing from config.json is reported, never assumed silently."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from dspine_mlx.checkpoints.open import open_checkpoint
from dspine_mlx.checkpoints.rope import states_rope_theta
from dspine_mlx.load import load_drafter
from tests.support.checkpoints import dflash_zlab, save, speculators, tiny_target


def without_theta(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {k: without_theta(v) for k, v in config.items() if k != "rope_theta"}


@pytest.mark.parametrize("maker", [dflash_zlab, speculators], ids=["flat", "nested"])
def test_a_missing_theta_is_a_note_and_a_warning_at_load(
    maker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, weights = maker()
    whole = save(tmp_path / "whole", config, weights)
    lacking = save(tmp_path / "lacking", without_theta(config), weights)
    assert not any("rope_theta" in note for note in open_checkpoint(whole).notes)
    (note,) = [note for note in open_checkpoint(lacking).notes if "rope_theta" in note]
    assert "10000 is assumed" in note
    with caplog.at_level(logging.WARNING):
        load_drafter(whole, tiny_target()[0])
        assert not caplog.records
        load_drafter(lacking, tiny_target()[0])
    (record,) = caplog.records
    assert record.getMessage() == f"{lacking}: {note}"


@pytest.mark.parametrize(
    ("config", "states"),
    [
        ('{"rope_theta": 5}', True),
        ('{"rope_theta": null}', False),
        ('{"rope_parameters": {"full_attention": {"rope_theta": 5}}}', True),
        ('{"rope_scaling": {"factor": 2}, "list": [{"rope_theta": 5}]}', False),
        ("{}", False),
    ],
)
def test_where_a_theta_may_be(config: str, states: bool) -> None:
    assert states_rope_theta(json.loads(config)) == states

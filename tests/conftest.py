"""Fixtures for all tests."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

from dspine_mlx import costs
from dspine_mlx.dflash import DFlash
from dspine_mlx.load import DEMO
from tests.tiny import tiny_target

mx.disable_compile()  # on the CPU every compiled shape costs seconds of g++


@pytest.fixture(scope="session")
def tokenizer() -> TokenizerWrapper:
    return load_tokenizer(DEMO / "target")


@pytest.fixture(scope="session")
def model() -> nn.Module:
    return tiny_target()


@pytest.fixture(autouse=True)
def seeded() -> None:
    mx.random.seed(0)


@pytest.fixture(autouse=True)
def flat_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No measuring and no files in the user's cache: rows that cost nothing, so "auto" drafts."""

    def flat(drafter: DFlash) -> costs.Curve:
        rows = (1e-3,) * (drafter.config.num_proposals + 1)
        return costs.Curve((64, 2048), (1e-3, 1e-3), (1e-4, 1e-4), (rows, rows))

    monkeypatch.setattr(costs, "measure", flat)
    monkeypatch.setattr(costs, "CACHE", tmp_path / "cache")

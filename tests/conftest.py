"""Fixtures for all tests."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

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

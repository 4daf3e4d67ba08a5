"""Drafter files with anything wrong in them are refused in one sentence, or load and draft.

A failing example is printed with the blob that reproduces it (hypothesis's reproduce_failure).
"""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_model

from dspine_mlx.convert.report import report
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO, load_drafter

DRAFTER = DEMO / "drafter"
CONFIG = json.loads((DRAFTER / "config.json").read_text())
HEADER_BYTES = int.from_bytes((DRAFTER / "model.safetensors").read_bytes()[:8], "little")
SIZES = sorted(name for name, value in CONFIG.items() if type(value) is int)
HUGE = st.sampled_from([2**k + d for k in (16, 28, 29, 30, 31, 32, 53, 63, 64) for d in (-1, 0, 1)])
SCALARS = st.none() | st.booleans() | st.integers(-3, 70) | HUGE | st.floats() | st.text(max_size=4)
VALUES = SCALARS | st.lists(SCALARS, max_size=4) | st.dictionaries(st.text(max_size=4), SCALARS)
fuzzed = settings(max_examples=40, deadline=None, print_blob=True)


@pytest.fixture(scope="module")
def target() -> nn.Module:
    return load_model(DEMO / "target")[0]


def refused_or_drafts(folder: Path, target: nn.Module) -> None:
    """No other exception; a drafter that loads proposes tokens of the vocabulary."""
    with suppress(InputError):
        report(folder)
    try:
        drafter = load_drafter(folder, target)
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    size = len(drafter.config.target_layer_ids) * drafter.target.hidden_size
    features = mx.zeros((1, 3, size), drafter.target.dtype)
    tokens = drafter.propose(mx.array(5), features, drafter.make_cache()).ranked().candidates
    assert tokens.shape[0] == drafter.config.num_proposals
    assert 0 <= tokens.min().item() <= tokens.max().item() < drafter.target.vocab_size


def copied(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """The shipped drafter, its weights linked."""
    shutil.copytree(DRAFTER, folder)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_shipped_drafter_drafts(target: nn.Module) -> None:
    refused_or_drafts(DRAFTER, target)
    load_drafter(DRAFTER, target)


@fuzzed
@given(changes=st.dictionaries(st.sampled_from(SIZES), HUGE | st.integers(-1, 70), min_size=1))
def test_sizes_whose_products_overflow(changes: dict[str, int], target: nn.Module) -> None:
    with TemporaryDirectory() as home:
        refused_or_drafts(copied(Path(home) / "drafter", CONFIG | changes), target)


@fuzzed
@given(key=st.sampled_from(sorted(CONFIG)), value=VALUES)
def test_any_value_of_a_config(key: str, value: Any, target: nn.Module) -> None:
    with TemporaryDirectory() as home:
        refused_or_drafts(copied(Path(home) / "drafter", CONFIG | {key: value}), target)


@fuzzed
@given(
    places=st.lists(
        st.tuples(st.integers(0, HEADER_BYTES + 7), st.binary(min_size=1, max_size=3)), min_size=1
    )
)
def test_any_bytes_in_a_header(places: list[tuple[int, bytes]], target: nn.Module) -> None:
    with TemporaryDirectory() as home:
        folder = copied(Path(home) / "drafter")
        with (folder / "model.safetensors").open("r+b") as file:
            for at, data in places:
                file.seek(at)
                file.write(data)
        refused_or_drafts(folder, target)


@fuzzed
@given(
    names=st.dictionaries(
        st.sampled_from(["fc.weight", "norm.weight", "nosuch"]),
        st.sampled_from(["model.safetensors", "other.safetensors", "../model.safetensors", "", 7]),
        max_size=3,
    ),
    cut=st.integers(0, 80),
)
def test_any_index(names: dict[str, Any], cut: int, target: nn.Module) -> None:
    with TemporaryDirectory() as home:
        folder = copied(Path(home) / "drafter")
        text = json.dumps({"weight_map": names})
        (folder / "model.safetensors.index.json").write_text(text[: len(text) - cut % len(text)])
        refused_or_drafts(folder, target)

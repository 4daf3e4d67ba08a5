"""Fixtures for all tests."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import HealthCheck, settings
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.load import DEMO
from dspine_mlx.measure import verify_steps
from dspine_mlx.target import row_kernels
from dspine_mlx.verify_length import profile, store
from dspine_mlx.verify_length.costs import Curve
from tests.support.checkpoints import dspine_specforge, save
from tests.support.serving import ALL, Server, scripted_pair, serving
from tests.support.tiny import tiny_target

mx.disable_compile()  # on the CPU every compiled shape costs seconds of g++
# Shells start background jobs with SIGINT ignored, and child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Examples may take as long as a busy machine needs.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def tokenizer() -> TokenizerWrapper:
    return load_tokenizer(DEMO / "target")


@pytest.fixture(scope="session")
def model() -> nn.Module:
    return tiny_target()


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a target whose replies are scripted and of a drafter that knows them."""
    target, drafter = scripted_pair(tmp_path_factory.mktemp("pair"))
    return str(target), str(drafter)


@pytest.fixture(scope="session")
def server(scripted: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Our server with that pair."""
    flags = ("--model", scripted[0], "--draft-model", scripted[1], "--max-request-mb", "4", *ALL)
    with serving("dspine_mlx.server", tmp_path_factory.mktemp("server"), *flags) as server:
        yield server


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For training: a tiny Qwen3 with the shipped tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny_target()
    (folder / "config.json").write_text(json.dumps(vars(model.args)))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "target" / name, folder)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For training: 20 questions with their answers."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rows = [{"prompt": f"What is {i} + 1?", "completion": f"{i} + 1 = {i + 1}"} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """For conversion: a small checkpoint as published, in two files."""
    return save(tmp_path / "source", *dspine_specforge(), shards=2)


@pytest.fixture(autouse=True)
def seeded() -> None:
    mx.random.seed(0)


@pytest.fixture(autouse=True)
def flat_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the user's cache, no long measuring, and rows that cost nothing: "auto" drafts."""

    def flat(drafter: Drafter) -> Curve:
        rows = (1e-3,) * (drafter.most_offered + 1)
        return Curve((64, 2048), (1e-3, 1e-3), (1e-4, 1e-4), (rows, rows))

    monkeypatch.setattr(profile, "measure", flat)
    monkeypatch.setattr(verify_steps, "SECONDS", 0.0)
    monkeypatch.setattr(row_kernels, "CHECK_SECONDS", 1e9)  # a busy machine checks all widths
    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path / "cache")

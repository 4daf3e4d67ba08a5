"""--prompt-cache-file beside mlx_lm.cache_prompt and mlx_lm.generate themselves."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, save_prompt_cache
from typer.testing import CliRunner

from dspine_mlx.cli import app
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO
from tests.support import forked

TARGET, DRAFTER = str(DEMO / "target"), str(DEMO / "drafter")
BEFORE, QUESTION = "Tom has 4 apples.", "He buys 3 more. How many has he?"


def mlx_lm(*arguments: str) -> str:
    return forked.run("-m", "mlx_lm", *arguments, check=True).stdout


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cache") / "prompt.safetensors"
    mlx_lm("cache_prompt", "--model", TARGET, "--prompt", BEFORE, "--prompt-cache-file", str(path))
    return path


@pytest.mark.parametrize("drafter", [None, DRAFTER], ids=["plain", "drafted"])
def test_a_saved_prompt_goes_on_as_in_mlx_lm(file: Path, drafter: str | None) -> None:
    same = ("--prompt-cache-file", str(file), "--prompt", QUESTION, "--max-tokens", "16")
    wanted = mlx_lm("generate", *same, "--verbose", "False").strip()
    pair = () if drafter is None else ("--draft-model", drafter, "--verify-length", "4")
    result = CliRunner().invoke(app, ["generate", *same, *pair, "--json"])
    assert result.exception is None
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["text"].strip() == wanted
    assert (report["rounds"] > 0) == (drafter is not None)


def generated(path: Path, *more: str) -> str:
    """The message of the `InputError`."""
    command = ["generate", "-p", "a", "-m", "1", "--prompt-cache-file", str(path), *more]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, InputError)
    return str(result.exception)


def saved(path: Path, layers: int, model: str = TARGET) -> Path:
    caches = [KVCache() for _ in range(layers)]
    for cache in caches:
        cache.update_and_fetch(mx.ones((1, 2, 3, 32)), mx.ones((1, 2, 3, 32)))
    save_prompt_cache(str(path), caches, {"model": model, "tokenizer_config": "{}"})
    return path


def test_what_is_no_saved_prompt_is_refused(tmp_path: Path) -> None:
    weights = DEMO / "target" / "model.safetensors"
    assert "was not saved by mlx_lm.cache_prompt" in generated(weights)
    short = tmp_path / "short.safetensors"
    short.write_bytes(weights.read_bytes()[:1000])
    assert "is truncated" in generated(short) or "may be truncated" in generated(short)
    text = tmp_path / "text.safetensors"
    text.write_text("hello")
    assert "no safetensors file" in generated(text)
    six = saved(tmp_path / "six.safetensors", 6)
    assert "was saved with the model" in generated(six, "--model", "another")
    five = saved(tmp_path / "five.safetensors", 5)
    assert "the prompt cache has 5 layers, the model has 6" in generated(five)

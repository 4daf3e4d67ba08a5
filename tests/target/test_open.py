"""Targets whose files are wrong: one sentence that names the folder, whatever is wrong."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO
from dspine_mlx.target.open import open_target

TARGET = DEMO / "target"
CONFIG = json.loads((TARGET / "config.json").read_text())


def copied(folder: Path, file: str, changes: dict[str, Any]) -> Path:
    """The shipped target with some values of one of its files changed."""
    shutil.copytree(TARGET, folder)
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | changes))
    return folder


def test_the_shipped_target_opens() -> None:
    model, tokenizer = open_target(TARGET, "demo")
    assert model(mx.array([[1, 2]])).shape == (1, 2, CONFIG["vocab_size"])
    assert tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("tokenizer_config.json", "tool_parser_type", "..x"),
        ("config.json", "num_attention_heads", 0),
        ("config.json", "num_attention_heads", "4"),
        ("config.json", "tie_word_embeddings", "x"),
        ("config.json", "hidden_size", 2**31),
        ("config.json", "num_hidden_layers", 10**9),
        ("config.json", "text_config", {"num_local_experts": 10**9}),
        ("config.json", "text_config", "x"),
        ("config.json", "max_position_embeddings", "x"),
        ("tokenizer_config.json", "model_max_length", "x"),
        ("config.json", "rms_norm_eps", "small"),
        ("config.json", "rms_norm_eps", None),
        ("config.json", "rope_theta", []),
        ("config.json", "model_type", 7),
        ("config.json", "quantization", {"bits": 4}),
    ],
)
def test_wrong_values_are_one_sentence(tmp_path: Path, file: str, key: str, value: Any) -> None:
    folder = copied(tmp_path / "target", file, {key: value})
    with pytest.raises(InputError, match="^mine can't be loaded as a target: .") as caught:
        open_target(folder, "mine")
    assert "\n" not in str(caught.value)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=5), SCALARS)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(key=st.sampled_from(sorted(CONFIG)), value=VALUES)
def test_any_value_in_a_config_loads_or_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    """No other exception, and no end of the interpreter."""
    folder = tmp_path / "target"
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(InputError):
        open_target(copied(folder, "config.json", {key: value}), "mine")

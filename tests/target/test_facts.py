"""inspect of a target, beside what mlx-lm loads of it."""

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from typer.testing import CliRunner

from dspine_mlx.cli import app
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO
from dspine_mlx.target.facts import is_target, target_facts


def test_a_target_is_what_mlx_lm_loads() -> None:
    model, tokenizer = mlx_lm.load(str(DEMO / "target"))
    result = CliRunner().invoke(app, ["inspect", str(DEMO / "target"), "--json"])
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["kind"] == "target"
    assert facts["model_type"] == model.model_type
    assert facts["layers"] == len(model.layers)
    assert facts["vocab_size"] == model.model.embed_tokens.weight.shape[0]
    assert facts["hidden_size"] == model.model.embed_tokens(mx.array([1])).shape[1]
    assert facts["bytes"] == sum(v.nbytes for _, v in tree_flatten(model.parameters()))
    assert facts["chat_template"] == tokenizer.has_chat_template
    assert facts["problems"] == []


def test_a_nested_config_and_packing_are_read(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 7, "hidden_size": 8, "max_position_embeddings": 99}
    packing = {"group_size": 64, "bits": 4}
    config = {"model_type": "gemma3", "text_config": text, "quantization": packing}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a.weight": mx.zeros((2, 3))})
    facts = target_facts(tmp_path)
    assert (facts["layers"], facts["hidden_size"], facts["context"]) == (7, 8, 99)
    assert (facts["bytes"], facts["quantization"]) == (24, packing)
    assert not facts["chat_template"]


def test_a_broken_drafter_is_not_taken_for_a_target(tmp_path: Path) -> None:
    config = json.loads((DEMO / "drafter" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert isinstance(result.exception, InputError)
    for kind in (None, 7, "no_such_model", "../os", "", "cache.x"):
        assert not is_target({"model_type": kind})
    assert is_target({"model_type": "qwen3"})
    assert not is_target({"model_type": "qwen3", "target_layer_ids": [1]})

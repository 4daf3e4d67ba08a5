"""What a checkpoint's settings mean, and which can't be run."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from dspine_mlx.checkpoints.open import open_checkpoint
from dspine_mlx.convert.conversion import convert
from dspine_mlx.drafters.settings import QWEN3_DEFAULTS
from dspine_mlx.errors import InputError
from tests.support.checkpoints import (
    Checkpoint,
    dflash_zlab,
    dspark_deepspec,
    dspine_reference,
    save,
    speculators,
)


def opened(tmp_path: Path, checkpoint: Checkpoint, **changes: Any) -> Any:
    config, weights = checkpoint
    return open_checkpoint(save(tmp_path, config | changes, weights)).config


def test_qwen3_defaults_are_transformers() -> None:
    defaults = Qwen3Config()
    theirs = defaults.to_dict() | {"sliding_window": 4096, "rope_theta": defaults.default_theta}
    assert {name: theirs[name] for name in QWEN3_DEFAULTS} == QWEN3_DEFAULTS


def test_speculators_taps_are_one_below_its_ids(tmp_path: Path) -> None:
    config = opened(tmp_path, speculators(), aux_hidden_state_layer_ids=[1, 3, 4])
    assert config.target_layer_ids == (0, 2, 3)


def test_the_embedding_output_can_not_be_tapped(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds 0; ids from 1"):
        opened(tmp_path, speculators(), aux_hidden_state_layer_ids=[0, 3, 4])


def with_tokens(tokens: Any) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": tokens}
    return {"proposal_methods": [method]}


@pytest.mark.parametrize(
    ("stated", "tokens", "slot"),
    [(True, 4, 0), (False, 5, 1), (None, 5, 0), (None, 4, 1), (True, 3, 0)],
)
def test_which_slot_proposes_first(
    tmp_path: Path, stated: bool | None, tokens: int, slot: int
) -> None:
    config = opened(
        tmp_path, speculators(), sample_from_anchor=stated, speculators_config=with_tokens(tokens)
    )
    assert config.first_slot == slot


@pytest.mark.parametrize(
    "section", [with_tokens(3), with_tokens("5"), {}, {"proposal_methods": [1]}]
)
def test_an_unknown_first_slot_is_refused(tmp_path: Path, section: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="which slot proposes first is unknown"):
        opened(tmp_path, speculators(), speculators_config=section)


def test_causality_goes_by_precedence(tmp_path: Path) -> None:
    sliding: dict[str, Any] = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
    }
    config, weights = dflash_zlab(**sliding)

    def causal(**changes: Any) -> list[bool]:
        inner = config["dflash_config"] | changes.pop("inner", {})
        opened = open_checkpoint(
            save(tmp_path, config | changes | {"dflash_config": inner}, weights)
        )
        return [opened.config.layer_causal(i) for i in range(2)]

    assert causal() == [True, False]
    assert causal(inner={"causal": True}) == [True, True]
    assert causal(inner={"causal": True}, is_causal=False) == [False, False]
    assert causal(inner={"causal": False}) == [False, False]


def test_speculators_causality_is_that_of_training(tmp_path: Path) -> None:
    layer = speculators()[0]["transformer_layer_config"]
    layer = layer | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    config = opened(tmp_path, speculators(method="dflash"), transformer_layer_config=layer)
    assert [config.layer_causal(i) for i in range(2)] == [True, False]
    assert config.window_from_anchor
    config = opened(
        tmp_path,
        speculators(method="dflash"),
        transformer_layer_config=layer,
        sliding_window_non_causal=True,
    )
    assert [config.layer_causal(i) for i in range(2)] == [False, False]


def test_nested_settings_win_and_the_swa_window_too(tmp_path: Path) -> None:
    config, weights = dflash_zlab(sliding_window=99, mask_token_id=1)
    config["dflash_config"] |= {"block_size": 3, "use_swa": True, "swa_window_size": 6}
    read = open_checkpoint(save(tmp_path, config, weights)).config
    assert (read.block_size, read.mask_token_id, read.sliding_window) == (3, 94, 6)
    assert set(read.layer_types) == {"sliding_attention"}


def test_infinity_in_a_key_that_nobody_reads(tmp_path: Path) -> None:
    config, weights = dspark_deepspec()
    folder = save(tmp_path, config | {"time_step_limit": [0.0, float("inf")]}, weights)
    assert "Infinity" in (folder / "config.json").read_text()  # as recurrent targets have it
    assert open_checkpoint(folder).layout.name == "DSpark, DeepSpec"


def test_copied_target_keys_are_noise(tmp_path: Path) -> None:
    plain = dspark_deepspec()
    noisy = plain[0] | {"attn_output_gate": True, "partial_rotary_factor": 0.25, "mrope": [1, 2]}
    quiet = {
        k: v for k, v in plain[0].items() if k not in ("attn_output_gate", "partial_rotary_factor")
    }
    quiet["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    a = open_checkpoint(save(tmp_path / "a", noisy, plain[1])).config
    b = open_checkpoint(save(tmp_path / "b", quiet, plain[1])).config
    assert a == b
    assert a.rope_scaling is None


def test_windows_from_use_sliding_window(tmp_path: Path) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    config = opened(tmp_path, dflash_zlab(), **changes)
    assert config.layer_types == ("full_attention", "sliding_attention")
    assert opened(tmp_path, dflash_zlab(), sliding_window=7).layer_window(1) is None


def test_yarn_takes_transformers_meaning_of_absent_keys(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    config = opened(tmp_path, dflash_zlab(), rope_scaling=yarn)
    assert config.rope_scaling["original_max_position_embeddings"] == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layer_types": ["linear_attention"] * 2}, "each must be full_attention or sliding"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "factor 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 0}}, "beta_fast 0"),
        ({"rope_scaling": {"type": "yarn", "factor": float("1e999")}}, "factor inf"),
        ({"rope_scaling": {"type": "yarn"}}, "factor None"),
        ({"rope_scaling": "yarn"}, "must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differ by layer type"),
        ({"dflash_config": [1]}, "must be an object"),
        ({"mask_token_id": 96, "dflash_config": {"target_layer_ids": [0, 2, 3]}}, "outside"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be from 1"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"block_size": 10**9}, "block_size is 1000000000"),
        ({"head_dim": -8}, "head_dim is -8"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ({"rms_norm_eps": float("1e999")}, "rms_norm_eps is inf"),
        ({"dflash_config": {"mask_token_id": 3}}, "lacks target_layer_ids"),
        ({"rope_is_neox_style": "no"}, "rope_is_neox_style"),
    ],
)
def test_settings_that_can_not_be_run_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config, weights = dflash_zlab()
    folder = save(tmp_path, config, weights)
    text = json.dumps(config | changes).replace("Infinity", "1e999")
    (folder / "config.json").write_text(text)
    with pytest.raises(InputError, match=message):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_taps_can_be_given_where_there_are_none(tmp_path: Path) -> None:
    for i, checkpoint in enumerate((dflash_zlab(), speculators(), dspine_reference())):
        config, weights = checkpoint
        inner = config.get("config", config)
        inner.get("dflash_config", inner).pop("target_layer_ids", None)
        config.pop("aux_hidden_state_layer_ids", None)
        folder = save(tmp_path / str(i), config, weights)
        with pytest.raises(InputError, match="target_layer_ids|aux_hidden_state_layer_ids"):
            open_checkpoint(folder)
        assert open_checkpoint(folder, target_layer_ids=[0, 2, 3]).config.target_layer_ids == (
            0,
            2,
            3,
        )

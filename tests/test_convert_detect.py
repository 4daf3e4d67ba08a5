"""Which layout a checkpoint has, what its config means, and what is refused with which words."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from transformers import Qwen3Config

from dspine_mlx.convert.checkpoint import open_checkpoint
from dspine_mlx.convert.conversion import convert
from dspine_mlx.convert.detect import detect
from dspine_mlx.convert.settings import QWEN3_DEFAULTS
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter
from tests.checkpoints import (
    Checkpoint,
    Shape,
    dflash_block7,
    dflash_zlab,
    dspark_deepspec,
    dspark_gemma4,
    dspark_specforge,
    dspine_reference,
    dspine_specforge,
    dspine_tencent,
    save,
    speculators,
    tiny_target,
)

KNOWN: dict[str, Checkpoint] = {
    "DFlash, z-lab": dflash_zlab(),
    "DFlash, speculators": speculators(method="dflash"),
    "DSpark, DeepSpec": dspark_deepspec(),
    "DSpark for Gemma 4, DeepSpec": dspark_gemma4(),
    "DSpark, SpecForge": dspark_specforge(),
    "DSpark, speculators": speculators(),
    "DSpine, SpecForge": dspine_specforge(),
    "DSpine, reference": dspine_reference(),
    "DSpine, Tencent": dspine_tencent(),
}


@pytest.mark.parametrize("name", KNOWN)
def test_every_layout_is_named(name: str) -> None:
    config, weights = KNOWN[name]
    assert detect(config, weights).name == name
    assert detect(config, [f"model.{tensor}" for tensor in weights]).name == name


def test_block7_is_dspark_of_rank_0(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, *dflash_block7()))
    assert checkpoint.method == "dspark"
    assert (checkpoint.config.first_slot, checkpoint.config.num_proposals) == (0, 5)
    assert vars(checkpoint.config)["markov_rank"] == 0


@pytest.mark.parametrize("config", ["DSpine, SpecForge", "DSpark, SpecForge", "DSpark, DeepSpec"])
@pytest.mark.parametrize("tensors", ["DSpine, SpecForge", "DSpark, SpecForge"])
def test_a_config_over_another_methods_tensors_is_refused(config: str, tensors: str) -> None:
    if config[:6] == tensors[:6]:
        return
    with pytest.raises(InputError, match="one checkpoint must be of one method") as error:
        detect(KNOWN[config][0], KNOWN[tensors][1])
    assert config[:6] in str(error.value)
    assert tensors[:6] in str(error.value)


def test_dspine_never_passes_as_dflash_nor_the_reverse() -> None:
    spine, flash = dspine_specforge(), dflash_zlab()
    named_dflash = {"architectures": ["DFlashDraftModel"], "dflash_config": {}}
    assert detect(named_dflash, spine[1]).method == "dspine"
    assert detect(named_dflash, flash[1]).method == "dflash"
    with pytest.raises(InputError, match="says DSpine but no tensor is named injection"):
        detect({"dspine_config": {"top_k": 4}}, flash[1])
    with pytest.raises(InputError, match="DFlash.*speculators_model_type.*DSpine"):
        detect({"speculators_model_type": "dflash"}, spine[1])


def test_the_bridge_alone_is_enough_to_refuse_dflash_tensors(tmp_path: Path) -> None:
    config, _ = dspine_tencent()
    folder = save(tmp_path, config, dflash_zlab()[1])
    with pytest.raises(InputError, match="missing: injection"):
        load_drafter(folder, tiny_target()[0])


@pytest.mark.parametrize(
    ("config", "extra", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, (), "DFlash2 is not supported yet"),
        ({}, ("candidate_selector.predecessor_codebook",), "DFlash2 is not supported yet"),
        ({"speculators_model_type": "dflash2"}, (), "DFlash2 is not supported yet"),
        ({"dflash_config": {"projector_type": "domino"}}, (), "Domino is not supported yet"),
        ({}, ("prefix_gru.weight_ih_l0",), "Domino is not supported yet"),
        ({"architectures": ["Qwen35DSparkModel"]}, ("markov_head.x",), "gated queries"),
        ({"speculators_model_type": "eagle3"}, (), "'eagle3'; dspark, dflash, dflash2 are known"),
        ({"dflash_config": {"projector_type": "mystery"}}, (), "'mystery'"),
        ({"architectures": "DFlash"}, (), "must be a list"),
    ],
)
def test_relatives_are_named(config: dict[str, Any], extra: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        detect(config, [*dflash_zlab()[1], *extra])


def test_a_target_is_no_drafter() -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]
    with pytest.raises(InputError, match=r"expected fc.weight.*found 2 tensors: model.embed"):
        detect({"architectures": ["Qwen3ForCausalLM"]}, names)


# --- settings -----------------------------------------------------------------------------------


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


# --- tensors ------------------------------------------------------------------------------------


def test_all_wrong_tensors_are_named_at_once(tmp_path: Path) -> None:
    config, weights = dspine_specforge()
    weights["surprise"] = np.ones((2, 3), np.float32)
    weights["model.norm.weight"] = weights["norm.weight"]
    weights["injection.writes.0.weight"] = np.ones((32, 13), np.float32)
    weights["injection.readouts.7.weight"] = weights["injection.readouts.0.weight"]
    del weights["hidden_norm.weight"], weights["injection.receiver_gate.weight"]
    folder = save(tmp_path / "source", config, weights)
    with pytest.raises(InputError) as error:
        convert(folder, tmp_path / "out")
    message = str(error.value)
    for part in (
        "missing: injection.receiver_gate.weight [12, 24], hidden_norm.weight [32]",
        "surprise [2, 3]",
        "injection.readouts.7.weight [24, 32]",
        "twice: norm.weight by model.norm.weight and norm.weight",
        "injection.writes.0.weight is [32, 13], not [32, 12]",
    ):
        assert part in message
    assert "\n" not in message


def test_parts_of_unequal_shape_are_named(tmp_path: Path) -> None:
    config, weights = dspine_specforge()
    weights["injection.message.weight"] = np.ones((13, 24), np.float32)
    weights["injection.receiver_gate.weight"] = np.ones((11, 24), np.float32)  # the sum still fits
    folder = save(tmp_path / "source", config, weights)
    with pytest.raises(
        InputError, match=r"receiver_gate.weight \[11, 24\].*message.weight \[13, 24\]"
    ):
        convert(folder, tmp_path / "out")


def test_prefixes_and_aliases(tmp_path: Path) -> None:
    config, weights = dflash_zlab()
    renames = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    other = {"mask_embedding": np.ones(32, np.float32)}
    for name, value in weights.items():
        for old, new in renames.items():
            name = name.replace(old, new)
        other[f"model.{name}" if "layers" in name else name] = value
    model, _ = tiny_target()
    a = load_drafter(save(tmp_path / "a", config, weights), model)
    b = load_drafter(save(tmp_path / "b", config, other), model)
    features = mx.random.normal((1, 3, 96))
    first, second = (d.propose(3, features, d.make_cache()).ranked().first for d in (a, b))
    assert mx.array_equal(first, second)


# --- DSpine's codes, and names not known here ---------------------------------------------------

STRANGE = {
    "injection.readouts.": "bridge.read.",
    "injection.writes.": "bridge.out.",
    "injection.message": "bridge.c",
    "injection.receiver_gate": "bridge.a",
    "injection.predecessor_gate": "bridge.b",
    "injection.bias": "bridge.offset",
    "transfer_codes": "bridge.table",
}


def strange_names(weights: dict[str, np.ndarray], parts: tuple[str, ...]) -> dict[str, np.ndarray]:
    out = {}
    for name, value in weights.items():
        for old in parts:
            name = name.replace(old, STRANGE[old])
        out[name] = value
    return out


def test_shapes_tell_unknown_names_apart_but_for_the_gates(tmp_path: Path) -> None:
    config, weights = dspine_tencent()
    parts = tuple(p for p in STRANGE if p not in ("injection.message", "injection.receiver_gate"))
    folder = save(tmp_path / "source", config, strange_names(weights, parts))
    plan = convert(folder, tmp_path / "out")
    assert "bridge.read.1.weight: taken for injection.readouts.1.weight by its shape" in plan.notes
    assert "bridge.b.weight: taken for injection.predecessor_gate.weight by its shape" in plan.notes
    written = mx.load(str(tmp_path / "out" / "model.safetensors"))
    for name in ("injection.readouts.1.weight", "injection.writes.0.weight", "injection.bias"):
        np.testing.assert_array_equal(np.array(written[name]), weights[name])


def test_gates_without_names_are_never_guessed(tmp_path: Path) -> None:
    config, weights = dspine_tencent()
    folder = save(tmp_path / "source", config, strange_names(weights, tuple(STRANGE)))
    with pytest.raises(InputError, match="give --rename a file with this table") as error:
        convert(folder, tmp_path / "out")
    text = str(error.value)
    table = json.loads(text[text.index("{") :])
    assert table["bridge.table"] == "transfer_codes"
    assert [table[f"bridge.{x}.weight"] for x in "abc"] == ["FILL IN"] * 3
    file = tmp_path / "names.json"
    file.write_text(json.dumps(table))
    with pytest.raises(InputError, match="gives FILL IN"):
        convert(folder, tmp_path / "out", rename=file)
    order = {"a": "receiver_gate", "b": "predecessor_gate", "c": "message"}
    table |= {f"bridge.{x}.weight": f"injection.{name}.weight" for x, name in order.items()}
    file.write_text(json.dumps(table))
    convert(folder, tmp_path / "out", rename=file)
    written = mx.load(str(tmp_path / "out" / "model.safetensors"))["injection.gates.weight"]
    stacked = [weights[f"injection.{name}.weight"] for name in order.values()]
    np.testing.assert_array_equal(np.array(written), np.concatenate(stacked))


def test_equal_shapes_of_two_roles_are_ambiguous(tmp_path: Path) -> None:
    shape = Shape(H=24, r=24, a=24)  # readouts and writes are all [24, 24]
    config, weights = dspine_tencent(shape)
    folder = save(
        tmp_path, config, strange_names(weights, ("injection.readouts.", "injection.writes."))
    )
    with pytest.raises(InputError, match="shapes fit several"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"no.such": "fc.weight"}, "has no.such, which the files do not"),
        ({"norm.weight": "fc.weight"}, "gives fc.weight to two tensors"),
        ({"norm.weight": "nothing"}, "gives nothing, no name of DSpine"),
        ({"norm.weight": 3}, "must map names to names"),
    ],
)
def test_wrong_tables_of_names(tmp_path: Path, table: dict[str, Any], message: str) -> None:
    file = tmp_path / "names.json"
    file.write_text(json.dumps(table))
    folder = save(tmp_path / "source", *dspine_specforge())
    with pytest.raises(InputError, match=message):
        convert(folder, tmp_path / "out", rename=file)


def split_codes(folder: Path, name: str = "transfer.safetensors") -> dict[str, np.ndarray]:
    config, weights = dspine_reference()
    codes = weights.pop("codes")
    save(folder, config, weights)
    mx.save_safetensors(str(folder / name), {"codes": mx.array(codes)})
    return {"codes": codes}


def test_codes_in_a_file_of_their_own(tmp_path: Path) -> None:
    wanted = split_codes(tmp_path / "source")["codes"]
    convert(tmp_path / "source", tmp_path / "out")
    written = mx.load(str(tmp_path / "out" / "model.safetensors"))["transfer_codes.weight"]
    np.testing.assert_array_equal(np.array(written), wanted)


def test_codes_from_elsewhere(tmp_path: Path) -> None:
    wanted = split_codes(tmp_path / "source", "transfer.safetensors")["codes"]
    codes = tmp_path / "codes.safetensors"
    (tmp_path / "source" / "transfer.safetensors").rename(codes)
    with pytest.raises(InputError, match="give --target, or --codes"):
        convert(tmp_path / "source", tmp_path / "out")
    convert(tmp_path / "source", tmp_path / "out", codes=codes)
    written = mx.load(str(tmp_path / "out" / "model.safetensors"))["transfer_codes.weight"]
    np.testing.assert_array_equal(np.array(written), wanted)
    with pytest.raises(InputError, match="has its own"):
        convert(save(tmp_path / "own", *dspine_specforge()), tmp_path / "x", codes=codes)
    with pytest.raises(InputError, match="have no transfer codes"):
        convert(save(tmp_path / "flash", *dflash_zlab()), tmp_path / "x", codes=codes)


@pytest.mark.parametrize("ready", [False, None])
def test_codes_must_be_ready(tmp_path: Path, ready: bool | None) -> None:
    config, weights = dspine_specforge()
    if ready is None:  # no flag, and the zeros of a fresh buffer
        del weights["transfer_ready"]
        weights["transfer_codes"] = np.zeros_like(weights["transfer_codes"])
    else:
        weights["transfer_ready"] = np.array(ready)
    with pytest.raises(InputError, match="transfer_ready is false|no unit length"):
        convert(save(tmp_path / "source", config, weights), tmp_path / "out")
    assert not (tmp_path / "out").exists()

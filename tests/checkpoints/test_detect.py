"""How layouts are detected, which tensors they need, and how everything else is refused."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dspine_mlx.checkpoints.detect import detect
from dspine_mlx.checkpoints.open import open_checkpoint
from dspine_mlx.convert.conversion import convert
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter
from tests.support.checkpoints import (
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
    assert detect(config, weights)[1].name == name
    assert detect(config, [f"model.{tensor}" for tensor in weights])[1].name == name


def test_block7_is_dspark_of_rank_0(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, *dflash_block7()))
    assert checkpoint.method.name == "dspark"
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
    assert detect(named_dflash, spine[1])[0].name == "dspine"
    assert detect(named_dflash, flash[1])[0].name == "dflash"
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
        ({"architectures": ["MiniMaxDFlash2DraftModel"]}, (), "DFlash2 for MiniMax: its swigluoai"),
        ({"architectures": ["LiLiCorrDraftModel"]}, (), "LiLiCorr: its correlation head"),
        ({"dflash_config": {"lilicorr_candidate_topk": 8}}, (), "LiLiCorr: its correlation head"),
        ({"dflash_config": {"projector_type": "p-eagle"}}, (), "P-EAGLE: its head"),
        ({"dflash_config": {"projector_type": "dspark_kv"}}, (), "DSpark-KV: its head"),
        ({"architectures": ["HSpecDraftModel"]}, (), "HSpec: its head is not supported"),
        (
            {"architectures": ["DFlash2DraftModel"]},
            (),
            r"says DFlash2 but no tensor is named candidate_selector\.\*",
        ),
        ({"dflash_config": {"projector_type": "domino"}}, (), "says Domino but no tensor is named"),
        ({"architectures": ["Qwen35DSparkModel"]}, ("markov_head.x",), "gated queries"),
        ({"speculators_model_type": "eagle3"}, (), "'eagle3'; dflash, dspark, dflash2 are known"),
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

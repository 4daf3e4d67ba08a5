"""dspine-mlx convert and inspect, as a user calls them."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from dspine_mlx.cli import app
from dspine_mlx.convert.probe import Probe, probe
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO
from tests.drafters.test_transfer_space import save_target
from tests.support.checkpoints import (
    Shape,
    dflash_zlab,
    dspark_deepspec,
    dspine_specforge,
    save,
    speculators,
)

pytestmark = pytest.mark.slow

runner = CliRunner()


def run(*args: object) -> Result:
    return runner.invoke(app, [str(arg) for arg in args])


def test_convert_verify_and_load_again(tmp_path: Path) -> None:
    source = save(tmp_path / "source", *dspine_specforge())
    result = run("convert", "--hf-path", source, "--mlx-path", tmp_path / "out", "--verify")
    assert result.exit_code == 0
    assert "DSpine, SpecForge, 32 tensors" in result.stdout
    assert "rounding only" in result.stderr
    again = run("convert", "--hf-path", source, "--mlx-path", tmp_path / "out")
    assert again.exit_code != 0
    assert isinstance(again.exception, InputError)


def test_json_is_one_object(tmp_path: Path) -> None:
    source = save(tmp_path / "source", *dspine_specforge(Shape(H=64, I=64, r=64)))
    flags = ("-q", "--q-bits", 8, "--verify", "--json")
    result = run("convert", "--hf-path", source, "--mlx-path", tmp_path / "out", *flags)
    value = json.loads(result.stdout)
    assert value["method"] == "dspine"
    assert value["verify"]["passed"] is True
    assert value["verify"]["exact"] is False
    stored = {t["name"]: t["stored"] for t in value["tensors"]}
    assert stored["fc.weight"] == {"group_size": 64, "bits": 8, "mode": "affine"}
    assert stored["norm.weight"] == "float32"
    assert value["bytes"] == sum(t["bytes"] for t in value["tensors"])


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    source = save(tmp_path / "source", *dspine_specforge())
    result = run("convert", "--hf-path", source, "--mlx-path", tmp_path / "out", "--dry-run")
    assert result.exit_code == 0
    assert "injection.predecessor_gate.weight" in result.stdout
    assert "Would write" in result.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_the_given_taps(tmp_path: Path) -> None:
    config, weights = dflash_zlab()
    del config["dflash_config"]["target_layer_ids"]
    source = save(tmp_path / "source", config, weights)
    args = ("convert", "--hf-path", source, "--mlx-path", tmp_path / "out", "--target-layer-ids")
    assert isinstance(run(*args, "0,x").exception, InputError)
    assert run(*args, "0,2,3").exit_code == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["target_layer_ids"] == [0, 2, 3]


def test_ends_equal_to_the_targets_are_left_out(tmp_path: Path) -> None:
    shape = Shape()
    target = save_target(tmp_path / "target", shape)
    held = mx.load(str(target / "model.safetensors"))
    config, weights = dspark_deepspec(shape)
    weights["embed_tokens.weight"] = np.array(held["model.embed_tokens.weight"])
    source = save(tmp_path / "source", config, weights)
    flags = ("--target", target, "--verify", "--json")
    result = run("convert", "--hf-path", source, "--mlx-path", tmp_path / "out", *flags)
    value = json.loads(result.stdout)
    names = [t["name"] for t in value["tensors"]]
    assert "embed_tokens.weight" not in names
    assert "lm_head.weight" in names
    assert value["notes"] == ["embed_tokens.weight: equal to the target's, which is used"]
    assert value["verify"]["passed"] is True


def test_inspect_before_and_after(tmp_path: Path) -> None:
    shape = Shape(H=64, I=64, r=64, hd=16)
    source = save(tmp_path / "source", *dspine_specforge(shape))
    run("convert", "--hf-path", source, "--mlx-path", tmp_path / "out", "-q")
    before, after = (
        json.loads(run("inspect", tmp_path / name, "--json").stdout) for name in ("source", "out")
    )
    assert (before["converted"], after["converted"]) == (False, True)
    assert before["problems"] == after["problems"] == []
    for name in ("method", "target", "block_size", "proposals", "rank", "message_size", "causal"):
        assert before[name] == after[name]
    assert before["parameters"] == after["parameters"]
    assert before["target"] == {
        "hidden_size": 64, "vocab_size": 96, "layers": None, "taps": [0, 2, 3]
    }  # fmt: skip
    assert after["quantization"]["bits"] == 4
    text = run("inspect", tmp_path / "out").stdout
    assert "DSpine, dspine-mlx" in text


def test_inspect_counts_parameters(tmp_path: Path) -> None:
    config, weights = speculators(reduced=True)
    facts = json.loads(run("inspect", save(tmp_path, config, weights), "--json").stdout)
    floats = sum(w.size for n, w in weights.items() if n not in ("d2t", "t2d"))
    assert facts["parameters"] == floats
    assert (facts["draft_vocab_size"], facts["rank"]) == (40, 8)


def test_inspect_lists_problems(tmp_path: Path) -> None:
    config, weights = dspine_specforge()
    del weights["norm.weight"]
    result = run("inspect", save(tmp_path, config, weights), "--json")
    assert result.exit_code == 1
    assert "missing: norm.weight" in json.loads(result.stdout)["problems"][0]


def test_inspect_names_a_target_and_convert_refuses_it(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", Shape())
    shown = run("inspect", target, "--json")
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)["kind"] == "target"
    result = run("convert", "--hf-path", target, "--mlx-path", tmp_path / "out")
    assert isinstance(result.exception, InputError)
    assert "no drafter of a known layout" in str(result.exception)


def test_a_broken_target_is_one_sentence(tmp_path: Path) -> None:
    """--target takes whatever mlx-lm raises for a refusal of the folder."""
    target = save_target(tmp_path / "target", Shape())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0}))
    source = save(tmp_path / "source", *dflash_zlab())
    result = run("convert", "--hf-path", source, "--mlx-path", tmp_path / "out", "--target", target)
    assert isinstance(result.exception, InputError)
    assert f"{target} can't be loaded as a target: " in str(result.exception)


def test_a_probe_of_noise_says_so(tmp_path: Path) -> None:
    """A drafter of random weights for the target that ships: nothing it proposes is accepted."""
    target = json.loads((DEMO / "target" / "config.json").read_text())
    shape = Shape(H=target["hidden_size"], V=target["vocab_size"], taps=(1, 3), B=4)
    source = save(tmp_path / "source", *dflash_zlab(shape))
    args = ("--hf-path", source, "--mlx-path", tmp_path / "out")
    assert isinstance(run("convert", *args, "--probe").exception, InputError)
    changed = json.loads((source / "config.json").read_text())
    changed["num_target_layers"] = target["num_hidden_layers"]
    (source / "config.json").write_text(json.dumps(changed))
    result = run("convert", *args, "--target", DEMO / "target", "--probe")
    assert result.exit_code == 1
    assert "read wrongly or was trained for another" in result.stderr
    found = probe(tmp_path / "out", DEMO / "target", max_tokens=12)
    assert found.misread
    assert found.rounds >= 5
    assert not Probe(3.0, 5, "").misread


@pytest.mark.parametrize(
    "flags",
    [
        ("--verify", "--codes-from-head"),
        ("--q-mode", "int3", "-q"),
        ("--q-bits", 7, "-q"),
        ("--dtype", "int8"),
        ("--codes-bits", "7"),
    ],
)
def test_bad_flags(tmp_path: Path, flags: tuple[object, ...]) -> None:
    source = save(tmp_path / "source", *dspine_specforge())
    result = run("convert", "--hf-path", source, "--mlx-path", tmp_path / "out", *flags)
    assert isinstance(result.exception, InputError)
    assert not (tmp_path / "out").exists()


def test_the_shipped_drafter_converts_and_proves_itself(tmp_path: Path) -> None:
    """It is saved under the package's own names; 8-bit codes and weights run, and draft well."""
    arguments = ["convert", "--hf-path", str(DEMO / "drafter"), "--target", str(DEMO / "target")]
    exact = [*arguments, "--mlx-path", str(tmp_path / "exact"), "--verify"]
    assert runner.invoke(app, exact).exit_code == 0
    packed = [*arguments, "--mlx-path", str(tmp_path / "packed"), "-q", "--q-bits", "8"]
    packed += ["--codes-bits", "8", "--verify", "--probe"]
    result = runner.invoke(app, packed)
    assert result.exit_code == 0, result.output

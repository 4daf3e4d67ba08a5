"""A third-party method through the public registry: it loads, drafts, converts and trains."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from typer.testing import CliRunner, Result

import dspine_mlx
from dspine_mlx.checkpoints.names import published_weights
from dspine_mlx.cli import app
from dspine_mlx.drafters import METHODS, method_of, register, registered
from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.errors import InputError
from dspine_mlx.train.objectives import objective_named
from dspine_mlx.train.objectives.dflash import Objective
from tests.support.checkpoints import save
from tests.support.runs import start, weights
from tests.support.tiny import drafter_config, plain_steps, random_prompt, randomise, same_steps
from tests.support.toy import METHOD, Toy, ToyConfig


@pytest.fixture
def toy() -> Iterator[None]:
    with registered(METHOD):
        yield


@pytest.fixture
def network() -> Toy:
    return randomise(Toy(ToyConfig.from_dict(drafter_config(shift_scale=0.5))), 3)


@pytest.fixture
def folder(tmp_path: Path, network: Toy) -> Path:
    """The network as its publisher would save it."""
    tensors = published_weights(METHOD.exported, dict(tree_flatten(network.parameters())))
    assert "slots.shift" in tensors
    assert "shift.weight" not in tensors
    config = drafter_config(shift_scale=0.5, rms_norm_eps=1e-6, architectures=["ToyDraftModel"])
    config["dflash_config"] = {
        "target_layer_ids": list(config.pop("target_layer_ids")),
        "mask_token_id": config.pop("mask_token_id"),
    }
    return save(tmp_path / "toy", config, {n: np.array(t) for n, t in tensors.items()})


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def converted(folder: Path, out: Path, *flags: str) -> tuple[Result, dict[str, Any]]:
    result = run("convert", "--hf-path", folder, "--mlx-path", out, "--json", *flags)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result, json.loads(result.stdout)


def test_it_loads_and_drafts(
    toy: None, folder: Path, network: Toy, model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    drafter = dspine_mlx.load_drafter(folder, model)
    assert type(drafter.network) is Toy
    features = mx.random.normal((1, 4, drafter.network.feature_size))
    ours = drafter.propose(7, features, drafter.make_cache()).ranked()
    built = network.bind(drafter.verifier)
    wanted = built.propose(7, features, built.make_cache()).ranked()
    assert mx.array_equal(ours.first, wanted.first)
    backbone = DFlash(network.config)  # without the shift the same weights draft something else
    parameters = dict(tree_flatten(network.parameters()))
    del parameters["shift.weight"]
    backbone.load_weights(list(parameters.items()))
    plain = backbone.bind(drafter.verifier)
    assert not mx.allclose(
        plain.propose(7, features, plain.make_cache()).ranked().first, ours.first
    )
    prompt = random_prompt(11)
    responses = dspine_mlx.stream_generate(
        model, tokenizer, prompt, drafter, max_tokens=30, verify_length=5
    )
    steps = [(r.token, r.logprobs) for r in responses]
    assert same_steps(steps, plain_steps(model, tokenizer, prompt, max_tokens=30))


def test_it_converts_and_verifies(
    toy: None, folder: Path, model: nn.Module, tmp_path: Path
) -> None:
    result, value = converted(folder, tmp_path / "out", "--verify")
    assert result.exit_code == 0, result.output
    assert (value["method"], value["layout"]) == ("toy", "Toy, tests")
    assert value["verify"]["passed"] is value["verify"]["exact"] is True
    assert "A Toy drafter" in (tmp_path / "out" / "README.md").read_text()
    assert run("inspect", tmp_path / "out").stdout.count("Toy, dspine-mlx") == 1
    ours, source = (dspine_mlx.load_drafter(f, model) for f in (tmp_path / "out", folder))
    assert ours.config == source.config
    for (name, a), (_, b) in zip(
        tree_flatten(ours.network.parameters()),
        tree_flatten(source.network.parameters()),
        strict=True,
    ):
        assert mx.array_equal(a, b), name


def test_its_own_reference_judges(folder: Path, tmp_path: Path) -> None:
    with registered(replace(METHOD, reference="tests.support.toy:wrong_round")):
        result, value = converted(folder, tmp_path / "wrong", "--verify")
    assert result.exit_code == 1
    assert value["verify"]["passed"] is False
    with registered(replace(METHOD, reference=None)):
        result, value = converted(folder, tmp_path / "none", "--verify")
    assert result.exit_code == 0
    assert value["verify"] is None
    assert "not verified" in result.stderr


def test_its_large_matrices_are_packed(folder: Path, tmp_path: Path) -> None:
    few = replace(METHOD, large=("fc.weight",))
    for method, packed in ((METHOD, True), (few, False)):
        with registered(method):
            out = tmp_path / str(packed)
            _, value = converted(folder, out, "-q", "--q-group-size", "32")
        stored = {tensor["name"]: tensor["stored"] for tensor in value["tensors"]}
        assert isinstance(stored["fc.weight"], dict)
        assert isinstance(stored["shift.weight"], dict) is packed


@pytest.mark.parametrize("layout", ["mlx", "hf"])
def test_it_trains(toy: None, layout: str, tmp_path: Path, target: Path, data: Path) -> None:
    folder = tmp_path / "run"
    result = start(folder, target, data, "--export", layout, method="toy")
    assert result.exit_code == 0, result.output
    assert json.loads((folder / "run.json").read_text())["loss"]["ce_weight"] == 0.5
    saved = weights(folder)["slots.shift" if layout == "hf" else "shift.weight"]
    assert mx.abs(saved).max().item() > 0  # it started at zero, and has a gradient
    model, tokenizer = mlx_lm.load(str(target))
    drafter = dspine_mlx.load_drafter(folder / "drafter", model)
    assert isinstance(drafter.network, Toy)
    assert drafter.network.config.shift_scale == 2.0
    prompt = tokenizer.encode("What is 3 + 1?")
    plain = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
    assert dspine_mlx.generate(model, tokenizer, prompt, drafter, max_tokens=12) == plain


def test_it_is_unknown_elsewhere(folder: Path, model: nn.Module, network: Toy) -> None:
    with registered(METHOD):
        assert method_of(network) is METHOD
        with pytest.raises(InputError, match="a method toy already"):
            register(METHOD)
    assert "toy" not in METHODS
    with pytest.raises(InputError, match="Toy is of no known method"):
        method_of(network)
    with pytest.raises(InputError, match=r"unexpected: slots.shift"):
        dspine_mlx.load_drafter(folder, model)
    with pytest.raises(InputError, match="'toy'; it must be dflash, dspark, dspine"):
        objective_named("toy")


def test_a_registered_method_goes_before_a_refusal(folder: Path, model: nn.Module) -> None:
    """Adding LiLiCorr needs no change elsewhere."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["LiLiCorrDraftModel"]})
    )
    with registered(METHOD), pytest.raises(InputError, match="its correlation head"):
        dspine_mlx.load_drafter(folder, model)
    with registered(replace(METHOD, architectures=("LiLiCorrDraftModel",))):
        assert type(dspine_mlx.load_drafter(folder, model).network) is Toy


def test_what_records_name_exists() -> None:
    for method in METHODS.values():
        assert method.reference is not None
        assert callable(resolve_name(method.reference))
    trainable = [method.name for method in METHODS.values() if method.objective]
    assert trainable == ["dflash", "dspark", "dspine", "dflash2", "domino"]
    assert all(isinstance(objective_named(name), Objective) for name in trainable)
    with pytest.raises(InputError, match="'dspark_gemma4'; it must be dflash, dspark, dspine"):
        objective_named("dspark_gemma4")

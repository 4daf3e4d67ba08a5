"""Loading good folders, and one sentence for every bad one."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspine import DSpine
from dspine_mlx.errors import InputError
from dspine_mlx.load import check_context, load_drafter
from dspine_mlx.target import row_kernels
from dspine_mlx.target.race import Machine, Race
from dspine_mlx.verify_length import profile
from dspine_mlx.verify_length.costs import Curve
from dspine_mlx.verify_length.schedule import prepare
from dspine_mlx.verify_length.store import costs_path
from tests.support.cache import cache_folder
from tests.support.metal_device import without_metal
from tests.support.racing import M2, Track
from tests.support.tiny import drafter_config, random_prompt, tiny_dspine, tiny_target

GATES = ("receiver_gate", "predecessor_gate", "message")  # as the module stacks them


def torch_layout(drafter: DSpine) -> dict[str, mx.array]:
    """The drafter's tensors under the names of a SpecForge checkpoint."""
    weights = dict(tree_flatten(drafter.parameters()))
    stacked = weights.pop("injection.gates.weight")
    for name, part in zip(GATES, mx.split(stacked, 3), strict=True):
        weights[f"injection.{name}.weight"] = part
    weights["transfer_codes"] = weights.pop("transfer_codes.weight")
    return weights | {"transfer_ready": mx.array(True)}


def config_json(**changes: Any) -> dict[str, Any]:
    config = drafter_config(rms_norm_eps=1e-6, rope_theta=1e4)
    taps, mask = config.pop("target_layer_ids"), config.pop("mask_token_id")
    return (
        config
        | {
            "architectures": ["DSpineDraftModel"],
            "is_causal": True,
            "dflash_config": {"target_layer_ids": list(taps), "mask_token_id": mask},
            "dspine_config": {"transfer_rank": 16, "message_size": 8, "top_k": 4},
        }
        | changes
    )


@pytest.fixture
def folder(tmp_path: Path, model: nn.Module) -> Path:
    weights = torch_layout(tiny_dspine(model).network)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps(config_json()))
    return tmp_path


def test_a_torch_layout_loads_as_it_is(folder: Path, model: nn.Module) -> None:
    ours, built = load_drafter(folder, model), tiny_dspine(model)
    features = mx.random.normal((1, 5, 64))
    a, b = (d.propose(17, features, d.make_cache()).ranked() for d in (ours, built))
    assert all(mx.array_equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))


def test_loading_binds_without_copies(folder: Path, model: nn.Module) -> None:
    drafter = load_drafter(folder, model)
    assert drafter.target.embed is model.model.embed_tokens
    assert not any("embed" in name for name, _ in tree_flatten(drafter.network.parameters()))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_drafter_takes_the_targets_dtype(
    folder: Path, dtype: mx.Dtype, tokenizer: TokenizerWrapper
) -> None:
    target = tiny_target()
    target.set_dtype(dtype)
    drafter = load_drafter(folder, target)
    assert {p.dtype for _, p in tree_flatten(drafter.network.parameters())} == {dtype}
    text = dspine_mlx.generate(target, tokenizer, random_prompt(5), drafter, max_tokens=6)
    assert text == dspine_mlx.generate(target, tokenizer, random_prompt(5), max_tokens=6)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_drafters_load_and_run(
    tmp_path: Path, model: nn.Module, tokenizer: TokenizerWrapper, bits: int
) -> None:
    drafter = tiny_dspine(model, hidden_size=32, transfer_rank=32, message_size=32)
    before = drafter.propose(9, mx.random.normal((1, 3, 64)), drafter.make_cache()).ranked()

    def wide(path: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

    nn.quantize(drafter.network, group_size=32, bits=bits, class_predicate=wide)
    assert isinstance(drafter.network.transfer_codes, nn.QuantizedEmbedding)
    weights = dict(tree_flatten(drafter.network.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    config = config_json(dspine_config={"transfer_rank": 32, "message_size": 32, "top_k": 4})
    config["quantization"] = {"group_size": 32, "bits": bits}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_drafter(tmp_path, model)
    features = mx.random.normal((1, 3, 64))
    a, b = (d.propose(9, features, d.make_cache()).ranked() for d in (loaded, drafter))
    assert all(mx.array_equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))
    assert not mx.array_equal(a.first, before.first)
    prompt = random_prompt(5)  # the first round has no features that are new
    options: dict[str, Any] = {"max_tokens": 8, "verify_length": 4}
    text = dspine_mlx.generate(model, tokenizer, prompt, loaded, **options)
    assert text == dspine_mlx.generate(model, tokenizer, prompt, max_tokens=8)


def rewrite(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_json(**changes)))


def tensors(folder: Path, change: Callable[[dict[str, mx.array]], Any]) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    change(weights)
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


TAPS = {"target_layer_ids": [0, 9], "mask_token_id": 3}
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), "is not valid JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "must be a JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"has no model\*.safetensors"),
    "truncated": (truncate, "may be truncated"),
    "keys missing": (
        lambda f: rewrite(f, hidden_size=None, vocab_size=None),
        "lacks hidden_size, vocab_size",
    ),
    "a number as a string": (
        lambda f: rewrite(f, hidden_size="32"),
        "hidden_size is '32' in the drafter's config.json; it must be int",
    ),
    "no taps": (lambda f: rewrite(f, dflash_config={"mask_token_id": 3}), "lacks target_layer_ids"),
    "wrong hidden size": (lambda f: rewrite(f, hidden_size=64), "the target's is 32"),
    "wrong vocabulary": (lambda f: rewrite(f, vocab_size=100), "the target's 2048"),
    "tap out of range": (
        lambda f: rewrite(f, dflash_config=TAPS),
        r"it reads layers \[9\], the target has 4 layers",
    ),
    "negative tap": (
        lambda f: rewrite(f, dflash_config=TAPS | {"target_layer_ids": [-1]}),
        "negative id",
    ),
    "other depth": (lambda f: rewrite(f, num_target_layers=36), "made for 36 target layers"),
    "block size 1": (lambda f: rewrite(f, block_size=1), "block_size 1 leaves no slot"),
    "not causal": (lambda f: rewrite(f, is_causal=False), "needs a causal block"),
    "not finite": (
        lambda f: tensors(f, lambda w: w.update({"fc.weight": w["fc.weight"] * mx.nan})),
        "not finite: fc.weight",
    ),
    "missing and unexpected": (
        lambda f: tensors(f, lambda w: w.update(extra=w.pop("norm.weight"))),
        r"missing: norm.weight \[32\]; unexpected: extra \[32\]",
    ),
    "wrong shape": (
        lambda f: tensors(f, lambda w: w.update({"norm.weight": mx.ones(7)})),
        r"wrong shape: norm.weight is \[7\], not \[32\]",
    ),
    "codes not ready": (
        lambda f: tensors(f, lambda w: w.update(transfer_ready=mx.array(False))),
        "transfer_ready is false",
    ),
    "a file": (replace_by_file, "is a file"),
    "no folder": (lambda f: shutil.rmtree(f), "there is no folder"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD)
def test_bad_folders_are_refused_in_one_sentence(
    folder: Path, model: nn.Module, spoil: Callable[[Path], Any], message: str
) -> None:
    spoil(folder)
    with pytest.raises(InputError, match=message) as error:
        load_drafter(folder, model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [5, 2.5, True, b"x", [], {}, "x" * 300, "\0", "\ud800", "~nobody"])
def test_other_names_are_refused_in_one_sentence(name: Any, model: nn.Module) -> None:
    for call in (lambda: dspine_mlx.load(name), lambda: load_drafter(name, model)):
        with pytest.raises(InputError) as error:
            call()
        str(error.value).encode()
        assert "\n" not in str(error.value)


def test_a_seed_does_not_notice_the_drafter(folder: Path, model: nn.Module) -> None:
    mx.random.seed(3)
    wanted = mx.random.uniform().item()
    mx.random.seed(3)
    load_drafter(folder, model)
    assert mx.random.uniform().item() == wanted


def test_a_drafter_alone_is_refused() -> None:
    with pytest.raises(InputError, match="needs its target"):
        dspine_mlx.load(None, "some/drafter")


def test_prompts_must_leave_room() -> None:
    check_context({"max_position_embeddings": 10}, 9)
    check_context({}, 10**6)
    for config in (
        {"max_position_embeddings": 10},
        {"text_config": {"max_position_embeddings": 10}},
    ):
        with pytest.raises(InputError, match="prompt has 10 tokens; the model's context holds 10"):
            check_context(config, 10)


def test_kernels_are_settled_when_a_drafter_is_loaded(
    folder: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In exact mode every width is checked; on MLX's own BLAS all of them pass for this target."""
    state = mx.array(mx.random.state[0])
    exact = load_drafter(folder, model, kernels="exact")
    assert mx.array_equal(mx.random.state[0], state)
    widths = exact.most_offered + 1
    assert exact.target.verify_kernels.width_limit == widths
    assert f"up to {widths} rows, as checked" in exact.target.verify_kernels.promise()
    assert load_drafter(folder, model, kernels="off").target.verify_kernels.width_limit > 99
    with pytest.raises(InputError, match="kernels is 'fast'; it must be one of auto, exact, off"):
        load_drafter(folder, model, kernels="fast")


def test_the_second_exact_load_runs_no_forward(
    folder: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts and the check are on file; another target's are not taken for this one's."""
    first = load_drafter(folder, model, kernels="exact").target.verify_kernels
    kinds: list[str] = []
    race, check = Race.verdict, row_kernels.compared_widths

    def verdict(*args: Any) -> Any:
        kinds.append("race")
        return race(*args)

    def compared(*args: Any) -> Any:
        kinds.append("check")
        return check(*args)

    monkeypatch.setattr(Race, "verdict", verdict)
    monkeypatch.setattr(row_kernels, "compared_widths", compared)
    second = load_drafter(folder, model, kernels="exact").target.verify_kernels
    assert kinds == []
    assert second.promise() == first.promise()
    assert second.digest == first.digest
    load_drafter(folder, tiny_target(seed=1), kernels="exact")
    assert kinds == ["check"]


@without_metal
def test_costs_are_measured_with_the_kernels_that_won(
    folder: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the race, and kept under what won it: another file than without kernels."""
    track = Track(monkeypatch)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: M2))
    monkeypatch.setattr(row_kernels, "Race", partial(Race, clock=track))
    monkeypatch.setattr(row_kernels, "SECONDS", 1e9)
    measure, digests = profile.measure, []

    def measured(drafter: Drafter) -> Curve:
        digests.append(drafter.target.verify_kernels.digest)
        return measure(drafter)

    monkeypatch.setattr(profile, "measure", measured)
    keys = {}
    for mode in ("auto", "off"):
        drafter = load_drafter(folder, model, kernels=mode)
        prepare(drafter)
        keys[mode] = json.loads(costs_path(drafter).read_text())["key"]
    assert len(digests) == 2
    assert digests[0] == keys["auto"]["kernels"] != ""
    assert digests[1] == ""
    assert keys["off"] == {name: value for name, value in keys["auto"].items() if name != "kernels"}
    for kernel in (track.tile, track.exact):
        kernel.seconds = lambda _: 2.0
    track.parts.seconds = 2.0
    for file in cache_folder().glob("kernels-*.json"):
        file.unlink()
    slow = load_drafter(folder, model)  # the race went otherwise: the plain curve holds
    assert costs_path(slow) == costs_path(load_drafter(folder, model, kernels="off"))


def test_a_target_none_of_whose_widths_are_exact_decodes_plainly(
    folder: Path,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def differ(target: Any, widths: list[int], *_: Any) -> Iterator[tuple[int, str]]:
        return ((width, "logits") for width in widths)

    monkeypatch.setattr(row_kernels, "compared_widths", differ)
    drafter = load_drafter(folder, model, kernels="exact")
    assert "so the target decodes plainly" in caplog.text
    for length in ("auto", 3):
        *_, last = dspine_mlx.stream_generate(
            model, tokenizer, [5, 6, 7], drafter, max_tokens=9, verify_length=length
        )
        assert (last.rounds, last.statistics.plain) == (0, 9)

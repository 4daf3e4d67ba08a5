"""What converted folders hold: packed matrices, dtypes, shards, and parts that few layouts have."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dspine_mlx.checkpoints.open import open_checkpoint
from dspine_mlx.convert.conversion import convert
from dspine_mlx.convert.plan import Options
from dspine_mlx.convert.reference import dflash_round, dspark_round, dspine_round
from dspine_mlx.convert.verify import Verification, verify
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter
from tests.support.checkpoints import (
    Checkpoint,
    Shape,
    dflash_zlab,
    dspark_deepspec,
    dspark_specforge,
    dspine_specforge,
    offsets,
    save,
    speculators,
    tiny_target,
)
from tests.support.same_round import assert_same_round

WIDE = Shape(H=64, I=128, r=64, a=32, hd=16)


@pytest.mark.parametrize(
    ("mode", "bits", "group"),
    [("affine", 4, 64), ("affine", 8, 32), ("mxfp4", None, None), ("mxfp8", None, None)],
)
def test_quantised_folders_hold_what_mlx_quantises(
    tmp_path: Path, mode: str, bits: int | None, group: int | None
) -> None:
    checkpoint = dspine_specforge(WIDE)
    plan = convert(
        save(tmp_path / "source", *checkpoint),
        tmp_path / "out",
        quantize=True,
        q_bits=bits,
        q_group_size=group,
        q_mode=mode,
    )
    weights = mx.load(str(tmp_path / "out" / "model.safetensors"))
    packing = Options(True, group, bits, mode).packing
    wanted = mx.quantize(mx.array(checkpoint[1]["fc.weight"]), **packing)
    names = ("fc.weight", "fc.scales", "fc.biases")[: len(wanted)]
    assert all(mx.array_equal(weights[n], w) for n, w in zip(names, wanted, strict=True))
    exact = [name for name in weights if f"{name.removesuffix('.weight')}.scales" not in weights]
    floats = {name for name in exact if not name.endswith((".scales", ".biases"))}
    assert {"injection.gates.weight", "injection.readouts.0.weight", "norm.weight"} <= floats
    assert "transfer_codes.scales" in weights  # 8 bits with -q
    assert sum(w.nbytes for w in weights.values()) == plan.nbytes
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] | packing == config["quantization"]
    assert config["quantization"].get("transfer_codes", packing)["bits"] == 8
    drafter = load_drafter(tmp_path / "out", tiny_target(WIDE)[0])
    loaded = dict(tree_flatten(drafter.network.parameters()))
    assert all(mx.array_equal(loaded[n], w) for n, w in zip(names, wanted, strict=True))


def test_small_heads_stay_exact(tmp_path: Path) -> None:
    checkpoint = dspark_deepspec(Shape(H=64, I=64, hd=16, rank=64))
    convert(save(tmp_path / "source", *checkpoint), tmp_path / "out", quantize=True)
    weights = mx.load(str(tmp_path / "out" / "model.safetensors"))
    for name in ("markov_head.markov_w1.weight", "confidence_head.proj.weight", "norm.weight"):
        np.testing.assert_array_equal(np.array(weights[name]), checkpoint[1][name])
    assert "lm_head.scales" in weights
    assert "embed_tokens.scales" in weights


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_alone_in_few_bits(tmp_path: Path, bits: int) -> None:
    checkpoint = dspine_specforge(WIDE)
    source = save(tmp_path / "source", *checkpoint)
    convert(source, tmp_path / "out", codes_bits=bits)
    weights = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert [n for n in weights if n.endswith(".scales")] == ["transfer_codes.scales"]
    wanted = mx.quantize(mx.array(checkpoint[1]["transfer_codes"]), group_size=64, bits=bits)
    assert mx.array_equal(weights["transfer_codes.weight"], wanted[0])
    found = verify(open_checkpoint(source), tmp_path / "out")
    assert not found.exact
    assert 0 < found.difference < {4: 0.2, 8: 0.02}[bits] * found.scale


REDUCED: dict[str, Callable[[Shape], Checkpoint]] = {
    "DFlash": dflash_zlab,
    "DSpine": dspine_specforge,
    "DSpark": partial(dspark_specforge, draft_vocab_size=40),
}


@pytest.mark.parametrize("V", [96, 5000])
@pytest.mark.parametrize("method", REDUCED)
def test_verify_reads_any_vocabulary(tmp_path: Path, method: str, V: int) -> None:
    """Also one with more tokens than the stand-in target has rows for, and a reduced one; a wrong
    tensor is seen."""
    config, weights = REDUCED[method](Shape(V=V))
    kept = np.sort(np.random.default_rng(2).choice(V, 40, replace=False))
    reduced = weights | {"d2t": offsets(kept)}
    if method == "DSpark":
        rng = np.random.default_rng(3)
        reduced["markov_head.markov_w2.weight"] = rng.normal(size=(40, 8)).astype("f4")
        reduced["lm_head.weight"] = rng.normal(size=(40, 32)).astype("f4")
    cases = {"reduced": reduced} if method == "DSpark" else {"whole": weights, "reduced": reduced}
    for name, tensors in cases.items():
        source = save(tmp_path / name, config, tensors)
        convert(source, tmp_path / f"{name} out")
        found = verify(open_checkpoint(source), tmp_path / f"{name} out")
        assert found.passed
        assert found.exact
        assert found.scale > 0.1
        wrong = save(
            tmp_path / f"{name} wrong", config, tensors | {"fc.weight": -weights["fc.weight"]}
        )
        assert not verify(open_checkpoint(wrong), tmp_path / f"{name} out").passed


def test_infinite_differences_do_not_pass() -> None:
    assert not Verification(np.inf, np.inf, True).passed
    assert not Verification(np.nan, 1.0, False).passed
    assert Verification(1e-6, 1.0, True).passed


@pytest.mark.parametrize("make", [dflash_zlab, dspine_specforge])
def test_a_vocabulary_size_without_its_tokens_says_nothing(
    tmp_path: Path, make: Callable[..., Checkpoint]
) -> None:
    """Some configs state one; the drafter has the target's head."""
    checkpoint = make(Shape(), draft_vocab_size=48)
    model, head = tiny_target()
    score = dspine_round if make is dspine_specforge else dflash_round
    drafter = load_drafter(save(tmp_path, *checkpoint), model)
    assert_same_round(drafter, score, checkpoint, head, Shape())


def test_packed_folders_are_not_converted_again(tmp_path: Path) -> None:
    convert(save(tmp_path / "source", *dspine_specforge(WIDE)), tmp_path / "out", quantize=True)
    with pytest.raises(InputError, match="packed already"):
        convert(tmp_path / "out", tmp_path / "again")


def test_unpacked_folders_are(tmp_path: Path) -> None:
    checkpoint = speculators(reduced=True)
    convert(save(tmp_path / "source", *checkpoint), tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "again")
    model, head = tiny_target()
    drafter = load_drafter(tmp_path / "again", model)
    assert_same_round(drafter, dspark_round, checkpoint, head, Shape())


def test_sinks_are_read_where_there_are_any(tmp_path: Path) -> None:
    config, weights = dspark_specforge()
    for i in range(2):
        weights[f"layers.{i}.self_attn.attention_sink_bias"] = np.linspace(-1, 2, 4, dtype="f4")
    model, head = tiny_target()
    drafter = load_drafter(save(tmp_path, config, weights), model)
    assert_same_round(drafter, dspark_round, (config, weights), head, Shape())


def test_biases_of_attention(tmp_path: Path) -> None:
    config, weights = dflash_zlab(attention_bias=True)
    rng = np.random.default_rng(0)
    for name in [n for n in weights if n.endswith("_proj.weight") and "self_attn" in n]:
        bias = rng.normal(size=len(weights[name])).astype(np.float32)
        weights[name.replace("weight", "bias")] = bias
    model, head = tiny_target()
    drafter = load_drafter(save(tmp_path, config, weights), model)
    assert_same_round(drafter, dflash_round, (config, weights), head, Shape())


def test_dtype_casts_floats_only(tmp_path: Path) -> None:
    source = save(tmp_path / "source", *speculators(reduced=True))
    convert(source, tmp_path / "out", dtype="bfloat16")
    weights = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert weights.pop("d2t").dtype == mx.uint32
    assert {w.dtype for w in weights.values()} == {mx.bfloat16}


def test_large_outputs_are_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspine_mlx.convert.write.SHARD", 40_000)
    checkpoint = dspine_specforge()
    convert(save(tmp_path / "source", *checkpoint), tmp_path / "out")
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 45_000 for file in files)
    model, head = tiny_target(Shape())
    drafter = load_drafter(tmp_path / "out", model)
    assert_same_round(drafter, dspine_round, checkpoint, head, Shape())

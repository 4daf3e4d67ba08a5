"""Experts in verify forwards: the race for them, and the swap of their layers."""

from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from dspine_mlx.metal.experts import EXPERTS_EXACT, ExactExperts, Experts, gather, gather_apart
from dspine_mlx.metal.rows_exact import Form
from dspine_mlx.target import race
from dspine_mlx.target.model import Target
from dspine_mlx.target.products import STOCK, from_dict, name, to_dict
from dspine_mlx.target.row_experts import expert_layers, expert_verdict
from dspine_mlx.target.row_kernels import RowKernels
from dspine_mlx.target.verdicts import ExpertShape
from tests.msl import Emulator
from tests.support import mlx_one_row
from tests.support.families import build
from tests.support.metal_device import emulator, needs_emulator
from tests.support.racing import M2, Track

SIZES = {"hidden_size": 256, "moe_intermediate_size": 512, "intermediate_size": 512}
UP = ExpertShape(4, 512, 256, 4, 32, "affine", 2, False, "float32")
DOWN = ExpertShape(4, 256, 512, 4, 32, "affine", 2, True, "float32")


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Track:
    return Track(monkeypatch)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(build("qwen3_moe", 4, **SIZES))


def test_a_targets_experts(target: Target) -> None:
    """gate and up ask with a row for all of its experts, down with one for each."""
    found = expert_layers(target)
    layers = len(target.layers)
    assert {shape: len(of) for shape, of in found.items()} == {UP: 2 * layers, DOWN: layers}
    assert {type(layer) for of in found.values() for layer in of} == {QuantizedSwitchLinear}
    assert expert_layers(Target(build("qwen3", 4))) == {}


def verdict(track: Track, target: Target, mode: str = "auto", shape: ExpertShape = UP) -> Any:
    layers = expert_layers(target)[shape]
    return expert_verdict(track.race(mode), shape, layers[:2], 4)


@pytest.mark.parametrize("mode", ["auto", "exact"])
@pytest.mark.parametrize("shape", [UP, DOWN])
def test_the_fastest_wins(track: Track, target: Target, mode: str, shape: ExpertShape) -> None:
    won = verdict(track, target, mode, shape)
    assert isinstance(won.product, ExactExperts)
    assert won.product.form == Form(1 if shape.columns == 256 else 2)
    track.experts.seconds = 1.5
    assert verdict(track, target, mode, shape).product == STOCK


def test_other_bits_take_no_part(track: Track, target: Target) -> None:
    track.experts.spoil = lambda cut, y, _: y * (1 + 2**-22)
    for mode in ("auto", "exact"):
        assert verdict(track, target, mode).product == STOCK


def refuse(*_: Any) -> mx.array:
    raise ValueError("Thread group size (64) is greater than the maximum allowed")


def test_a_refused_or_flapping_one_loses(track: Track, target: Target) -> None:
    assert isinstance(verdict(track, target).product, ExactExperts)
    calls = count()
    track.experts.spoil = lambda cut, y, _: y * (1 + next(calls) % 3 * 2**-21)
    assert verdict(track, target).product == STOCK
    track.experts.spoil = refuse
    for mode in ("auto", "exact"):
        assert verdict(track, target, mode).product == STOCK


def test_experts_are_multiplied_as_settled(track: Track, target: Target) -> None:
    kernels = RowKernels(target, track.race("auto", M2))
    kernels.settle([4], seconds=1e9)
    types, cache = [type(m) for m in target.model.modules()], make_prompt_cache(target.model)
    ids = mx.random.randint(0, 2048, (2, 2))
    plain = target.model(ids, cache=make_prompt_cache(target.model))
    before = track.experts.calls
    with kernels.verifying(4):
        ours = target.model(ids, cache=cache)
    assert track.experts.calls - before == 3 * len(target.layers)
    assert mx.allclose(ours, plain, rtol=1e-3, atol=1e-3).item()
    assert [type(m) for m in target.model.modules()] == types
    before = track.experts.calls
    with kernels.verifying(3):
        target.model(ids[:, :1], cache=make_prompt_cache(target.model))
    assert track.experts.calls == before
    lines = " ".join(kernels.explain())
    assert "8 x [2 of 4 experts, 512 x 256, 4 bits, groups of 32]: 4 rows exact experts" in lines


def test_biases_are_added(track: Track) -> None:
    target = Target(build("gpt_oss", 4, hidden_size=256, intermediate_size=256))
    (shape, *_), kernels = expert_layers(target), RowKernels(target, track.race("auto", M2))
    kernels.settle([4], seconds=1e9)
    layer, x = kernels.experts[shape][0], mx.random.normal((1, 4, 1, 1, 256))
    indices = mx.array([[[0, 1], [1, 2], [3, 0], [1, 0]]], mx.uint32)
    assert "bias" in layer
    plain, before = layer(x, indices), track.experts.calls
    with kernels.verifying(4):
        ours = layer(x, indices)
    assert track.experts.calls == before + 1
    assert mx.allclose(ours, plain, atol=1e-4).item()


def test_on_file(track: Track, target: Target, tmp_path: Path) -> None:
    for _ in range(2):
        kernels = RowKernels(target, track.race("auto", M2), tmp_path)
        kernels.settle([4], seconds=1e9)
        raced, track.now = track.now, 0.0
    assert raced == 0
    product = kernels.verdicts[UP, 4].product
    assert isinstance(product, ExactExperts)
    assert from_dict(to_dict(product)) == product
    assert name(product) == f"exact experts {product.rows}x4"


def test_rows_one_by_one() -> None:
    layer = QuantizedSwitchLinear(256, 64, 4, bias=False, group_size=32)
    indices = mx.array([[[0, 1], [1, 2], [3, 0]]], mx.uint32)
    for of, x in (
        (indices, mx.random.normal((1, 3, 1, 1, 256))),
        (indices, mx.random.normal((1, 3, 2, 1, 256))),
        (mx.array([0, 0, 1, 2], mx.uint32), mx.random.normal((4, 1, 256))),
    ):
        experts = Experts.of(layer, of)
        assert mx.allclose(gather_apart(x, experts), gather(x, experts), atol=1e-5).item()


LAST_BIT = "<T>(as_type<float>(as_type<uint>(result) ^ (first + o == 1)));"


@pytest.mark.slow
@needs_emulator
@pytest.mark.parametrize("fault", ["", "last bit"])
def test_the_kernels_own_text(track: Track, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """With MLX's kernel for one row, from its text, in the place of MLX's product."""

    for limit in ("REPEATS", "CHECKED", "TIMED_BYTES"):
        monkeypatch.setattr(race, limit, 1)
    monkeypatch.setattr(mx, "gather_qmm", mlx_one_row.gather_qmm)
    track.experts.real = True
    device = emulator(EXPERTS_EXACT)
    if fault:
        source = device.definition["source"].replace("<T>(result);", LAST_BIT)
        device = Emulator(device.definition | {"source": source})
    monkeypatch.setattr(EXPERTS_EXACT, "function", device)
    layer: nn.Module = QuantizedSwitchLinear(256, 16, 4, bias=False, group_size=32)
    shape = UP._replace(outputs=16)
    for mode, otherwise in (("auto", STOCK), ("exact", STOCK)):
        won = expert_verdict(track.race(mode), shape, [layer], 3).product
        assert won == otherwise if fault else isinstance(won, ExactExperts)

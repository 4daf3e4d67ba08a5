"""Targets whose attention was raced: what serves which call, caches of other packings, files."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.metal.attention import Parts
from dspine_mlx.metal.exact_attention import AsHeads, ExactAttention
from dspine_mlx.target import equal_rows, row_kernels
from dspine_mlx.target.model import Target
from dspine_mlx.target.products import from_dict, name, to_dict
from dspine_mlx.target.race import Race, Verdict
from dspine_mlx.target.row_attention import shapes_of
from dspine_mlx.target.row_kernels import RowKernels
from dspine_mlx.target.verdicts import AttentionShape, kernels_key, read, write
from tests.support.families import build
from tests.support.racing import CPU, M2, Track
from tests.support.tiny import tiny_target

LONG = AttentionShape(4, 2, 32, 32, 0, 0, False, "float32", 256)
EXACT = LONG._replace(context=64)
LAST_BIT = 1 + 2**-22


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Track:
    return Track(monkeypatch)


def test_a_targets_kinds_of_attention() -> None:
    assert shapes_of(Target(build("gpt_oss", 4))) == [
        AttentionShape(4, 2, 16, 16, 0, 0, True, "float32")
    ]
    gemma = shapes_of(Target(build("gemma4_text", 4)))
    assert [(s.head_size, s.sinks) for s in gemma] == [(16, False), (32, False)]
    assert shapes_of(Target(build("mamba2", None))) == []


@pytest.fixture
def target() -> Target:
    model = tiny_target()
    nn.quantize(model, group_size=32, bits=4)
    return Target(model)


def settled(target: Target, track: Track, mode: str = "auto", **options: Any) -> RowKernels:
    kernels = RowKernels(target, track.race(mode, M2), **options)
    kernels.settle([4], seconds=1e9)
    return kernels


@pytest.mark.parametrize("texts", [1, 2])
def test_long_contexts_are_attended_as_settled(track: Track, target: Target, texts: int) -> None:
    """Past the first of the lengths, and plain decoding never."""
    kernels = settled(target, track)
    kernels.settle([4 * texts], seconds=1e9)
    cache, layers = make_prompt_cache(target.model), len(target.layers)
    target.model(mx.random.randint(0, 2048, (texts, 250)), cache=cache)
    for keys, calls in ((254, 0), (258, layers)):
        before, ids = track.parts.calls, mx.random.randint(0, 2048, (texts, 4))
        with kernels.verifying(4 * texts):
            target.model(ids, cache=cache)
        assert track.parts.calls - before == calls, keys
    before = track.parts.calls
    with kernels.verifying(1):
        target.model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(target.model))
    assert track.parts.calls == before


def test_attention_alone_is_swapped(track: Track, target: Target) -> None:
    """Where stock multiplies best."""
    track.tile.seconds = track.exact.seconds = lambda _: 2.0
    kernels = settled(target, track)
    types = [type(m) for m in target.model.modules()]
    with kernels.verifying(4):
        changed = sum(type(m) is not t for m, t in zip(target.model.modules(), types, strict=True))
    assert changed == len(target.layers)
    assert [type(m) for m in target.model.modules()] == types
    track.parts.seconds = 2.0
    kernels = settled(target, track)
    assert kernels.digest == ""
    with kernels.verifying(4):
        assert [type(m) for m in target.model.modules()] == types


def test_quantised_caches_are_raced_when_they_are_used(
    track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_kernels, "SECONDS", 1e9)
    target = Target(build("qwen2", 4, head_dim=32, hidden_size=128))
    kernels = settled(target, track)
    before, digest = dict(kernels.verdicts), kernels.digest
    kernels.expect_caches(8, 32)
    added = {shape: v for (shape, _), v in kernels.verdicts.items() if (shape, 4) not in before}
    packed = AttentionShape(4, 2, 32, 32, 8, 32, False, "float32")
    assert added.keys() == {packed._replace(context=context) for context in (256, 1024)}
    assert {type(v.product) for v in added.values()} == {Parts}
    assert kernels.digest == digest  # costs are measured with caches as they are
    now = track.now
    kernels.expect_caches(8, 32)
    assert track.now == now


def test_exact_mode_checks_the_target_once_more_with_quantised_caches(
    track: Track, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where its rows run as heads over them. What fails there is not verified any more."""
    monkeypatch.setattr(row_kernels, "EXACT_SECONDS", 1e9)
    monkeypatch.setattr(row_kernels, "CHECK_SECONDS", 1e9)
    target = Target(build("qwen2", 4, head_dim=32, hidden_size=128))

    def exact() -> RowKernels:
        kernels = settled(target, track, "exact", folder=tmp_path)
        kernels.check([4], depths=(70,))
        assert kernels.width_limit == 1
        kernels.settle([2, 3], seconds=1e9)
        kernels.check([2, 3], depths=(70,))
        assert kernels.width_limit == 4
        return kernels

    monkeypatch.setattr(equal_rows, "DEPTHS", (70,))
    fresh = exact()
    fresh.expect_caches(8, 32)
    assert {type(p) for p in products_of(fresh, 8)} == {AsHeads}
    assert fresh.width_limit == 4
    calls = track.as_heads.calls
    track.as_heads.spoil = lambda cut, y, to: y * LAST_BIT
    known = exact()  # as on file
    known.expect_caches(8, 32)
    assert (known.width_limit, track.as_heads.calls) == (4, calls)
    (tmp_path / "exact.json").unlink()
    wrong = exact()
    wrong.expect_caches(8, 32)
    assert wrong.width_limit == 1
    assert wrong.unequal == dict.fromkeys((2, 3, 4), "logits differ after 70 positions")


def products_of(kernels: RowKernels, bits: int) -> list[Any]:
    return [
        v.product
        for (shape, _), v in kernels.verdicts.items()
        if isinstance(shape, AttentionShape) and shape.bits == bits
    ]


def test_only_metal_races_attention(track: Track, target: Target) -> None:
    kernels = RowKernels(target, track.race("exact", CPU))
    kernels.settle([4], seconds=1e9)
    assert kernels.attention == []
    assert track.exact_attention.calls == 0
    kernels.expect_caches(8, 32)


def test_on_file(track: Track, target: Target, tmp_path: Path) -> None:
    first = settled(target, track, folder=tmp_path)
    raced = track.now
    again = settled(target, track, folder=tmp_path)
    assert track.now == raced
    assert again.verdicts == first.verdicts
    key, packed = kernels_key(Race("auto", M2)), LONG._replace(bits=4, group_size=64)
    verdicts: Any = {
        (packed, 8): Verdict(Parts(64), "faster", 1.0, 2.0),
        (EXACT._replace(sinks=True), 3): Verdict(ExactAttention(2, 128, 2), "faster", 1.0, 2.0),
    }
    write(tmp_path / "other", key, verdicts)
    assert read(tmp_path / "other", key) == verdicts


def test_in_words(track: Track, target: Target) -> None:
    assert str(LONG) == "attention, 4/2 heads of 32, float32, 256 keys"
    packed = LONG._replace(value_size=16, bits=4, group_size=64, sinks=True)
    assert str(packed) == "attention, 4/2 heads of 32 and 16, 4 bits, groups of 64, sinks, 256 keys"
    lines = settled(target, track).explain()
    assert "[attention, 4/2 heads of 8, float32, 256 keys]: " in " ".join(lines)
    for product, words in (
        (Parts(16), "attention in 16 parts"),
        (ExactAttention(2, 64, 8), "exact attention in 64 blocks"),
        (AsHeads(8), "rows as heads, keys in 8 parts"),
    ):
        assert from_dict(to_dict(product)) == product
        assert name(product) == words

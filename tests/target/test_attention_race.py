"""The race between kinds of attention, and which one serves a call."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.metal.attention import Attended, Parts
from dspine_mlx.metal.exact_attention import AsHeads, ExactAttention, attend_apart
from dspine_mlx.target import attention_race, equal_rows, row_kernels
from dspine_mlx.target.attention_race import attention_verdict, context_of
from dspine_mlx.target.model import Target
from dspine_mlx.target.products import APART, STOCK, from_dict, name, to_dict
from dspine_mlx.target.race import Race, Verdict
from dspine_mlx.target.row_attention import Chosen, shapes_of
from dspine_mlx.target.row_kernels import RowKernels
from dspine_mlx.target.verdicts import AttentionShape, kernels_key, read, write
from tests.support.attention import attended, queries
from tests.support.families import build
from tests.support.metal_device import without_metal
from tests.support.racing import CPU, M2, Track
from tests.support.tiny import tiny_target

SHAPE = AttentionShape(4, 2, 32, 32, 0, 0, False, "float32")
LONG = SHAPE._replace(context=256)
EXACT = SHAPE._replace(context=64)
LAST_BIT = 1 + 2**-22


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Track:
    return Track(monkeypatch)


def test_the_fastest_wins(track: Track) -> None:
    won = attention_verdict(track.race(), LONG, 4)
    assert (won.product, won.why, won.rejected) == (Parts(4), "faster", ())
    assert (won.seconds, won.stock) == (pytest.approx(0.5), pytest.approx(1.0))
    track.parts.seconds = 0.98
    lost = attention_verdict(track.race(), LONG, 4)
    assert (lost.product, lost.why) == (STOCK, "nothing else is steadily faster")


def with_sinks(y: mx.array, to: Attended) -> mx.array:
    return y + (to.sinks is not None)


SPOILS: dict[str, Any] = {
    "NaN": lambda _, y, to: y * mx.nan,
    "wrong": lambda _, y, to: y + 1,
    "one row": lambda _, y, to: y + (mx.arange(4) == 3)[:, None],
    "behind a mask": lambda _, y, to: y + isinstance(to.mask, mx.array),
    "a mask that is added": lambda _, y, to: y + (getattr(to.mask, "dtype", 0) == mx.float32),
}


@pytest.mark.parametrize("fault", SPOILS)
def test_a_wrong_one_loses(track: Track, fault: str) -> None:
    track.parts.spoil = SPOILS[fault]
    lost = attention_verdict(track.race(), LONG, 4)
    assert lost.product == STOCK
    assert lost.rejected[0].startswith("attention in 4 parts: error ")


def test_packed_caches_and_sinks_take_part(track: Track) -> None:
    packed = LONG._replace(bits=8, group_size=32)
    assert attention_verdict(track.race(), packed, 4).product == Parts(4)
    assert attention_verdict(track.race(), packed._replace(bits=6), 4).product == Parts(4)
    odd = LONG._replace(head_size=36, value_size=36)
    assert attention_verdict(track.race(), odd, 4) == Verdict(STOCK, "no kernel serves it")
    track.parts.spoil = lambda _, y, to: with_sinks(y, to)
    assert attention_verdict(track.race(), LONG, 4).product == Parts(4)
    assert attention_verdict(track.race(), LONG._replace(sinks=True), 4).product == STOCK


def test_an_exact_form_is_sought_at_both_ends(track: Track) -> None:
    """The number of MLX's blocks grows between them: no form serves both."""
    track.spoil_stock = lambda y: y * LAST_BIT

    def blocks(cut: ExactAttention, y: mx.array, to: Attended) -> mx.array:
        wanted = (2, 64) if to.length < wide_from else (2, 128)
        return y if (cut.passes, cut.blocks) == wanted else y * LAST_BIT

    track.exact_attention.spoil = blocks
    wide_from = 1000
    won = attention_verdict(track.race("exact"), EXACT, 4)
    assert isinstance(won.product, ExactAttention)
    assert (won.product.passes, won.product.blocks) == (2, 64)
    assert "stock: not the bits of one row" in won.rejected
    wide_from = 100
    assert attention_verdict(track.race("exact"), EXACT, 4).product == APART


PACKED = EXACT._replace(bits=8, group_size=32)


def test_rows_run_as_heads_over_quantised_caches(track: Track) -> None:
    """As many parts as MLX makes are found at lengths at which the rows' keys make two lengths of
    them: fewer parts, or none, are right at others."""
    track.spoil_stock = lambda y: y * LAST_BIT
    lengths = set()

    def split(cut: AsHeads, y: mx.array, to: Attended) -> mx.array:
        lengths.add(to.length)
        crossed = {cut.length(to.length - 3 + i) for i in range(4)}
        wanted = {AsHeads(8).length(to.length - 3 + i) for i in range(4)}
        return y if len(crossed) == len(wanted) else y * LAST_BIT

    track.as_heads.spoil = split
    won = attention_verdict(track.race("exact"), PACKED, 4)
    assert won.product == AsHeads(8)
    assert "rows as heads, keys in 1 parts: not the bits of one row" in won.rejected
    assert "rows as heads, keys in 32 parts: not the bits of one row" in won.rejected
    assert lengths == {74, 98, 106}
    track.as_heads.spoil = lambda cut, y, to: y * LAST_BIT
    assert attention_verdict(track.race("exact"), PACKED, 4).product == APART


@pytest.mark.parametrize("rows", [2, 5, 17, 32])
@pytest.mark.parametrize("context", [1, 1024, 4096, 8192, 16384])
def test_lengths_at_which_the_rows_keys_make_two_lengths_of_parts(rows: int, context: int) -> None:
    """For either number of parts that MLX may make; all within the stretch."""
    found = attention_race.lengths("exact", PACKED._replace(context=context), rows)
    for parts in (8, 32):
        lengths = [{AsHeads(parts).length(S - i) for i in range(rows)} for S in found]
        assert sum(len(of) > 1 for of in lengths[:2]) >= (2 if parts == 8 else 1)
        assert sum(len(of) > 1 for of in lengths[2:]) >= (2 if parts == 8 else 1)
    assert any(len({AsHeads(32).length(S - i) for i in range(rows)}) == 1 for S in found) or (
        rows > 16
    )
    assert {context_of("exact", rows, S) for S in found} == {context}


def test_mlxs_own_rows_win_in_exact_mode_where_they_are_exact_and_faster(track: Track) -> None:
    track.exact_attention.seconds = 2.0
    assert attention_verdict(track.race("exact"), EXACT, 4).product == STOCK


@pytest.mark.parametrize(
    ("mode", "rows", "keys", "context"),
    [
        ("auto", 4, 1023, 0), ("auto", 4, 1024, 1024), ("auto", 4, 16383, 4096),
        ("auto", 32, 10**6, 16384), ("exact", 4, 4, 0), ("exact", 4, 5, 1),
        ("exact", 4, 1023, 1), ("exact", 4, 1024, 0), ("exact", 4, 1027, 0),
        ("exact", 4, 1028, 1024), ("exact", 4, 32767, 16384), ("exact", 4, 32768, 0),
    ],
)  # fmt: skip
def test_contexts(mode: str, rows: int, keys: int, context: int) -> None:
    """In exact mode no row of a call may lie past a length at which MLX changes its kernel."""
    assert context_of(mode, rows, keys) == context


def call(S: int, L: int = 4, **options: Any) -> tuple[mx.array, Attended]:
    mx.random.seed(S)
    return queries(1, 4, L, 32, mx.float32), attended(1, 2, S, (32, 32), mx.float32, **options)


def test_who_serves_a_call(track: Track) -> None:
    auto, exact = Chosen("auto"), Chosen("exact")
    assert auto.settle({(LONG, 4): Verdict(Parts(4), "")})
    assert exact.settle({(EXACT, 4): Verdict(ExactAttention(2, 64), "")})
    assert auto.product(*call(300)) == Parts(4)
    assert exact.product(*call(100)) == ExactAttention(2, 64)
    for S, options in ((255, {}), (300, {"L": 5}), (300, {"packing": (4, 32)}), (2000, {})):
        assert auto.product(*call(S, **options)) == STOCK
        assert exact.product(*call(S, **options)) == APART
    q, to = call(300, L=1)
    assert auto.product(q, to) == STOCK
    q, to = call(300)
    assert auto.product(q, to._replace(mask=None)) == STOCK
    assert auto.product(q, to._replace(mask=mx.ones((300,), mx.bool_))) == Parts(4)
    q, to = call(67)
    assert exact.product(q, to) == APART  # the first row lies on a length


def test_a_call_is_served(track: Track) -> None:
    chosen = Chosen("auto")
    assert not chosen.settle({(LONG, 4): Verdict(STOCK, "")})
    chosen.settle({(LONG, 4): Verdict(Parts(4), "")})
    q, to = call(300)
    keys, values, cache, scale, mask, sinks = to
    stock = scaled_dot_product_attention
    ours = chosen(stock, q, keys, values, cache=cache, scale=scale, mask=mask)
    assert track.parts.calls == 1
    assert mx.allclose(ours, attend_apart(q, to), atol=1e-5).item()
    chosen(stock, q, keys, values, cache=cache, scale=scale, mask=None)
    assert track.parts.calls == 1


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


@without_metal
def test_a_kernel_that_is_refused_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here by MLX itself, which has no Metal."""
    monkeypatch.setattr(attention_race, "LONG", (256,))
    lost = attention_verdict(Race("auto", M2), LONG, 4)
    assert lost.product == STOCK
    assert lost.rejected[0].startswith("attention in 4 parts: refused")

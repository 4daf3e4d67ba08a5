"""The race between kinds of attention, and which one serves a call."""

from itertools import count
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention

from dspine_mlx.metal.attention import Attended, Parts
from dspine_mlx.metal.exact_attention import AsHeads, ExactAttention, attend_apart
from dspine_mlx.target import attention_race
from dspine_mlx.target.attention_race import attention_verdict, context_of
from dspine_mlx.target.products import APART, STOCK
from dspine_mlx.target.race import Race, Verdict
from dspine_mlx.target.row_attention import Chosen
from dspine_mlx.target.verdicts import AttentionShape
from tests.support.attention import attended, queries
from tests.support.metal_device import without_metal
from tests.support.racing import M2, Track

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


def refuse(*_: Any) -> mx.array:
    raise ValueError("Thread group size (256) is greater than the maximum allowed")


@pytest.mark.parametrize("mode", ["auto", "exact"])
def test_a_refused_one_loses(track: Track, mode: str) -> None:
    track.parts.spoil = track.exact_attention.spoil = refuse
    lost = attention_verdict(track.race(mode), LONG if mode == "auto" else EXACT, 4)
    assert lost.product == STOCK
    refused = [reason for reason in lost.rejected if "refused: Thread group size (256)" in reason]
    assert bool(refused) == (mode == "auto")  # in exact mode no form was found to begin with


def test_a_flapping_one_loses(track: Track) -> None:
    calls = count()
    track.parts.spoil = lambda _, y, to: y * (1 + next(calls) % 4 * 2**-21)
    lost = attention_verdict(track.race(), LONG, 4)
    assert lost.product == STOCK
    assert lost.rejected[0].endswith("its values vary from call to call")


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


@without_metal
def test_a_kernel_that_is_refused_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here by MLX itself, which has no Metal."""
    monkeypatch.setattr(attention_race, "LONG", (256,))
    lost = attention_verdict(Race("auto", M2), LONG, 4)
    assert lost.product == STOCK
    assert lost.rejected[0].startswith("attention in 4 parts: refused")

"""Swapped layers: which products they use, in verify forwards and nowhere else."""

from contextlib import ExitStack
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.nn.layers.distributed import shard_linear
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.metal.rows import Matrix, Tile
from dspine_mlx.metal.rows_exact import Exact
from dspine_mlx.target.model import Target
from dspine_mlx.target.products import APART, STOCK
from dspine_mlx.target.race import Machine, Verdict
from dspine_mlx.target.ranks import Alone
from dspine_mlx.target.rollback import Rollback
from dspine_mlx.target.row_kernels import RowKernels, linear_layers
from dspine_mlx.target.verdicts import Shape, to_json
from tests.support.each_family import KINDS, slow
from tests.support.families import FAMILIES, build
from tests.support.racing import CPU, M2, M5, Track
from tests.support.tiny import tiny_target

WIDTH = 5


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Track:
    return Track(monkeypatch)


@pytest.fixture
def target() -> Target:
    """Quantised, with a tied head."""
    model = tiny_target()
    nn.quantize(model, group_size=32, bits=4)
    return Target(model)


def forward(target: Target, tokens: mx.array) -> mx.array:
    return target.model(tokens, cache=make_prompt_cache(target.model))


def tokens(*shape: int) -> mx.array:
    return mx.random.randint(0, 2048, shape)


def classes(target: Target) -> list[type]:
    return [type(m) for m in target.model.modules()]


def settled(target: Target, track: Track, *widths: int, mode: str = "auto") -> RowKernels:
    kernels = RowKernels(target, track.race(mode))
    kernels.settle(widths or (WIDTH,), seconds=1e9)
    return kernels


def test_rows_are_multiplied_as_settled(target: Target, track: Track) -> None:
    kernels, ids = settled(target, track), tokens(1, WIDTH)
    assert {type(v.product) for v in track.products(kernels).values()} == {Tile}
    plain, before = forward(target, ids), track.tile.calls
    with kernels.verifying(WIDTH):
        ours = forward(target, ids)
    layers = 7 * len(target.layers) + 1  # q, k, v, o, gate, up, down; the tied head
    assert track.tile.calls - before == layers
    assert mx.allclose(ours, plain, rtol=1e-3, atol=1e-4).item()
    assert not mx.array_equal(ours, plain).item()  # the stand-in's last bits


def test_other_widths_and_one_row_are_mlx(target: Target, track: Track) -> None:
    """A prompt's chunk, a row of plain decoding, a width that was not raced."""
    kernels, before = settled(target, track), track.tile.calls
    for rows in (1, 4, 33):
        ids = tokens(1, rows)
        with kernels.verifying(rows):
            assert mx.array_equal(forward(target, ids), forward(target, ids)).item()
    ids = tokens(1, WIDTH)
    forward(target, ids)
    assert track.tile.calls == before


def test_rows_are_counted_over_all_texts(target: Target, track: Track) -> None:
    kernels, ids = settled(target, track, 6), tokens(3, 2)
    plain, before = forward(target, ids), track.tile.calls
    with kernels.verifying(6):
        ours = forward(target, ids)
    assert track.tile.calls - before == 7 * len(target.layers) + 1
    assert ours.shape == plain.shape
    assert mx.allclose(ours, plain, rtol=1e-3, atol=1e-4).item()


def fail(target: Target, kernels: RowKernels) -> None:
    with kernels.verifying(WIDTH):
        forward(target, tokens(1, WIDTH))
        assert nn.QuantizedLinear not in set(map(type, linear_layers(target)))
        raise ZeroDivisionError


def test_classes_and_parameters_are_put_back(target: Target, track: Track) -> None:
    kernels = settled(target, track)
    types = classes(target)
    arrays = {name: id(a) for name, a in tree_flatten(target.model.parameters())}
    with ExitStack() as stack:  # one forward inside another, with taps around and within
        stack.enter_context(target.taps((0, 1)))
        stack.enter_context(kernels.verifying(WIDTH))
        stack.enter_context(target.taps((2,)))
        with kernels.verifying(WIDTH):
            inside = classes(target)
        assert classes(target) == inside
    assert classes(target) == types
    with pytest.raises(ZeroDivisionError):
        fail(target, kernels)
    assert classes(target) == types
    assert {name: id(a) for name, a in tree_flatten(target.model.parameters())} == arrays


def test_nothing_is_swapped_where_stock_wins(target: Target, track: Track) -> None:
    track.tile.seconds = track.exact.seconds = lambda _: 2.0
    track.parts.seconds = 2.0
    kernels, types = settled(target, track), classes(target)
    assert {v.product for v in kernels.verdicts.values()} == {STOCK}
    with kernels.verifying(WIDTH):
        assert classes(target) == types
    assert kernels.digest == ""


@pytest.mark.parametrize(("mode", "machine"), [("off", M2), ("auto", CPU), ("auto", M5)])
def test_nothing_is_raced_where_it_is_off(
    target: Target, track: Track, mode: str, machine: Machine
) -> None:
    kernels = RowKernels(target, track.race(mode, machine))
    kernels.settle(range(2, 17))
    assert kernels.verdicts == {}
    assert track.now == 0
    assert kernels.explain() == [f"verify rows are MLX's: {kernels.race.idle}"]


def test_rows_of_another_dtype_are_mlx(track: Track) -> None:
    model = tiny_target()
    nn.quantize(model, group_size=32, bits=4)
    target = Target(model)
    kernels, x = settled(target, track), mx.random.normal((1, WIDTH, 32)).astype(mx.float16)
    layer, before = target.layers[0].self_attn.q_proj, track.tile.calls
    plain = layer(x)
    with kernels.verifying(WIDTH):
        assert mx.array_equal(layer(x), plain).item()
    assert track.tile.calls == before


def test_rows_are_raced_in_the_dtype_that_layers_get(track: Track) -> None:
    """Not the embedding's: mxfp4 unpacks to bfloat16, which norms of float16 make float32."""
    model = tiny_target()
    model.set_dtype(mx.float16)
    nn.quantize(model, group_size=32, bits=4, mode="mxfp4")
    target = Target(model)
    types = classes(target)
    assert target.dtype == mx.bfloat16
    assert {shape.dtype for shape in RowKernels(target, track.race()).shapes} == {"float32"}
    assert {s.dtype for s in RowKernels(target, track.race("off")).shapes} == {"bfloat16"}
    assert classes(target) == types


@pytest.mark.parametrize(
    ("family", "bits"),
    [(family, 4) if family in KINDS else slow(family, 4) for family in FAMILIES]
    + [(family, None) for family in KINDS],
)
def test_every_family(track: Track, family: str, bits: int | None) -> None:
    """With the recorders of recurrent layers and with taps, as a round verifies. Experts are
    MLX's; all else that is linear is served, the head too."""
    model = build(family, bits)
    target = Target(model)
    kernels, cache = settled(target, track, 4), make_prompt_cache(model)
    rollback, prompt, drafted = Rollback(cache, model), tokens(9), tokens(4)
    model(prompt[None], cache=cache)
    types, plain = classes(target), forward(target, mx.concatenate([prompt, drafted])[None])[0, 9:]
    rollback.checkpoint()
    before = track.tile.calls
    with rollback.verifying(drafted), kernels.verifying(4):
        logits, features = target.forward(drafted, cache, (0, 2))
    assert track.tile.calls > before
    assert features.shape == (1, 4, 2 * target.hidden_size)
    assert mx.allclose(logits, plain, rtol=1e-2, atol=1e-2).item()
    rollback.accept(2)
    assert classes(target) == types


def test_a_bias_is_added(track: Track) -> None:
    target = Target(build("qwen2", 4))
    layer = target.layers[0].self_attn.q_proj
    assert "bias" in layer
    x, kernels = mx.random.normal((1, WIDTH, 64)), settled(target, track)
    plain = layer(x)
    with kernels.verifying(WIDTH):
        assert mx.allclose(layer(x), plain, atol=1e-4).item()


class OtherRank(Alone):
    """The second of two ranks, where rank 0 has found these verdicts."""

    size, key = 2, {"ranks": "2"}

    def __init__(self, found: str):
        self.found = found

    def gathered(self, word: str) -> list[str]:
        return [self.found, word]


def test_a_rank_has_rank_0s_verdicts(target: Target, track: Track, tmp_path: Path) -> None:
    alone = RowKernels(target, track.race(), tmp_path)
    alone.settle([4, 8], seconds=1e9)
    (shape, rows), own = next(item for item in alone.verdicts.items() if item[0][1] == 4)
    theirs = Verdict(Tile(1, 2), "rank 0's")
    elsewhere = Shape(7, 7, 0, 0, "affine", "float32")
    target.ranks = OtherRank(to_json({(shape, rows): theirs, (elsewhere, rows): theirs}))
    kernels = RowKernels(target, track.race(), tmp_path)
    assert not kernels.verdicts  # those of one machine are kept under another key
    kernels.settle([4, 8], seconds=1e9)
    assert own.product != theirs.product
    assert kernels.verdicts[shape, rows] == theirs
    assert kernels.verdicts.keys() == alone.verdicts.keys()


@pytest.mark.parametrize("bits", [None, 4], ids=["dense", "4-bit"])
@pytest.mark.parametrize("split", ["all-to-sharded", "sharded-to-all"])
def test_layers_split_by_tensors(track: Track, bits: int | None, split: str) -> None:
    target = Target(build("qwen2", bits))
    attention = target.layers[0].self_attn
    attention.q_proj = shard_linear(attention.q_proj, split, group=mx.distributed.init())
    layer, x = attention.q_proj, mx.random.normal((1, WIDTH, 64))
    assert "bias" in layer
    assert any(one is layer for one in linear_layers(target))
    plain, kernels = layer(x), settled(target, track)
    before = track.tile.calls
    with kernels.verifying(WIDTH):
        found = layer(x)
    assert mx.allclose(found, plain, atol=1e-4).item()
    assert track.tile.calls > before


@pytest.mark.parametrize("bits", [None, 4], ids=["dense", "4-bit"])
def test_an_exact_target_has_the_bits_of_rows_one_by_one(track: Track, bits: int | None) -> None:
    """Where stock has other bits, whatever is raced and whatever is not."""
    model = build("qwen2", bits)
    target, x = Target(model), mx.random.normal((1, 7, 64))
    track.spoil_stock = lambda y: y * (1 + 2**-20)
    kernels = settled(target, track, 4, mode="exact")
    assert {v.product for v in track.products(kernels).values()} <= {APART}
    for layer in linear_layers(target)[:3]:
        rows = [layer(x[:, i : i + 1]) for i in range(7)]
        for width in (4, 7):
            with kernels.verifying(width):
                assert mx.array_equal(layer(x[:, :width]), mx.concatenate(rows[:width], axis=1))


def test_time_is_limited_and_coarse_widths_come_first(target: Target, track: Track) -> None:
    kernels = RowKernels(target, track.race())
    kernels.settle(range(1, 40), seconds=1e-6)
    assert {rows for _, rows in kernels.verdicts} == {32}
    assert len(kernels.verdicts) == 1
    kernels.settle([3, 4, 8, 16], seconds=1e9)
    assert {rows for _, rows in kernels.verdicts} == {3, 4, 8, 16, 32}
    assert len(kernels.verdicts) == 4 * len(kernels.all_shapes) + 1


def test_a_machine_races_once(target: Target, track: Track, tmp_path: Path) -> None:
    first = RowKernels(target, track.race(), tmp_path)
    first.settle([4], seconds=1e9)
    raced = track.now
    again = RowKernels(target, track.race(), tmp_path)
    assert again.verdicts == first.verdicts
    again.settle([4], seconds=1e9)
    assert track.now == raced
    again.settle([4, 8], seconds=1e9)
    assert track.now > raced
    third = RowKernels(target, track.race(), tmp_path)
    assert third.verdicts == again.verdicts
    assert len(list(tmp_path.iterdir())) == 1
    assert RowKernels(Target(build("qwen2", 8)), track.race(), tmp_path).verdicts == {}


def test_what_the_digest_depends_on(target: Target, track: Track) -> None:
    kernels = settled(target, track, 4)
    digests = {kernels.digest, settled(target, track, 4, 8).digest}
    (shape, rows), verdict = next(iter(kernels.verdicts.items()))
    kernels.verdicts[shape, rows] = Verdict(Tile(1, 4), verdict.why)
    digests |= {kernels.digest, settled(target, track, 4, mode="exact").digest}
    assert len(digests) == 4
    assert "" not in digests
    kernels.verdicts[shape, rows] = Verdict(Tile(1, 4), "another", 3.0, 4.0)
    assert kernels.digest in digests  # times don't matter


def test_the_report_is_json_and_the_explanation_english(target: Target, track: Track) -> None:
    kernels = settled(target, track, 4)
    report = kernels.report()
    assert (report["mode"], report["idle"], report["digest"]) == ("auto", "", kernels.digest)
    assert len(report["verdicts"]) == len(kernels.all_shapes)
    shape = Shape.of(Matrix.of(target.lm_head), mx.float32)
    assert "1 x [2048 x 32, 4 bits, groups of 32]: 4 rows tile 2x8 500 ms (stock 1e+03)" in (
        kernels.explain()
    )
    assert kernels.verdicts[shape, 4].product == Tile(2, 8)
    del kernels.verdicts[shape, 4]
    assert "1 x [2048 x 32, 4 bits, groups of 32]: not raced yet" in kernels.explain()


def test_exact_kernels_serve_what_they_can(track: Track) -> None:
    """Of a layer with 256 columns."""
    model = build("qwen2", None)
    target = Target(model)
    layer = nn.QuantizedLinear(256, 64, bias=False, group_size=64, bits=4)
    target.layers[0].mlp.other = layer
    kernels = settled(target, track, 4, mode="exact")
    shape = Shape.of(Matrix.of(layer), mx.float32)
    assert isinstance(kernels.verdicts[shape, 4].product, Exact)
    x = mx.random.normal((1, 4, 256))
    plain, before = layer(x), track.exact.calls
    with kernels.verifying(4):
        assert mx.array_equal(layer(x), plain).item()
    assert track.exact.calls == before + 1

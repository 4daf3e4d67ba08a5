"""The race: correctness first, then speed, with a fake clock."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from dspine_mlx.errors import InputError
from dspine_mlx.metal.rows import ROWS_TILE, Matrix, Tile
from dspine_mlx.metal.rows_exact import ROWS_EXACT, Exact, Form
from dspine_mlx.target.products import (
    APART,
    STOCK,
    UNPACKED,
    Apart,
    Product,
    Stock,
    Unpacked,
    from_dict,
    name,
    to_dict,
)
from dspine_mlx.target.race import Machine, Race, Verdict
from tests.msl import Emulator
from tests.support.metal_device import emulator, needs_emulator, normal
from tests.support.mlx_one_row import quantized_matmul
from tests.support.racing import CPU, M2, M5, OPEN_BLAS, Track, quick
from tests.support.rows import matrix, values


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Track:
    return Track(monkeypatch)


@pytest.fixture(scope="module")
def layers() -> list[Matrix]:
    mx.random.seed(1)
    return [matrix((24, 512), 4, 64, mx.float32) for _ in range(2)]


def run(race: Race, layers: list[Matrix], rows: int = 4) -> Verdict:
    return race.verdict(layers, rows, mx.float32)


def test_the_fastest_wins(track: Track, layers: list[Matrix]) -> None:
    track.tile.seconds = lambda _: 0.4
    won = run(track.race(), layers)
    assert isinstance(won.product, Tile)
    assert won.why == "faster"
    assert won.seconds == pytest.approx(0.4)
    assert won.stock == pytest.approx(1.0)
    assert won.rejected == ()


def test_in_a_tie_plain_decodings_bits_win(track: Track, layers: list[Matrix]) -> None:
    track.exact.seconds = lambda _: 0.51
    assert isinstance(run(track.race(), layers).product, Exact)
    track.exact.spoil = lambda y, _: y * (1 + 2**-22)  # no longer exact: as any other
    assert isinstance(run(track.race(), layers).product, Tile)


def test_in_exact_mode_only_its_bits_take_part(track: Track, layers: list[Matrix]) -> None:
    track.tile.seconds = lambda _: 0.01
    won = run(track.race("exact"), layers)
    assert isinstance(won.product, Exact)
    assert won.seconds == pytest.approx(0.6)
    assert track.tile.calls == 0


@pytest.mark.parametrize("seconds", [0.98, 1.0, 1.5, 3.0])
def test_what_is_not_clearly_faster_loses(
    track: Track, layers: list[Matrix], seconds: float
) -> None:
    track.tile.seconds = track.exact.seconds = lambda _: seconds
    lost = run(track.race(), layers)
    assert lost.product == STOCK
    assert lost.why == "nothing else is steadily faster"
    assert lost.seconds == lost.stock == pytest.approx(1)


def test_a_hopeless_one_is_timed_once(track: Track, layers: list[Matrix]) -> None:
    track.tile.seconds = lambda _: 100.0
    run(track.race(), layers)
    cuts, checks = 3, 2 * len(layers)
    assert track.tile.calls == cuts * (checks + len(layers))


def test_a_flapping_time_loses(track: Track, layers: list[Matrix]) -> None:
    """Fast in three repeats of five, slow in two."""
    track.exact.threads = 0
    track.tile.seconds = lambda call: 0.1 if (call - 1) // len(layers) % 2 else 1.5
    assert run(track.race(), layers).product == STOCK


SPOILS: dict[str, tuple[str, Callable[[mx.array, int], mx.array], str]] = {
    "NaN": ("auto", lambda y, _: y * mx.nan, "error nan"),
    "one NaN": ("auto", lambda y, _: mx.where(mx.arange(24) == 7, mx.nan, y), "error nan"),
    "wrong": ("auto", lambda y, _: y + 1, "error "),
    "one value wrong": ("auto", lambda y, _: y + (mx.arange(24) == 23), "error "),
    "flapping": ("auto", lambda y, call: y * (1 + call % 3 * 2**-21), "vary from call to call"),
    "last bit": ("exact", lambda y, _: flipped(y), "not the bits of one row"),
}  # fmt: skip


def flipped(y: mx.array) -> mx.array:
    """The last bit of the last value of the last row."""
    last = mx.arange(y.size).reshape(y.shape) == y.size - 1
    return (y.view(mx.uint32) ^ last.astype(mx.uint32)).view(mx.float32)


@pytest.mark.parametrize("fault", SPOILS)
def test_a_wrong_one_loses(track: Track, layers: list[Matrix], fault: str) -> None:
    mode, spoil, why = SPOILS[fault]
    race = track.race(mode)
    run(race, layers, rows=3)  # the form is settled while the kernel is right
    track.tile.spoil = track.exact.spoil = spoil
    lost = run(race, layers)
    assert lost.product == STOCK
    assert len(lost.rejected) == (6 if mode == "auto" else 3)
    assert all(why in reason for reason in lost.rejected)


def test_no_form_has_the_bits(track: Track, layers: list[Matrix]) -> None:
    track.exact.spoil = lambda y, _: flipped(y)
    assert run(track.race("exact"), layers).product == STOCK
    assert track.exact.calls == 20  # forms, each in float32


def test_a_form_is_sought_once_per_packing(track: Track, layers: list[Matrix]) -> None:
    race = track.race()
    run(race, layers)
    before = track.exact.calls
    run(race, layers, rows=5)
    per_race = 3 * (2 * len(layers) + 5 * len(layers))
    assert track.exact.calls - before == per_race
    assert race.forms == {("affine", 4, 64, True, mx.float32): Form(2)}


def test_a_refused_cut_leaves_the_others(track: Track, layers: list[Matrix]) -> None:
    track.exact.threads, track.tile.threads = 32, 256
    won = run(track.race(), layers)
    assert won.product == Tile(2, 8)
    assert won.rejected[0].startswith("exact 4x4: refused: Thread group size (64)")
    assert any(r.startswith("tile 1x16: refused") for r in won.rejected)
    track.tile.threads = 32
    assert run(track.race(), layers).product == STOCK
    assert run(track.race("exact"), layers).product == STOCK


def test_rows_one_by_one_where_stock_has_other_bits(track: Track, layers: list[Matrix]) -> None:
    track.spoil_stock = lambda y: y * (1 + 2**-20)
    track.exact.threads = 0
    lost = run(track.race("exact"), layers)
    assert lost.product == APART
    assert "stock: not the bits of one row" in lost.rejected
    assert lost.seconds == pytest.approx(4.0)  # rows


@pytest.mark.parametrize("exact_seconds", [3.0, 5.0])
def test_an_exact_kernel_is_measured_by_what_is_exact(
    track: Track, layers: list[Matrix], exact_seconds: float
) -> None:
    """Rows one by one take 4 s, stock 1 s, but stock has other bits."""
    track.spoil_stock = lambda y: y * (1 + 2**-20)
    track.exact.seconds = lambda _: exact_seconds
    won = run(track.race("exact"), layers).product
    assert (won == APART) == (exact_seconds > 4)


@pytest.mark.parametrize(
    ("mode", "machine", "newest", "why"),
    [
        ("off", M2, False, "kernels are off"),
        ("auto", M5, False, "MLX's own kernels serve several rows on this chip"),
        ("auto", CPU, False, "no Metal"),
        ("auto", M5, True, ""),
        ("exact", M5, False, ""),
        ("auto", M2, False, ""),
        ("auto", OPEN_BLAS, False, ""),
    ],
)
def test_where_nothing_is_raced(
    track: Track, layers: list[Matrix], mode: str, machine: Machine, newest: bool, why: str
) -> None:
    race = track.race(mode, machine, newest=newest)
    assert race.idle == why
    if why:
        assert run(race, layers) == Verdict(STOCK, why)
        assert track.now == 0


def test_modes() -> None:
    with pytest.raises(InputError, match="kernels is 'fast'; it must be 'auto', 'exact' or 'off'"):
        Race("fast")


@pytest.mark.parametrize(
    ("machine", "generation"),
    [(M2, 14), (M5, 17), (CPU, 0), (Machine(True, "applegpu_unknown"), 0)],
)
def test_generations(machine: Machine, generation: int) -> None:
    assert machine.generation == generation


def test_a_cpu_unpacks_once_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, track: Track, layers: list[Matrix]
) -> None:
    unpack = Unpacked.__call__

    def timed(self: Unpacked, x: mx.array, weight: Matrix) -> mx.array:
        track.now += 0.6
        return unpack(self, x, weight)

    monkeypatch.setattr(Unpacked, "__call__", timed)
    assert run(track.race("auto", OPEN_BLAS), layers).product == UNPACKED
    assert run(track.race("auto", OPEN_BLAS), layers, rows=5).product == STOCK  # equal there
    track.stock = 0.61
    assert run(track.race("auto", OPEN_BLAS), layers).product == STOCK
    assert run(track.race("exact", OPEN_BLAS), layers).product == STOCK  # no entrant there
    dense = [Matrix(normal((24, 512)))]
    assert run(track.race("auto", OPEN_BLAS), dense) == Verdict(STOCK, "no kernel serves it")


@pytest.mark.parametrize(
    ("bits", "group", "mode"),
    [(4, 64, "affine"), (8, 32, "affine"), (4, 32, "mxfp4"), (4, 16, "nvfp4")],
)
def test_unpacked_is_the_product(bits: int, group: int, mode: str) -> None:
    weight, x = matrix((16, 128), bits, group, mx.float32, mode), normal((5, 128))
    wanted = x @ mx.array(values(weight)).astype(mx.float32).T
    assert mx.allclose(UNPACKED(x, weight), wanted, rtol=1e-4, atol=1e-3).item()


@pytest.mark.parametrize("order", [1, -1])
def test_another_order_of_a_long_sum_is_no_fault(track: Track, order: int) -> None:
    """Truth is MLX's own float32, from which stock can't differ; a wrong scale is a fault still."""
    weight, x = matrix((16, 4096), 4, 64, mx.float32), normal((4, 4096))

    def unpacked(y: mx.array, _: int) -> mx.array:
        rows = mx.dequantize(weight.weight, weight.scales, weight.biases, 64, 4)[:, ::order]
        return (
            mx.concatenate([x[:, ::order][:, i::2] @ rows[:, i::2].T for i in (0, 1)])
            .reshape(2, 4, 16)
            .sum(axis=0)
        )

    track.tile.spoil = unpacked
    race = track.race()
    right, _ = race.check([STOCK, Tile(2, 8)], x, [weight])
    assert set(right) == {STOCK, Tile(2, 8)}
    track.tile.spoil = lambda y, _: y * 1.0001
    right, _ = race.check([STOCK, Tile(2, 8)], x, [weight])
    assert set(right) == {STOCK}


def test_dense_rows_take_part(track: Track) -> None:
    won = run(track.race(), [Matrix(normal((24, 512)))])
    assert isinstance(won.product, Tile)


@pytest.mark.parametrize(
    "product", [Stock(), Apart(), Unpacked(), Tile(2, 16), Exact(Form(1, False, 3), 8, 2)]
)
def test_products_as_json(product: Product) -> None:
    assert from_dict(to_dict(product)) == product
    assert name(product) in ("stock", "apart", "unpacked", "tile 2x16", "exact 8x2")


LAST_BIT = "<T>(as_type<float>(as_type<uint>(result) ^ (first + o == 1)));"
FAULTS = {
    "scale of another row": (ROWS_TILE, "scales[at / GROUP]", "scales[(at + K) % (N * K) / GROUP]"),
    "no sums for the bias": (ROWS_TILE, "+ bias[t] * row_sums[r][e]", ""),
    "off by one group": (ROWS_TILE, "biases[at / GROUP]", "biases[max(at / GROUP, 1ul) - 1]"),
    "a part is not added": (ROWS_TILE, "uint p = 0;", "uint p = 1;"),
    "last bit": (ROWS_EXACT, "<T>(result);", LAST_BIT),
    "another row's scale": (ROWS_EXACT, "(scales[at])", "(scales[max(at, 1ul) - 1])"),
    "no sums of x": (ROWS_EXACT, "(scale * dot + sum * bias)", "(scale * dot)"),
    "another group": (ROWS_EXACT, "biases[at]", "biases[max(at, 1ul) - 1]"),
}  # fmt: skip


@pytest.mark.slow
@needs_emulator
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernels_text_loses(
    monkeypatch: pytest.MonkeyPatch, layers: list[Matrix], fault: str
) -> None:
    """The kernels' own text, run on the CPU; MLX's one-row kernel is stock."""
    kernel, found, planted = FAULTS[fault]
    part = "source" if found in kernel.definition["source"] else "header"
    assert found in kernel.definition[part]
    quick(monkeypatch)
    monkeypatch.setattr(mx, "quantized_matmul", quantized_matmul)
    for other in (ROWS_TILE, ROWS_EXACT):
        monkeypatch.setattr(other, "function", emulator(other))
    race = Race("auto" if kernel is ROWS_TILE else "exact", M2)
    right, _ = checked(race, layers)
    kinds = set(map(type, right)) - {Apart}
    assert kinds == ({Stock, Exact, Tile} if kernel is ROWS_TILE else {Stock, Exact})
    text = kernel.definition[part].replace(found, planted)
    monkeypatch.setattr(kernel, "function", Emulator(kernel.definition | {part: text}))
    right, rejected = checked(race, layers)
    assert kinds - set(map(type, right)) == {Tile if kernel is ROWS_TILE else Exact}
    assert len(rejected) == 1


def checked(race: Race, layers: list[Matrix]) -> tuple[dict[Product, bool], list[str]]:
    x = normal((5, 512))
    return race.check(race.candidates(layers[0], x), x, layers)

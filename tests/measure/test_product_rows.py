"""bench --rows, with a fake clock and with the kernels' own source."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from typer.testing import CliRunner

from dspine_mlx.cli import app, bench_rows
from dspine_mlx.errors import InputError
from dspine_mlx.measure import product_rows
from dspine_mlx.measure.product_rows import (
    Group,
    ShapeTimes,
    Timed,
    groups_of,
    random_matrix,
    time_groups,
    typical_groups,
)
from dspine_mlx.metal.rows import ROWS_TILE, Matrix
from dspine_mlx.metal.rows_exact import ROWS_EXACT
from dspine_mlx.target import race
from dspine_mlx.target.model import Target
from dspine_mlx.target.race import Machine
from dspine_mlx.target.verdicts import Shape
from tests.msl import Emulator
from tests.support import mlx_one_row
from tests.support.metal_device import needs_emulator, without_metal
from tests.support.racing import M2, M5, Track
from tests.support.rows import matrix
from tests.support.tiny import tiny_target


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Track:
    """A Mac of this clock."""
    on(monkeypatch, M2)
    return Track(monkeypatch)


def on(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine))


def group(layers: int = 2, bits: int = 4) -> Group:
    mx.random.seed(1)
    made = [matrix((24, 512), bits, 64, mx.float32) for _ in range(layers)]
    return Group(Shape.of(made[0], mx.float32), layers, lambda: made)


def timed(track: Track, *groups: Group, seconds: float = 1e9) -> list[ShapeTimes]:
    return list(time_groups(groups, (1, 4, 8), track, seconds))[-1]


def told(entries: dict[str, Timed]) -> dict[str, tuple[str, float, bool]]:
    return {k: (t.product, round(t.seconds, 9), t.exact) for k, t in entries.items()}


@pytest.mark.parametrize("machine", [M2, M5])
def test_each_kind_is_timed(
    track: Track, monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    """Also on an M5, which races only on request."""
    on(monkeypatch, machine)
    (one,) = timed(track, group())
    assert (str(one.shape), one.layers) == ("24 x 512, 4 bits, groups of 64", 2)
    assert list(one.rows) == [1, 4, 8]
    assert told(one.rows[1]) == {"stock": ("stock", 1.0, True)}
    for rows in (4, 8):
        assert told(one.rows[rows]) == {
            "stock": ("stock", 1.0, True),
            "exact": ("exact 4x4", 0.6, True),
            "tile": ("tile 2x8", 0.5, False),
        }
    assert one.rejected == []


def test_what_is_missing_is_said(track: Track) -> None:
    """Two cuts that the driver refuses, a wrong kernel, and one that is hopeless."""
    track.tile.threads = 128
    track.exact.spoil = lambda y, _: y + 1
    (one,) = timed(track, group())
    assert one.rows[4].keys() == {"stock", "tile"}
    assert one.rows[4]["tile"].product == "tile 2x4"
    assert sum(reason.startswith("4 rows, exact 4x4: error ") for reason in one.rejected) == 1
    assert sum(", tile 1x16: refused: Thread group size (512)" in r for r in one.rejected) == 2
    track.tile.seconds = lambda _: 2.1
    (one,) = timed(track, group())
    assert one.rows[4].keys() == {"stock"}
    assert "4 rows, tile 2x4: more than 2 times as slow as stock" in one.rejected


def test_an_exact_kernel_without_the_bits_is_timed(track: Track) -> None:
    """And said to have other bits; all forms were tried."""
    track.exact.spoil = lambda y, _: y * (1 + 2**-22)
    track.spoil_stock = lambda y: y * (1 + 2**-22)
    (one,) = timed(track, group())
    assert not one.rows[4]["exact"].exact
    assert not one.rows[4]["stock"].exact
    assert one.rows[4]["exact"].seconds == pytest.approx(0.6)
    assert track.exact.calls > 20


def test_weights_that_are_not_packed_have_no_exact_kernel(track: Track) -> None:
    (one,) = timed(track, group(bits=0))
    assert one.rows[8].keys() == {"stock", "tile"}


def test_time_is_limited(track: Track) -> None:
    assert len(timed(track, group(), group(3), seconds=1)) == 1
    assert [one.layers for one in timed(track, group(), group(3))] == [2, 3]


@without_metal
def test_without_metal_it_says_so() -> None:
    result = CliRunner().invoke(app, ["bench", "--rows"])
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == (
        "--rows times kernels for Apple GPUs; there is no Metal on this machine"
    )


def test_a_targets_shapes() -> None:
    """A tied head is one of them."""
    model = tiny_target()
    nn.quantize(model, group_size=32, bits=4)
    groups = {str(g.shape): g for g in groups_of(Target(model))}
    assert groups["2048 x 32, 4 bits, groups of 32"].layers == 1
    gates = groups["64 x 32, 4 bits, groups of 32"]
    assert gates.layers == len(gates.matrices()) == 2 * len(model.layers)
    assert any(m.weight is model.layers[1].mlp.gate_proj.weight for m in gates.matrices())


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_random_weights_are_of_a_models_size(bits: int) -> None:
    """Products of normal rows have a standard deviation of about 1."""
    weight, other = (random_matrix(64, 1024, bits, seed) for seed in (0, 1))
    y = product_rows.STOCK(mx.random.normal((16, 1024)).astype(mx.bfloat16), weight)
    assert weight.shape == (64, 1024)
    assert 0.7 < mx.std(y.astype(mx.float32)).item() < 1.4
    assert not mx.array_equal(weight.weight, other.weight).item()


def test_typical_weights_fill_more_than_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_rows, "TYPICAL", ((64, 128, 4), (64, 128, 0)))
    monkeypatch.setattr(product_rows, "TIMED_BYTES", 20_000)
    packed, dense = typical_groups()
    assert str(packed.shape) == "64 x 128, 4 bits, groups of 64"
    assert str(dense.shape) == "64 x 128, bfloat16"
    for one, nbytes in ((packed, 64 * 128 // 2 + 64 * 2 * 4), (dense, 64 * 128 * 2)):
        made: list[Matrix] = one.matrices()
        assert {m.nbytes for m in made} == {nbytes}
        assert len(made) == -(-20_000 // nbytes)


def test_the_table_and_the_file(
    track: Track, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    track.tile.threads = 128
    monkeypatch.setattr(bench_rows, "typical_groups", lambda: [group(), group(bits=8)])
    monkeypatch.setattr(product_rows.time_groups, "__defaults__", ((1, 2, 4), track, 1e9))
    file = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["bench", "--rows", "--json", str(file)])
    assert result.exception is None
    lines = [line.split() for line in result.stdout.splitlines()]
    at = lines.index(["24", "x", "512,", "4", "bits,", "groups", "of", "64", "(2", "layers)"])
    assert lines[at + 1 : at + 5] == [
        ["1", "2", "4"],
        ["stock", "1000.000", "ms", "1.00=", "1.00="],
        ["exact", "0.60=", "4x4", "0.60=", "4x4"],
        ["tile", "0.50", "2x4", "0.50", "2x4"],
    ]
    assert "left out: 2 rows, tile 2x8: refused: Thread group size (256)" in result.stdout
    document = json.loads(file.read_text())
    assert document["settings"] == {"rows": True}
    assert [r["shape"]["bits"] for r in document["results"]] == [4, 8]
    tile = document["results"][0]["rows"]["4"]["tile"]
    assert (tile["product"], tile["exact"]) == ("tile 2x4", False)
    assert tile["seconds"] == pytest.approx(0.5)


@pytest.mark.slow
@needs_emulator
def test_the_kernels_own_text(track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a target with MLX's kernel of one row, run from its text: the exact form is found, and
    tile has other bits."""

    monkeypatch.setattr(mx, "quantized_matmul", mlx_one_row.on_a_gpu)
    for limit in ("REPEATS", "TIMED_BYTES"):
        monkeypatch.setattr(race, limit, 1)
    track.tile.spoil = lambda y, _: y
    track.tile.device = Emulator(ROWS_TILE.definition)
    track.exact.device = Emulator(ROWS_EXACT.definition)
    one, other = timed(track, group(1), group(1, bits=8))
    for times in (one, other):
        assert times.rejected == []
        for rows in (4, 8):
            found = {kind: entry.exact for kind, entry in times.rows[rows].items()}
            assert found == {"stock": False, "exact": True, "tile": False}

"""Verdicts on file: whose they are, and what is not used."""

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dspine_mlx.metal.rows import Tile
from dspine_mlx.metal.rows_exact import Exact, Form
from dspine_mlx.target import verdicts
from dspine_mlx.target.products import STOCK
from dspine_mlx.target.race import Race, Verdict
from dspine_mlx.target.verdicts import Shape, Verdicts, kernels_key, path, read, write
from tests.support.racing import M2, M5
from tests.support.rows import matrix

SHAPE = Shape(4096, 1024, 4, 64, "affine", "bfloat16")
SETTLED: Verdicts = {
    (SHAPE, 4): Verdict(Exact(Form(2, True, 3), 8, 2), "faster", 1e-4, 3e-4, one_row=9e-5),
    (SHAPE, 8): Verdict(Tile(4, 8), "faster", 1e-4, 4e-4, ("exact 4x4: refused: too large",)),
    (SHAPE._replace(bits=8), 8): Verdict(STOCK, "nothing else is steadily faster", 1e-4, 1e-4),
}


@pytest.fixture
def key() -> dict[str, Any]:
    return kernels_key(Race("auto", M2))


def test_verdicts_come_back(tmp_path: Path, key: dict[str, Any]) -> None:
    write(tmp_path / "cache", key, SETTLED)
    assert read(tmp_path / "cache", key) == SETTLED


def test_verdicts_are_added_to_those_on_file(tmp_path: Path, key: dict[str, Any]) -> None:
    more: Verdicts = {(SHAPE, 16): Verdict(Tile(2, 8), "faster", 1.0, 2.0)}
    write(tmp_path, key, SETTLED)
    write(tmp_path, key, more)
    assert read(tmp_path, key) == SETTLED | more
    assert [p.suffix for p in tmp_path.iterdir()] == [".json"]


def test_a_key_names_all_that_matters(key: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key, kernels_key(Race("auto", M5)), kernels_key(Race("exact", M2))]
    keys.append(kernels_key(Race("auto", M2, newest=True)))
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M9"})
    keys.append(kernels_key(Race("auto", M2)))
    monkeypatch.setattr(mx, "__version__", "0.99")
    keys.append(kernels_key(Race("auto", M2)))
    monkeypatch.setattr(verdicts, "source", lambda name: f"// {name}, changed")
    keys.append(kernels_key(Race("auto", M2)))
    names = {path(Path(), k) for k in keys}
    assert len(names) == len(keys)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data["key"].update(device="Apple M9"),
        lambda data: data["key"].update(mlx="0.1.0"),
        lambda data: data["key"].update(macos="99.1"),
        lambda data: data["key"].update(mode="exact"),
        lambda data: data["key"].update(kernels="0" * 16),
        lambda data: data.update(format=1),
    ],
    ids=["chip", "MLX", "macOS", "mode", "kernels", "format"],
)
def test_a_file_of_another_is_not_used(tmp_path: Path, key: dict[str, Any], spoil: Any) -> None:
    """Though it has the name of ours."""
    write(tmp_path, key, SETTLED)
    data = json.loads(path(tmp_path, key).read_text())
    spoil(data)
    path(tmp_path, key).write_text(json.dumps(data))
    assert read(tmp_path, key) == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "\udcff",
        '{"format": 2, "key": KEY, "verdicts": [{"shape": {}}]}',
        '{"format": 2, "key": KEY, "verdicts": [{"product": {"kernel": "cube"}}]}',
        '{"format": 2, "key": KEY, "verdicts": 7}',
    ],
)
def test_what_can_not_be_read_is_raced_again(
    tmp_path: Path, key: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    encoded = text.replace("KEY", json.dumps(key)).encode("utf-8", "surrogateescape")
    path(tmp_path, key).write_bytes(encoded)
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, key) == {}
    assert "can't be read" in caplog.text
    write(tmp_path, key, SETTLED)
    assert read(tmp_path, key) == SETTLED


def test_a_folder_that_can_not_be_written_costs_a_race(
    tmp_path: Path, key: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        write(tmp_path / "file" / "cache", key, SETTLED)
    assert "can't be kept" in caplog.text


def test_shapes_in_words() -> None:
    assert str(SHAPE) == "4096 x 1024, 4 bits, groups of 64"
    assert str(SHAPE._replace(mode="mxfp4", group_size=32)) == (
        "4096 x 1024, mxfp4, 4 bits, groups of 32"
    )
    dense = matrix((16, 64), 0, 0, mx.float16)
    assert str(Shape.of(dense, mx.float16)) == "16 x 64, float16"

"""Checks of whole targets on file: a second load is quick, and nothing stale is believed."""

import json
import logging
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from dspine_mlx.target import checked_widths, row_kernels
from dspine_mlx.target.checked_widths import (
    KEPT,
    NAME,
    PACKAGE,
    check_key,
    code_digest,
    entries,
    model_digest,
)
from dspine_mlx.target.model import Target
from dspine_mlx.target.products import APART, STOCK
from dspine_mlx.target.race import Verdict
from dspine_mlx.target.row_kernels import RowKernels
from tests.support.families import build
from tests.support.racing import M2, Track

UNEQUAL = {4: "logits differ after 64 positions"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The widths of every check that ran; at 4 rows the target differs."""
    found: list[set[int]] = []

    def compared(target: Target, widths: list[int], *_: Any) -> Iterator[tuple[int, str]]:
        found.append(set(widths))
        yield from ((w, UNEQUAL.get(w, "")) for w in widths)

    monkeypatch.setattr(row_kernels, "compared_widths", compared)
    return found


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Track:
    return Track(monkeypatch)


def checked(track: Track, folder: Path | None, *widths: int, **options: Any) -> RowKernels:
    model = build("qwen2", options.pop("bits", 4))
    kernels = RowKernels(Target(model), track.race("exact"), folder)
    kernels.check(widths, **options)
    return kernels


def test_a_target_is_checked_once(track: Track, asked: list[set[int]], tmp_path: Path) -> None:
    first = checked(track, tmp_path / "cache", 2, 3, 4, 5)
    again = checked(track, tmp_path / "cache", 2, 3, 4, 5)
    assert asked == [{2, 3, 4, 5}]
    for kernels in (first, again):
        assert kernels.checked == {2, 3, 4, 5}
        assert kernels.unequal == UNEQUAL
        assert kernels.width_limit == 3
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [NAME]


def test_only_new_widths_are_checked(track: Track, asked: list[set[int]], tmp_path: Path) -> None:
    checked(track, tmp_path, 2, 4)
    wider = checked(track, tmp_path, 2, 3, 4, 8)
    narrow = checked(track, tmp_path, 3)
    assert asked == [{2, 4}, {3, 8}]
    assert (wider.checked, wider.unequal) == ({2, 3, 4, 8}, UNEQUAL)
    assert (narrow.checked, narrow.unequal) == ({3}, {})  # no width that nobody asked for


def test_the_check_ends_when_its_time_is_up(
    track: Track, asked: list[set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The narrowest widths first; the next load goes on with the others. It says how far it is."""
    compared = row_kernels.compared_widths

    def slow(*args: Any) -> Iterator[tuple[int, str]]:
        for pair in compared(*args):
            track.now += 25.0
            yield pair

    monkeypatch.setattr(row_kernels, "compared_widths", slow)
    monkeypatch.setattr(row_kernels, "CHECK_SECONDS", 60.0)
    told: list[str] = []
    first = checked(track, tmp_path, *range(2, 8), told=told.append)
    assert (first.checked, first.width_limit) == ({2, 3, 4}, 3)
    assert [text.rpartition(": ")[2] for text in told[1:]] == [
        "1 of 6 widths", "2 of 6 widths", "3 of 6 widths"]  # fmt: skip
    assert checked(track, tmp_path, *range(2, 8)).checked == set(range(2, 8))
    assert asked == [set(range(2, 8)), {5, 6, 7}]


def test_without_a_folder_every_load_checks(track: Track, asked: list[set[int]]) -> None:
    for _ in range(2):
        checked(track, None, 2)
    assert asked == [{2}, {2}]


def changed_weight(model: nn.Module) -> None:
    scales = model.layers[1].mlp.up_proj.scales
    scales[3, 0] = scales[3, 0] * 1.01


def swapped_rows(model: nn.Module) -> None:
    layer = model.layers[0].mlp.up_proj
    rows = mx.array([1, 0, *range(2, len(layer.weight))])
    layer.weight, layer.scales, layer.biases = (
        a[rows] for a in (layer.weight, layer.scales, layer.biases)
    )


def changed_bias(model: nn.Module) -> None:
    bias = model.layers[0].self_attn.q_proj.bias
    model.layers[0].self_attn.q_proj.bias = bias[::-1]


def changed_norm(model: nn.Module) -> None:
    model.layers[0].input_layernorm.eps *= 2


def changed_class(model: nn.Module) -> None:
    norm = model.layers[0].input_layernorm
    norm.__class__ = type("OtherNorm", (type(norm),), {})


@pytest.mark.parametrize(
    "change", [changed_weight, swapped_rows, changed_bias, changed_norm, changed_class]
)
def test_other_models_have_other_digests(change: Callable[[nn.Module], None]) -> None:
    model, same = build("qwen2", 4), build("qwen2", 4)
    before = model_digest(model)
    assert model_digest(same) == before
    change(model)
    assert model_digest(model) != before


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint8])
def test_one_bit_of_any_dtype_is_seen(dtype: mx.Dtype) -> None:
    layer = nn.Linear(8, 4)
    layer.weight = mx.ones((2, 3, 4), dtype)
    before = model_digest(layer)
    kind = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[dtype.size]
    bits = layer.weight.view(kind)
    bits[1, 2, 3] = bits[1, 2, 3] ^ mx.array(1, kind)
    layer.weight = bits.view(dtype)
    assert model_digest(layer) != before


def test_a_key_names_all_that_matters(track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine, its system, MLX, mlx-lm, this package, the kernels' text, the products in use,
    the environment, and what was compared."""
    target, depths = Target(build("qwen2", 4)), (64, 2048)
    found: list[str] = []

    def keep(depths: tuple[int, ...] = depths, product: Any = STOCK) -> None:
        kernels = RowKernels(target, track.race("exact"))
        shape = next(iter(kernels.shapes))
        kernels.verdicts = {(shape, 2): Verdict(product, "")}
        key = kernels.key | {"products": kernels.digest}
        found.append(json.dumps(check_key(target.model, key, depths)))

    keep()
    keep(depths=(64,))
    keep(product=APART)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "M9", "architecture": "g99"})
    keep()
    monkeypatch.setattr(mx, "__version__", "0.99")
    keep()
    monkeypatch.setattr(platform, "mac_ver", lambda: ("99.1", ("", "", ""), "arm64"))
    keep()
    monkeypatch.setattr(checked_widths, "version", lambda name: f"{name} 9")
    keep()
    monkeypatch.setattr("dspine_mlx.target.verdicts.source", lambda name: f"// {name}, changed")
    keep()
    monkeypatch.setitem(os.environ, "MLX_ENABLE_TF32", "7")
    keep()
    monkeypatch.setattr(checked_widths, "TEXTS", 9)
    keep()
    assert len(set(found)) == len(found) == 10
    keep()
    assert len(set(found)) == 10


def test_code_between_releases_is_told_apart(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE / "target", tmp_path / "target")
    (tmp_path / "metal").symlink_to(PACKAGE / "metal", target_is_directory=True)
    assert code_digest(tmp_path) == code_digest()
    assert check_key(nn.Linear(2, 2), {}, (8,))["code"] == code_digest()
    file = tmp_path / "target" / "row_attention.py"
    file.write_text(file.read_text() + "#")
    assert code_digest(tmp_path) != code_digest()


def test_the_environment_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LD_PRELOAD", "/home/quentin/lib.so")
    assert "quentin" not in json.dumps(check_key(nn.Linear(2, 2), {}, (8,)))


def test_other_products_are_checked_again(
    track: Track, asked: list[set[int]], tmp_path: Path
) -> None:
    """Rows one by one, where nothing has been raced, are other products than MLX's for all."""
    checked(track, tmp_path, 2)
    kernels = RowKernels(Target(build("qwen2", 4)), track.race("exact"), tmp_path)
    kernels.verdicts = {(shape, 2): Verdict(STOCK, "") for shape in kernels.shapes}
    kernels.check((2,))
    assert asked == [{2}, {2}]


def test_an_exact_race_goes_on_for_longer(track: Track) -> None:
    """Than one at any load: its result decides whether the check holds."""
    target = Target(build("qwen2", 4))
    exact, auto = (RowKernels(target, track.race(mode, M2)) for mode in ("exact", "auto"))
    track.exact.threads = track.tile.threads = 0
    track.stock = track.row = 0.02
    for kernels in (exact, auto):
        kernels.settle((2,))
    raced = [{shape for shape, _ in kernels.verdicts} for kernels in (exact, auto)]
    assert raced[0] >= set(exact.shapes)
    assert not raced[1] >= set(auto.shapes)


def test_the_file_is_bounded(tmp_path: Path) -> None:
    for i in range(KEPT + 3):
        checked_widths.write(tmp_path, {"target": i}, {2: ""})
    checked_widths.write(tmp_path, {"target": 7}, {2: "", 3: "logits"})
    kept = entries(tmp_path)
    assert len(kept) == KEPT
    assert kept[0] == ({"target": 7}, {2: "", 3: "logits"})
    assert [key["target"] for key, _ in kept[1:4]] == [KEPT + 2, KEPT + 1, KEPT]
    assert checked_widths.read(tmp_path, {"target": 0}) == {}
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 1, "checked": 7}', '{"format": 1, "checked": [{"key": {}}]}',
     '{"format": 1, "checked": [{"key": {}, "widths": {"two": ""}}]}', "\udcff"],
)  # fmt: skip
def test_what_can_not_be_read_is_checked_again(
    track: Track,
    asked: list[set[int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    text: str,
) -> None:
    (tmp_path / NAME).write_bytes(text.encode("utf-8", "surrogateescape"))
    with caplog.at_level(logging.WARNING):
        checked(track, tmp_path, 2)
    assert "targets are checked again" in caplog.text
    checked(track, tmp_path, 2)
    assert asked == [{2}]


def test_a_file_of_another_format_is_not_used(
    track: Track, asked: list[set[int]], tmp_path: Path
) -> None:
    checked(track, tmp_path, 2)
    data = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps(data | {"format": 2}))
    checked(track, tmp_path, 2)
    assert asked == [{2}, {2}]


def test_a_folder_that_can_not_be_written_costs_a_check(
    track: Track, asked: list[set[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        kernels = checked(track, tmp_path / "file" / "cache", 2)
    assert "can't be kept" in caplog.text
    assert kernels.width_limit == 2

"""What doctor and report say of races and checks on file."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dspine_mlx.measure import doctor
from dspine_mlx.measure.doctor import NOTE, OK, Finding
from dspine_mlx.measure.kernels_on_file import (
    check_in_words,
    checks_on_file,
    races_on_file,
    shapes_in_words,
    still_slow,
)
from dspine_mlx.measure.report import bundle
from dspine_mlx.metal.rows import Tile
from dspine_mlx.metal.rows_exact import Exact, Form
from dspine_mlx.target import checked_widths
from dspine_mlx.target.products import STOCK
from dspine_mlx.target.race import Race, Verdict
from dspine_mlx.target.verdicts import AttentionShape, Shape, Verdicts, kernels_key, path, write
from tests.support.cache import cache_folder

UP = Shape(12288, 4096, 4, 64, "affine", "bfloat16")
HEAD = Shape(151936, 4096, 4, 64, "affine", "bfloat16")
REFUSED = "tile 4x8: refused: 256 threads are too many"
RACED: Verdicts = {
    (UP, 2): Verdict(Exact(Form(2), 4, 8), "faster", 1.02e-4, 1.48e-4, one_row=1e-4),
    (UP, 3): Verdict(Tile(4, 8), "faster", 1.1e-4, 2.2e-4, one_row=1e-4),
    (UP, 8): Verdict(Tile(4, 8), "faster", 1.3e-4, 3.74e-4, one_row=1e-4),
    (HEAD, 4): Verdict(STOCK, "nothing else is steadily faster", 1.5e-3, 1.5e-3, (), 1e-3),
    (HEAD, 8): Verdict(STOCK, "nothing else is steadily faster", 3.7e-3, 3.7e-3, (REFUSED,), 1e-3),
    (HEAD, 16): Verdict(STOCK, "no kernel serves it"),
}
FOUND = {
    "12288 x 4096, 4 bits, groups of 64: 2 rows exact 4x8 1.02 (MLX's 1.48); 8 rows tile 4x8 1.30 "
    "(MLX's 3.74)": "",
    "151936 x 4096, 4 bits, groups of 64: 4 rows MLX's 1.50; 8 rows MLX's 3.70; 16 rows MLX's (no "
    "kernel serves it)": "still slow: 8 rows cost 3.7 single rows; nothing else is steadily "
    f"faster; left out: {REFUSED}",
}


def raced(verdicts: Verdicts = RACED, mode: str = "auto") -> Path:
    key = kernels_key(Race(mode))
    write(cache_folder(), key, verdicts)
    return path(cache_folder(), key)


def as_a_chip(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    facts = {"device_name": f"Apple {name}", "architecture": "applegpu_g14s"}
    monkeypatch.setattr(mx, "device_info", lambda: facts)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)


def test_shapes_in_words() -> None:
    assert dict(shapes_in_words(RACED)) == FOUND


def test_a_verdict_without_a_single_row_is_in_milliseconds() -> None:
    """As of products that no single row is compared with."""
    (line,) = shapes_in_words({(UP, 4): Verdict(Tile(4, 8), "faster", 1e-4, 3e-4)})
    assert line == (f"{UP}: 4 rows tile 4x8 0.1 ms (MLX's 0.3)", "")
    attention = AttentionShape(32, 8, 128, 128, 0, 0, False, "bfloat16", 4096)
    mixed: Verdicts = {(attention, 8): Verdict(STOCK, "", 2e-3, 2e-3)} | RACED
    found = dict(shapes_in_words(mixed))
    assert found == FOUND | {f"{attention}: 8 rows MLX's 2 ms": ""}


@pytest.mark.parametrize(("seconds", "slow"), [(1.9, False), (2.1, True)])
def test_slow_is_more_than_twice_one_row(seconds: float, slow: bool) -> None:
    verdict = Verdict(Tile(4, 8), "faster", seconds, 5.0, one_row=1.0)
    words = "still slow: 16 rows cost 2.1 single rows with the best kernel" if slow else ""
    assert still_slow([(8, Verdict(STOCK, "", 1.0, 1.0, (), 1.0)), (16, verdict)]) == words


def test_doctor_says_what_a_race_found() -> None:
    raced()
    rows = [f for f in doctor.verify_rows() if f.name == "rows, auto"]
    assert rows == [
        Finding("rows, auto", NOTE if slow else OK, found, slow) for found, slow in FOUND.items()
    ]


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("device", "Apple M1", "it was raced on Apple M1"),
        ("mlx", "0.1.0", "it was raced with MLX 0.1.0"),
        ("macos", "15.1", "it was raced under macOS 15.1"),
        ("kernels", "0" * 16, "it was raced with other kernels"),
        ("mode", "fast", "it can't be read"),
    ],
)
def test_verdicts_of_another_machine_are_noted(field: str, value: str, problem: str) -> None:
    file = raced()
    data = json.loads(file.read_text())
    data["key"][field] = value
    file.write_text(json.dumps(data))
    (race,) = races_on_file()
    assert race.problem == problem
    (line,) = [f for f in doctor.verify_rows() if f.name == "kernel race"]
    assert (line.status, line.detail) == (NOTE, f"{problem}; not used")
    assert line.advice.startswith(f"delete {file.name};")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"key": {}, "verdicts": [3]}'])
def test_files_that_are_none_are_told(text: str) -> None:
    raced().write_text(text)
    (race,) = races_on_file()
    assert (race.problem, race.verdicts) == ("it can't be read", {})


@pytest.mark.parametrize(
    ("chip", "verdicts", "noted"),
    [
        ("M1", {}, True),
        ("M2 Max", {(UP, 8): Verdict(STOCK, "nothing else", 3.0, 3.0, (), 1.0)}, True),
        ("M2 Max", RACED, False),
        ("M4 Pro", {}, False),
    ],
)
def test_old_chips_are_noted_where_no_kernel_helps(
    monkeypatch: pytest.MonkeyPatch, chip: str, verdicts: Verdicts, noted: bool
) -> None:
    as_a_chip(monkeypatch, chip)
    if verdicts:
        raced(verdicts)
    lines = [f for f in doctor.verify_rows() if f.name == "verify rows"]
    assert bool(lines) == noted
    assert all(line.status == NOTE and chip in line.detail and line.advice for line in lines)


def test_without_metal_and_files_nothing_is_said() -> None:
    if not mx.metal.is_available():
        assert list(doctor.verify_rows()) == []


def test_checks_are_told() -> None:
    key: dict[str, Any] = {"target": "0123456789abcdef", "mlx": "0.32", "device": "Apple M4"}
    said = "target 0123456789abcdef checked with MLX 0.32 on Apple M4: "
    checked_widths.write(cache_folder(), key, {2: "", 3: "logits differ", 4: "caches differ"})
    (check,) = checks_on_file()
    assert check["unequal"] == {"3": "logits differ", "4": "caches differ"}
    said_now = f"{said}1 of 3 widths have plain decoding's bits; 3 rows: logits differ"
    assert check_in_words(check) == said_now
    checked_widths.write(cache_folder(), key, {2: "", 3: ""})
    (line,) = [f for f in doctor.verify_rows() if f.name == "exact check"]
    assert line == Finding("exact check", OK, f"{said}2 of 2 widths have plain decoding's bits")


def test_a_report_carries_verdicts_and_checks() -> None:
    raced()
    key = {"target": "0" * 16, "environment": "not told"}
    checked_widths.write(cache_folder(), key, {2: ""})
    facts = json.loads(json.dumps(bundle()))
    assert facts["verify_kernels"]["mode"] == "auto"
    (race,) = [race for race in facts["races"] if not race["problem"]]
    assert len(race["verdicts"]) >= len(RACED)
    mine = next(v for v in race["verdicts"] if v["rows"] == 2 and v["shape"]["outputs"] == 12288)
    assert (mine["seconds"], mine["stock"], mine["one_row"]) == (1.02e-4, 1.48e-4, 1e-4)
    (check,) = facts["exact_checks"]
    assert "environment" not in check
    assert any(f["name"] == "rows, auto" for f in facts["findings"])

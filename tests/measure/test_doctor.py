import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from typer.testing import CliRunner

from dspine_mlx.batch import profile as batch
from dspine_mlx.batch.costs import BatchCurve
from dspine_mlx.batch.on_file import batch_costs_on_file
from dspine_mlx.cli import app
from dspine_mlx.errors import InputError
from dspine_mlx.measure import doctor
from dspine_mlx.measure.doctor import NOTE, OK, PROBLEM, Finding
from dspine_mlx.verify_length import store
from dspine_mlx.verify_length.calibration import Calibration, uncalibrated
from dspine_mlx.verify_length.costs import Curve
from dspine_mlx.verify_length.fit import fit
from dspine_mlx.verify_length.on_file import (
    UNREADABLE,
    calibrations_on_file,
    costs_on_file,
    looks_unreliable,
)
from dspine_mlx.verify_length.schedule import prepare
from dspine_mlx.verify_length.store import calibration_path, save_calibrations
from tests.support.cache import cache_folder
from tests.support.tiny import tiny_dspine

FILES = ("costs", "calibration")


def found(findings: Any, name: str) -> list[Finding]:
    return [finding for finding in findings if finding.name == name]


def test_a_sound_machine(model: nn.Module) -> None:
    prepare(tiny_dspine(model))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout.splitlines()[-1])
    assert (result.exit_code, report["sound"]) == (0, True)
    lines = {f["name"]: f for f in report["findings"]}
    assert lines["shipped pair"]["detail"].startswith("generates (8 tokens); calibrated for greedy")
    assert lines["on file"]["detail"].startswith("1 files")
    assert lines["serving"]["status"] == "ok"
    assert {"system", "mlx", "mlx-lm", "kernels" if "Metal" in lines else "chip"} <= lines.keys()


def test_notes_are_no_problems(model: nn.Module) -> None:
    """A damaged file in the cache is told, with what to do, and the exit status stays 0."""
    cache_folder().mkdir(parents=True)
    (cache_folder() / "costs-1.json").write_text("{")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    note = "note    costs: unknown pair; 0 days old; it can't be read (delete"
    assert f"{note} costs-1.json; it is measured again when needed)" in result.stdout


def test_a_broken_pair_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise InputError("model.safetensors can't be read")

    monkeypatch.setattr(doctor, "load", broken)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "PROBLEM shipped pair: model.safetensors can't be read" in result.stdout


# ---- machines


def as_a_mac(monkeypatch: pytest.MonkeyPatch, chip: str, wired: str, macos: str = "26.2") -> None:
    sizes = {"memory_size": 48 << 30, "max_recommended_working_set_size": 36 << 30}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": chip} | sizes)
    monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))

    class Sysctl:
        stdout = wired

    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **options: Sysctl())


@pytest.mark.parametrize(
    ("chip", "speed", "limits"),
    [
        ("Apple M2 Max", "400 GB/s nominal", {"bfloat16"}),
        ("Apple M4 Pro", "273 GB/s nominal", set()),
        ("Apple M5", "153 GB/s nominal", set()),
        ("Apple M9 Max", "bandwidth not known here", set()),
    ],
)
def test_chips(chip: str, speed: str, limits: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Mac: bandwidth, and what older chips lack."""
    as_a_mac(monkeypatch, chip, "40000\n")
    findings = {f.name: f for f in doctor.device()}
    assert findings["chip"].detail == f"{chip.removeprefix('Apple ')}, 48 GiB, {speed}"
    assert findings["GPU memory"].detail == "36 GiB usable, wired limit 40000 MB"
    assert findings.keys() - {"chip", "GPU memory"} == limits
    assert all(findings[name].advice for name in limits)


def test_the_default_wired_limit_is_macos_own(monkeypatch: pytest.MonkeyPatch) -> None:
    as_a_mac(monkeypatch, "Apple M4", "0\n")
    (memory,) = found(doctor.device(), "GPU memory")
    assert memory.detail == "36 GiB usable, wired limit macOS's own"


@pytest.mark.parametrize(("macos", "advised"), [("26.1", True), ("26.2.1", False), ("27.0", False)])
def test_an_m5_wants_a_macos_that_knows_it(
    macos: str, advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_a_mac(monkeypatch, "Apple M5 Max", "0\n", macos)
    assert bool(found(doctor.device(), "neural accelerators")) == advised


def test_a_mac_without_metal_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    for system, status in (("darwin", PROBLEM), ("linux", NOTE)):
        monkeypatch.setattr(doctor.sys, "platform", system)
        (metal,) = found(doctor.device(), "Metal")
        assert metal.status == status


# ---- packages


def versions(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    known: Callable[[str], str] = doctor.version

    def version(name: str) -> str:
        wanted = changed.get(name.replace("-", "_"), known)
        if wanted is None:
            raise doctor.PackageNotFoundError(name)
        return wanted if isinstance(wanted, str) else known(name)

    monkeypatch.setattr(doctor, "version", version)


def test_a_backend_of_another_mlx_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, mlx="0.40.0", mlx_metal="0.39.0", mlx_cpu="0.40.0")
    assert found(doctor.incompatibilities(), "mlx-cpu") == []
    (metal,) = found(doctor.incompatibilities(), "mlx-metal")
    assert (metal.status, metal.advice) == (PROBLEM, "pip install mlx-metal==0.40.0")


def test_an_mlx_lm_that_cant_serve_and_packages_that_patch_are_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unfit() -> None:
        raise InputError("mlx-lm 9 has no mlx_lm.server.run; serving works with mlx-lm 0.32.0")

    monkeypatch.setattr(doctor, "check_host", unfit)
    versions(monkeypatch, dflash_mlx="0.1.8", mlx_dspark=None)
    (serving,) = found(doctor.incompatibilities(), "serving")
    assert (serving.status, serving.detail[:8]) == (NOTE, "mlx-lm 9")
    (peer,) = found(doctor.incompatibilities(), "dflash-mlx")
    assert (peer.status, bool(peer.advice)) == (NOTE, True)
    assert found(doctor.incompatibilities(), "mlx-dspark") == []


# ---- what is on file


@pytest.fixture
def on_file(model: nn.Module) -> dict[str, Path]:
    """Costs and calibration of a tiny pair."""
    drafter = tiny_dspine(model)
    prepare(drafter)
    evidence = mx.random.normal((80, 7), key=mx.random.key(1)).tolist()
    fitted = fit(np.array(evidence), np.arange(80) % 8)
    save_calibrations(calibration_path(drafter), drafter, {"greedy": fitted})
    return {kind: next(cache_folder().glob(f"{kind}-*.json")) for kind in FILES}


def test_costs_say_of_which_pair_and_when(on_file: dict[str, Path]) -> None:
    week_ago = time.time() - 7 * 24 * 3600
    os.utime(on_file["costs"], (week_ago, week_ago))
    (entry,) = costs_on_file()
    assert entry.pair.startswith("qwen3, 4 layers of 32, ")
    assert entry.pair.endswith("with DSpine, 2 layers, 7 proposals")
    assert (round(entry.days), entry.problem, entry.device) == (7, "", store.device_name())
    (line,) = found(doctor.on_file(), "costs")
    figures = "plain 1.0 ms, draft 0.1 ms, verify 1.0 ms (1 row) to 1.0 ms (16 rows)"
    assert line == Finding("costs", OK, f"{entry.pair}: {figures}; 7 days old")


def test_calibrations_say_of_which_pair_and_modes(on_file: dict[str, Path]) -> None:
    (line,) = found(doctor.on_file(), "calibration")
    pair = next(costs_on_file()).pair
    detail = f"{pair}: calibrated for greedy (80 rounds); 0 days old"
    assert line == Finding("calibration", OK, detail)
    edited(on_file["calibration"], lambda data: data.pop("pair"))  # as in older files
    (entry,) = calibrations_on_file()
    key = json.loads(on_file["calibration"].read_text())["key"]
    assert entry.pair == f"target {key['target']} with drafter {key['drafter']}"


def test_costs_of_several_texts(on_file: dict[str, Path], model: nn.Module) -> None:
    drafter = tiny_dspine(model)
    one = Curve((64, 2048), (1.0, 1.5), (0.5, 0.6), ((1.0,) * 7 + (2.0,), (1.5,) * 7 + (2.5,)))
    curves = [BatchCurve(texts, one, (1.0,) * 7) for texts in (1, 3)]
    batch.write(drafter, curves)
    (entry,) = batch_costs_on_file()
    assert (entry.curves, entry.problem) == (tuple(curves), "")
    (line,) = found(doctor.on_file(), "batch costs")
    figures = "plain steps, and verify forwards of 8 rows per text, by texts: "
    figures += "1 1000.0 and 2000.0 ms, 3 1000.0 and 2000.0 ms"
    assert line == Finding("batch costs", OK, f"{entry.pair}: {figures}; 0 days old")
    file = batch.path_of(drafter)
    edited(file, lambda data: data["key"].update(device="Apple M1"))
    (line,) = found(doctor.on_file(), "batch costs")
    assert line.advice == f"delete {file.name}; it is measured again when needed"
    file.write_text("{")
    assert next(batch_costs_on_file()).problem == UNREADABLE


def edited(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_costs_of_another_machine_or_mlx_are_noted(on_file: dict[str, Path]) -> None:
    edited(on_file["costs"], lambda data: data["key"].update(mlx="0.1.0"))
    assert next(costs_on_file()).problem == "it was measured with MLX 0.1.0"
    edited(on_file["costs"], lambda data: data["key"].update(device="Apple M1"))
    assert next(costs_on_file()).problem == "it was measured on Apple M1"
    (line,) = found(doctor.on_file(), "costs")
    assert (line.status, line.advice.split(";")[0]) == (NOTE, f"delete {on_file['costs'].name}")


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"key": {}}', '{"key": 3, "modes": []}'])
def test_files_that_are_none_are_told(text: str, kind: str, on_file: dict[str, Path]) -> None:
    on_file[kind].write_text(text)
    (line,) = found(doctor.on_file(), kind)
    assert line.status == NOTE
    assert "unknown pair" in line.detail
    assert "it can't be read" in line.detail


@pytest.mark.parametrize(
    ("plain", "rows", "sign"),
    [
        (1.0, (1.0, 1.1, 1.9, 2.0), ""),
        (1.0, (1.0, 0.9, 0.8, 0.7), ""),
        (1.0, (1.0, 2.0, 1.0, 1.1), "3 rows took 50% of the time of 2"),
        (3.0, (1.0, 1.0, 1.0, 1.0), "a plain token took 3 times a forward over one row"),
        (0.3, (1.0, 1.0, 1.0, 1.0), "a plain token took 0.3 times a forward over one row"),
    ],
)
def test_signs_of_a_disturbed_measurement(plain: float, rows: Any, sign: str) -> None:
    curve = Curve((64, 2048), (plain, plain), (0.1, 0.1), (rows, rows))
    assert curve.contradiction() == sign


def test_signs_of_a_doubtful_calibration() -> None:
    def of(rounds: int, before: float, after: float) -> Calibration:
        return Calibration((1.0, 2.0), (0.0, 0.0), rounds, before, after)

    assert looks_unreliable({}) == ""
    sound = {"greedy": of(500, 0.1, 0.05), "sampled from 0.0": of(60, 0.1, 0.1)}
    assert looks_unreliable(sound) == ""
    assert looks_unreliable({"greedy": of(59, 0.1, 0.05)}) == "greedy was fitted on 59 rounds only"
    worse = {"greedy": of(500, 0.1, 0.05), "sampled from 0.0": of(500, 0.05, 0.1)}
    problem = "sampled from 0.0 is further off with it (10.0%) than without (5.0%)"
    assert looks_unreliable(worse) == problem
    assert looks_unreliable({"greedy": uncalibrated(3)}) == "greedy was fitted on 0 rounds only"


def test_drafters_in_the_hub_cache_are_told_by_their_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert not doctor.is_drafter(tmp_path)
    (tmp_path / "config.json").write_text('{"dflash_config": {"target_layer_ids": [1]}}')
    assert doctor.is_drafter(tmp_path)

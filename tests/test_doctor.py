import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from dspine_mlx import doctor
from dspine_mlx.cli import app
from dspine_mlx.errors import InputError


def test_a_sound_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.costs, "CACHE", tmp_path)
    (tmp_path / "a.json").write_text("{}")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout.splitlines()[-1])
    assert (result.exit_code, report["sound"]) == (0, True)
    found = {f["name"]: f for f in report["findings"]}
    assert found["shipped pair"]["detail"] == "generates (8 tokens)"
    assert found["on file"]["detail"].startswith("1 files")
    assert {"system", "mlx", "mlx-lm", "kernels" if "Metal" in found else "chip"} <= found.keys()


def test_a_broken_pair_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise InputError("model.safetensors can't be read")

    monkeypatch.setattr(doctor, "load", broken)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "PROBLEM shipped pair: model.safetensors can't be read" in result.stdout


@pytest.mark.parametrize(("chip", "advised"), [("Apple M2 Max", True), ("Apple M4 Pro", False)])
def test_chips(chip: str, advised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Mac: the chip's bandwidth, and float16 for those that emulate bfloat16."""
    sizes = {"memory_size": 48 << 30, "max_recommended_working_set_size": 36 << 30}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": chip} | sizes)

    class Sysctl:
        stdout = "40000\n"

    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **options: Sysctl())
    findings = {f.name: f for f in doctor.device()}
    name = chip.removeprefix("Apple ")
    assert findings["chip"].detail == f"{name}, 48 GiB, {doctor.BANDWIDTH[name]} GB/s nominal"
    assert findings["GPU memory"].detail == "36 GiB usable, wired limit 40000 MB"
    assert ("bfloat16" in findings) == advised


def test_drafters_in_the_hub_cache_are_told_by_their_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert not doctor.is_drafter(tmp_path)
    (tmp_path / "config.json").write_text('{"dflash_config": {"target_layer_ids": [1]}}')
    assert doctor.is_drafter(tmp_path)

"""A report is safe to publish: what it contains, and that it contains nothing else."""

import getpass
import json
import platform
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from typer.testing import CliRunner

from dspine_mlx.cli import app
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO, load
from dspine_mlx.measure import doctor, report
from dspine_mlx.measure.report import PROMPTS, as_text, bundle, facts
from dspine_mlx.verify_length import store
from dspine_mlx.verify_length.store import (
    calibration_path,
    load_calibrations,
    save_calibrations,
)

NAMES = st.from_regex(r"[QXZJÜ][QXZJÜ ']{3,9}[QXZJÜ]", fullmatch=True)


def copy_of(part: str, folder: Path, **changes: Any) -> Path:
    shutil.copytree(DEMO / part, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@settings(max_examples=4, deadline=None)
@given(st.lists(NAMES, min_size=4, max_size=4, unique=True))
def test_no_private_name_gets_into_a_report(names: list[str]) -> None:
    """Planted wherever a name could come from: home, user, host, models' folders and configs, the
    files on file, and errors."""
    user, host, folder, owner = names
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        home = Path(root, user)
        models = home / folder
        target = copy_of("target", models / "t", _name_or_path=f"{home}/x", license_name=owner)
        drafter = copy_of("drafter", models / "d", _name_or_path=owner)
        cache = home / "cache"
        patch.setattr(store, "cache_folder", lambda: cache)
        for name in ("HOME", "USER", "LOGNAME", "LD_PRELOAD"):
            patch.setenv(name, str(home))
        patch.setattr(getpass, "getuser", lambda: user)
        for where in (socket, platform):
            for function in ("gethostname", "node", "platform"):
                patch.setattr(where, function, lambda *_: host, raising=False)
        cache.mkdir()
        for kind in ("costs", "batch", "calibration"):
            (cache / f"{kind}-1.json").write_text(json.dumps({"key": str(home), "pair": user}))

        def broken() -> Any:
            raise InputError(f"{home}/site-packages/dspine_mlx/demo can't be read")

        patch.setattr(doctor, "load", broken)
        _, _, loaded = load(target, drafter)
        assert loaded is not None
        save_calibrations(calibration_path(loaded), loaded, load_calibrations(loaded))
        found = bundle(target, drafter)
        text = json.dumps(found, ensure_ascii=False) + as_text(found)
        assert "Qwen3ForCausalLM" in text  # what may be told is told
        assert [len(found[part]) for part in ("costs", "batch_costs", "calibrations")] == [2, 1, 2]
        for private in (*names, str(home), str(DEMO), "site-packages"):
            assert private not in text
            assert json.dumps(private)[1:-1] not in text


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        ("model_type", "qwen3_5", True),
        ("model_type", "/Users/ann/m", False),
        ("model_type", "Ann's model", False),
        ("architectures", ["Qwen3ForCausalLM"], True),
        ("architectures", ["Qwen3ForCausalLM", "/home/ann"], False),
        ("hidden_size", 192, True),
        ("hidden_size", {"ann": 1}, False),
        ("torch_dtype", None, True),
        ("_name_or_path", "ann", False),
    ],
)
def test_of_a_config_known_numbers_and_words_are_kept(
    key: str, value: Any, kept: bool, tmp_path: Path
) -> None:
    plain = {"model_type": "qwen3", "vocab_size": 9, "quantization": {"bits": 4, "m.0": {}}}
    (tmp_path / "config.json").write_text(json.dumps(plain | {key: value}))
    found = facts(tmp_path)
    assert found["vocab_size"] == 9
    assert found["bits"] == 4
    assert found.get(key, "nothing") == (value if kept else "nothing")
    digest = found["config"]
    (tmp_path / "config.json").write_text(json.dumps(plain | {key: value, "rope_theta": 1}))
    assert facts(tmp_path)["config"] != digest


@pytest.mark.slow
def test_a_report_of_the_shipped_pair_with_its_speed(
    tokenizer: TokenizerWrapper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "TOKENS", 8)
    monkeypatch.setattr(report, "REPEAT", 1)
    out = tmp_path / "report.md"
    result = CliRunner().invoke(app, ["report", "--bench", "--output", str(out)])
    assert result.exception is None
    text = out.read_text()
    head, _, rest = text.partition("```json\n")
    found = json.loads(rest.removesuffix("```\n"))
    assert found["format"] == 1
    assert found["pair"]["loads"]
    assert found["pair"]["drafter"]["block_size"] == 16
    (curve,) = [entry["curve"] for entry in found["costs"]]
    assert curve["plain"] == [1e-3, 1e-3]
    modes = {row["way"]: row for row in found["bench"]["ways"]}
    assert set(modes) == {"plain", "auto", "fixed:4"}
    assert [row["texts"] for row in modes.values()] == [2, 2, 2]
    assert modes["plain"]["identical"] == 2
    assert set(found["bench"]["split"]["phases"]) >= {"draft", "verify"}
    speed = modes["auto"]["tokens_per_second"]
    assert f"| auto | {speed:.1f} | - |" in head  # 8 tokens are too few for a ratio
    assert {f["name"] for f in found["findings"]} >= {"mlx", "shipped pair", "costs"}
    model, _ = mlx_lm.load(str(DEMO / "target"))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPTS[0]}], add_generation_prompt=True
    )
    words = mlx_lm.generate(model, tokenizer, prompt, max_tokens=6)
    assert words.strip()
    for private in (*PROMPTS, words.strip(), str(tmp_path), str(Path.home() / ".cache")):
        assert private not in text
    again = CliRunner().invoke(app, ["report", "--output", str(out)])
    assert isinstance(again.exception, InputError)
    assert out.read_text() == text


def test_a_pair_that_does_not_load_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = copy_of("drafter", tmp_path / "d", num_target_layers=7)
    command = ["report", "--model", str(DEMO / "target"), "--draft-model", str(wrong), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    found = json.loads(result.stdout.splitlines()[-1])
    assert not found["pair"]["loads"]
    assert found["pair"]["drafter"]["num_target_layers"] == 7
    assert found["bench"] is None
    assert "it was made for 7 target layers" in caplog.text  # told to the user alone
    assert "it was made for" not in result.stdout


@pytest.mark.parametrize(
    ("given_one", "said"),
    [
        ("--model", "give both --model and --draft-model, or none"),
        ("--draft-model", "needs its target; name it with --model"),
    ],
)
def test_a_report_is_about_a_pair(given_one: str, said: str) -> None:
    result = CliRunner().invoke(app, ["report", given_one, str(DEMO / "target")])
    assert said in str(result.exception)

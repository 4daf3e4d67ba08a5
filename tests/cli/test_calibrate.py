"""dspine-mlx calibrate, from prompts to the policy of the next generation."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import dspine_mlx
from dspine_mlx.cli import app
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.schedule import Schedule
from dspine_mlx.verify_length.store import load_calibrations
from tests.support.cache import cache_folder

pytestmark = pytest.mark.slow

TEXTS = 64


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Chats of one round each, and one line that is none."""
    lines = [json.dumps({"prompt": f"{i}"}) for i in range(TEXTS)]
    lines[2] = '{"answer": 42}'
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def calibrated(pair: tuple[str, str], prompts: Path, *more: object) -> Result:
    names = ("--model", pair[0], "--draft-model", pair[1], "--prompts", prompts)
    return invoke("calibrate", *names, "--limit", 100, "--temps", "0,1", *more)


def generated(pair: tuple[str, str]) -> tuple[str, Drafter]:
    """The text of a generation with the pair, and its drafter."""
    model, tokenizer, drafter = dspine_mlx.load(*pair)
    assert drafter is not None
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "5"}], add_generation_prompt=True
    )
    return dspine_mlx.generate(model, tokenizer, prompt, drafter, max_tokens=20), drafter


def test_from_prompts_to_the_next_generation(
    scripted: tuple[str, str], prompts: Path, tmp_path: Path
) -> None:
    plot = tmp_path / "plot.png"
    result = calibrated(scripted, prompts, "--plot", plot)
    assert result.exception is None
    assert "prompts.jsonl, line 3 has no messages, prompt" in result.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    (file,) = cache_folder().glob("calibration-*.json")
    assert result.stdout.splitlines()[-1].replace("\n", "") == f"Written to {file}"
    modes = json.loads(file.read_text())["modes"]
    assert modes.keys() == {"greedy", "sampled from 0.9"}
    assert modes["greedy"]["rounds"] == TEXTS - 1  # each reply is one whole round
    for title in ("greedy, 32 held-out rounds", "sampled from 0.9, "):
        assert title in result.stdout
    table = result.stdout.partition("sampled")[0]
    rows = [line.split() for line in table.splitlines()[2:] if line.strip()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5", "6", "mean"]
    assert all(row[1] == "100%" for row in rows[:-1])  # the drafter knows the replies
    _, drafter = generated(scripted)
    assert isinstance(drafter.schedule, Schedule)
    used = drafter.schedule.policies["greedy"].chances.calibration
    assert used == load_calibrations(drafter, file)["greedy"]
    assert used.rounds == TEXTS - 1


def test_the_pool_of_candidates_is_chosen_shown_and_loaded(
    scripted: tuple[str, str], prompts: Path
) -> None:
    """The scripted drafter is a Markov head over fewer tokens than a small pool would have."""
    result = calibrated(scripted, prompts, "--limit", 9, "--temps", 0)
    lines = [line for line in result.stdout.splitlines() if "tokens per round" in line]
    assert [line.partition(":")[0] for line in lines] == [
        "as it is",
        "a table of each slot's 19 best",
    ]
    assert [line.split(": ")[1].split()[0] for line in lines] == ["7.00", "7.00"]
    chosen = result.stdout.partition("Chosen: ")[2].splitlines()[0]
    (file,) = cache_folder().glob("calibration-*.json")
    _, drafter = generated(scripted)
    pool = vars(drafter.config)["candidate_pool"]
    assert json.loads(file.read_text())["reading"] == ({} if pool else {"candidate_pool": 0})
    assert chosen == lines[0 if pool else 1].partition(":")[0]


def test_held_out_prompts_are_measured_and_the_others_fitted(
    scripted: tuple[str, str], prompts: Path, tmp_path: Path
) -> None:
    held_out, out = tmp_path / "held-out.txt", tmp_path / "out.json"
    held_out.write_text("\n".join("abcdefghijklmnopqrstuvwxyz0123456789"))
    result = calibrated(
        scripted, prompts, "--held-out", held_out, "--output", out, "--json", "--temps", "0"
    )
    assert result.exception is None
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["file"] == str(out)
    assert report["modes"]["greedy"]["rounds"] == TEXTS - 1  # and not the held-out ones
    stored = json.loads(out.read_text())["modes"]["greedy"]
    for when in ("before", "after"):
        errors = report["modes"]["greedy"][f"ece_{when}"]
        assert stored[f"ece_{when}"] == pytest.approx(sum(errors) / len(errors))
    assert not cache_folder().exists()  # only where it was asked for


@pytest.mark.parametrize("option", ["--output", "--plot"])
def test_existing_outputs_are_refused(
    option: str, scripted: tuple[str, str], prompts: Path, tmp_path: Path
) -> None:
    path = tmp_path / "there"
    path.write_text("mine")
    result = calibrated(scripted, prompts, option, path)
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == f"{path} exists; name a new file"
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"answer": 42}\n[1]\nno json', "has no prompt that can be used"),
        (None, "there is no suite or file"),
    ],
)
def test_prompts_that_serve_for_nothing_are_refused(
    content: str | None, message: str, scripted: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    result = calibrated(scripted, path)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


def spoiled(data: dict[str, Any], how: str) -> str:
    if how == "another model":
        data["key"]["target"] = "0" * 16
    if how == "another format":
        data["key"]["format"] = "1"
    if how == "no slopes":
        del data["modes"]["greedy"]["slopes"]
    text = json.dumps(data)
    return text[: len(text) // 2] if how == "cut short" else text


@pytest.mark.parametrize("how", ["another model", "another format", "no slopes", "cut short"])
def test_a_calibration_that_does_not_fit_is_one_warning(
    how: str, scripted: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, drafter = generated(scripted)
    path = tmp_path / "few.txt"
    path.write_text("1\n2")
    assert calibrated(scripted, path).exception is None
    (file,) = cache_folder().glob("calibration-*.json")
    file.write_text(spoiled(json.loads(file.read_text()), how))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again, drafter = generated(scripted)
    assert again == text
    assert isinstance(drafter.schedule, Schedule)
    default = uncalibrated(drafter.config.num_proposals)
    assert drafter.schedule.policies["greedy"].chances.calibration == default
    (record,) = caplog.records
    assert "can't be used" in record.message
    assert "confidences stay uncalibrated" in record.message

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dspine_mlx.cli import app
from dspine_mlx.cli.output import new_file
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO
from dspine_mlx.measure import compare
from dspine_mlx.measure.compare import Measurement
from dspine_mlx.target import equal_rows
from tests.support.metal_device import without_metal

pytestmark = pytest.mark.slow


SETTINGS = {"prompts": 1, "max_tokens": 34, "temp": 0.0, "repeat": 1}


def arguments(tmp_path: Path, *more: str) -> list[str]:
    prompts = tmp_path / "p.txt"
    prompts.write_text("Ali has 52 bottle caps.\n")
    return ["bench", "--suite", str(prompts), "--repeat", "1", "-m", "34", *more]


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    compared = f"fixed:3,auto,mlx-lm-draft:{DEMO / 'target'}"
    written = ["--json", str(out), "--plot", str(png)]
    command = arguments(tmp_path, "--depths", "0,5", "--compare", compared, *written)
    result = CliRunner().invoke(app, command)
    assert result.exception is None
    document = json.loads(out.read_text())
    assert document["settings"] == SETTINGS | {"kernels": "auto"}
    assert document["equal_texts"] == [4, 4]
    assert "4 of 4 drafted texts are plain decoding's." in result.stdout
    assert list(document["verify_steps"]["stock"]) == ["1", "2", "4", "8", "16"]
    assert document["promise"] in result.stdout
    results = document["results"]
    assert [r["depth"] for r in results] == [0, 5]
    rows = results[0]["ways"]
    assert [row["way"] for row in rows] == ["plain", *compared.split(",")]
    assert all(row["identical"] == 1 for r in results for row in r["ways"])
    assert [len(row["forks"]) for row in rows] == [0] * 4
    assert all(min(row["first_token_seconds"], row["peak_memory_gb"]) > 0 for row in rows)
    assert [s["way"] for s in results[0]["splits"]] == ["fixed:3", "auto"]
    for row in rows:  # one run of one text: a quotient of two speeds
        quotient = rows[2]["tokens_per_second"] / row["tokens_per_second"]
        assert row["auto_speedup"] == pytest.approx(quotient)
        assert row["tokens_per_second"] > row["call_tokens_per_second"] > 0
    for row in rows:
        assert f"{row['tokens_per_second']:.1f}" in result.stdout
        assert f"{row['acceptance_length']:.2f}" in result.stdout
        assert f"{row['auto_speedup']:.2f}" in result.stdout
        assert f"{row['first_token_seconds'] * 1e3:.0f} ms" in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")
    written_here = {path.name for path in tmp_path.iterdir()} - {"cache"}  # costs, for auto
    assert written_here == {"out.json", "out.png", "p.txt"}


@without_metal
def test_exact_kernels_keep_their_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked on the target at load; here in a short context."""
    monkeypatch.setattr(equal_rows, "DEPTHS", (8,))
    out = tmp_path / "out.json"
    exact = ["--kernels", "exact", "--compare", "fixed:3", "--json", str(out)]
    result = CliRunner().invoke(app, arguments(tmp_path, *exact))
    assert result.exception is None
    document = json.loads(out.read_text())
    assert document["settings"]["kernels"] == document["verify_kernels"]["mode"] == "exact"
    assert document["verify_kernels"]["checked"] == list(range(2, 17))
    assert document["promise"] == (
        "Verify forwards give plain decoding's very logits on this machine, for this target, up to "
        "16 rows, as checked."
    )
    assert document["promise"] in result.stdout
    assert "1 of 1 drafted texts are plain decoding's." in result.stdout
    assert list(document["verify_steps"]["kernels"]) == ["1", "2", "4", "8", "16"]


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_files_are_refused_before_the_work(flag: str, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("mine")
    result = CliRunner().invoke(app, arguments(tmp_path, flag, str(there)))
    assert isinstance(result.exception, InputError)
    assert "exists; name a new file" in str(result.exception)
    nowhere = str(tmp_path / "no" / "file")
    result = CliRunner().invoke(app, arguments(tmp_path, flag, nowhere))
    assert "there is no folder" in str(result.exception)
    assert there.read_text() == "mine"


def test_a_new_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"

    def write(text: str, more: Path) -> None:
        with new_file(path) as part:
            part.write_text(text)
            more.write_text("meanwhile")

    with pytest.raises(FileNotFoundError):  # in the middle of the work
        write("half", tmp_path / "no" / "folder")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="exists"):
        write("new", path)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["meanwhile"]


BAD_ARGUMENTS = {
    "no prompts": (["bench"], "there are no prompts; give --suite"),
    "no runs": (["bench", "--suite", "x", "--repeat", "0"], "--repeat is 0; it must be at least 1"),
    "no tokens": (["bench", "--suite", "x", "-m", "-1"], "--max-tokens is -1; it must be at"),
    "no way": (["bench", "--suite", "x", "--compare", "fast"], "can't compare 'fast'"),
    "depths": (["bench", "--suite", "x", "--depths", "4k"], "--depths is '4k'; it must be whole"),
    "server and depths": (
        ["bench", "--suite", "x", "--concurrency", "2", "--depths", "9"],
        "--concurrency measures the server, without --depths",
    ),
    "nobody asks": (
        ["bench", "--suite", "x", "--concurrency", "2,0"],
        "--concurrency is 2,0; each must be at least 1",
    ),
    "all at once": (
        ["bench", "--suite", "x", "--concurrency", "1,99999999"],
        "--concurrency is 1,99999999; each must be at most 512",
    ),
    "filler without end": (
        ["bench", "--suite", "x", "--depths", "0,999999999"],
        "--depths is 0,999999999; each must be at most 10000000",
    ),
    "digits without end": (["bench", "--suite", "x", "--depths", "9" * 5000], "must be whole"),
    "length without end": (
        ["bench", "--suite", "x", "--compare", f"fixed:{'9' * 5000}"],
        "can't compare 'fixed:9",
    ),
    "runs without end": (
        ["bench", "--suite", "x", "--repeat", str(10**30)],
        "it must have at most nine digits",
    ),
    "rows and prompts": (
        ["bench", "--rows", "--suite", "x"],
        "--rows times products by themselves; only --model and --json go with it",
    ),
    "kernels": (
        ["bench", "--suite", "x", "--kernels", "fast"],
        "kernels is 'fast'; it must be one",
    ),
    "no model": (
        ["bench", "--suite", __file__, "--concurrency", "2", "--model", "./nowhere"],
        "there is no folder ./nowhere",
    ),
    "no target": (
        ["bench", "--suite", __file__, "--concurrency", "2", "--draft-model", "./nowhere"],
        "the drafter ./nowhere needs its target",
    ),
}


@pytest.mark.parametrize(("command", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_are_refused(command: list[str], message: str) -> None:
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


def test_the_depth_at_which_plain_decoding_ends_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The depths before it are kept."""
    measured = compare.measure

    def limited(run: Any, prompt: list[int], max_tokens: int, seed: int) -> Measurement:
        if len(prompt) > 60:
            raise RuntimeError("[malloc] Unable to allocate 99 bytes.")
        return measured(run, prompt, max_tokens, seed)

    monkeypatch.setattr(compare, "measure", limited)
    out = tmp_path / "out.json"
    command = arguments(tmp_path, "--depths", "0,60", "--compare", "plain", "--json", str(out))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert "Plain decoding at depth 60 is out of memory: [malloc] Unable" in result.stderr
    assert [r["depth"] for r in json.loads(out.read_text())["results"]] == [0]

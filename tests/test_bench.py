import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from typer.testing import CliRunner

from dspine_mlx import bench
from dspine_mlx.bench import Comparison, Measurement, Pair, compare, fork, fork_margin, make_way
from dspine_mlx.cli import app
from dspine_mlx.cli.bench_runs import run_all
from dspine_mlx.errors import InputError
from dspine_mlx.sampling import Sampler
from dspine_mlx.suites import load_suite
from tests.tiny import plain_steps, random_prompt, scripted


@pytest.fixture
def pair(model: nn.Module, tokenizer: TokenizerWrapper) -> Pair:
    prompt = random_prompt(6)
    text = prompt + [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=30)]
    return Pair(model, tokenizer, scripted(model, text, "right"), Sampler())


def test_ways_are_interleaved_and_compared_with_plain(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    measured = bench.measure

    def recorded(run: Any, prompt: list[int], max_tokens: int, seed: int) -> Measurement:
        order.append(id(run))
        return measured(run, prompt, max_tokens, seed)

    monkeypatch.setattr(bench, "measure", recorded)
    steps = list(compare(pair, ["fixed:7", "plain"], [random_prompt(6)], max_tokens=20, repeat=3))
    comparison = steps[-1]
    assert comparison.ways == ["plain", "fixed:7"]
    assert order == order[:2] * 3
    assert order[0] != order[1]
    summary = comparison.summary("fixed:7")
    assert summary["identical"] == summary["texts"] == 3
    assert summary["acceptance_length"] == 20 / 3  # 8 + 8 + 4 tokens
    assert comparison.summary("plain")["speedup"] == 1


def test_a_speedup_is_the_median_over_pairs_of_runs() -> None:
    def run(speed: float, tokens: list[int]) -> Measurement:
        return Measurement(0.1, speed, tokens, 2.0, 1.0)

    comparison = Comparison(
        ["plain", "auto"],
        {
            "plain": [[run(10, [1, 2]), run(20, [1, 2])], [run(10, [3])]],
            "auto": [[run(30, [1, 2]), run(20, [1, 2])], [run(20, [4])]],
        },
    )
    summary = comparison.summary("auto")
    assert summary["speedup"] == 2
    assert summary["speedup_range"] == [1, 3]
    assert (summary["identical"], summary["texts"]) == (2, 3)
    assert list(comparison.forks("auto")) == [(1, 0)]


def test_forks_and_margins(pair: Pair) -> None:
    assert fork([1, 2, 3], [1, 2, 4]) == 2
    assert fork([1, 2], [1, 2, 4]) == 2
    prompt = random_prompt(6)
    plain = [token for token, _ in plain_steps(pair.model, pair.tokenizer, prompt, max_tokens=5)]
    other = (plain[3] + 1) % 2048
    assert fork_margin(pair, prompt, plain, 3, plain[3]) == 0
    assert fork_margin(pair, prompt, plain, 3, other) > 0


@pytest.mark.parametrize("way", ["fast", "fixed:", "fixed:x", "auto:3x"])
def test_unknown_ways_are_refused(pair: Pair, way: str) -> None:
    with pytest.raises(InputError, match="ways are plain, auto, fixed:N"):
        make_way(way, pair)


def test_suites_skip_bad_lines_and_say_so(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a"},
        {"question": "b"},
        {"turns": ["c", "later"]},
        {"messages": [{"role": "user", "content": "d"}, {"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"other": 1},
        [1],
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join([*map(json.dumps, lines), "{", ""]))
    warnings: list[str] = []
    suite = load_suite(str(file), 10, warnings.append)
    assert [messages[-1]["content"] for messages in suite] == ["a", "b", "c", "d"]
    assert [warning.split()[2] for warning in warnings] == ["5", "6", "7", "8"]
    plain = tmp_path / "prompts.txt"
    plain.write_text("one\n\ntwo\nthree\n")
    assert [m[0]["content"] for m in load_suite(str(plain), 2, warnings.append)] == ["one", "two"]
    with pytest.raises(InputError, match="there is no suite or file nowhere"):
        load_suite("nowhere", 1, warnings.append)
    plain.write_text("\n")
    with pytest.raises(InputError, match="no prompt that can be used"):
        load_suite(str(plain), 1, warnings.append)


def test_ctrl_c_keeps_what_was_measured() -> None:
    first = Comparison(["plain"])

    def steps() -> Iterator[Comparison]:
        yield first
        raise KeyboardInterrupt

    assert run_all(steps(), "depth 0", 3) == (first, False)
    assert run_all(iter([first]), "depth 0", 1) == (first, True)


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    prompts, out, png = (tmp_path / name for name in ("p.txt", "out.json", "out.png"))
    prompts.write_text("Ali has 52 bottle caps.\n")
    arguments = ["bench", "--suite", str(prompts), "--repeat", "1", "-m", "8", "--depths", "0,5"]
    arguments += ["--compare", "fixed:3", "--json", str(out), "--plot", str(png)]
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None
    results = json.loads(out.read_text())
    assert [r["depth"] for r in results] == [0, 5]
    assert [way["way"] for way in results[0]["ways"]] == ["plain", "fixed:3"]
    assert all(way["identical"] == 1 for r in results for way in r["ways"])
    assert png.read_bytes().startswith(b"\x89PNG")
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, InputError)
    assert "exists; name a new file" in str(again.exception)

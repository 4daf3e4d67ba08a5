"""Requests at once: the arithmetic without a server, the requests with one."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dspine_mlx.cli import app
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO
from dspine_mlx.measure import server_load
from dspine_mlx.measure.server_load import (
    Batch,
    Reply,
    Request,
    ServerComparison,
    ServerFailed,
    ask,
    check_mode,
    compare_modes,
    serving,
    verdict,
)
from tests.support.serving import Server

pytestmark = pytest.mark.slow

ASKED = Request(port=0, max_tokens=9, temperature=0.0)


def run_batch(seconds: float, *first: float, path: str = "batched") -> Batch:
    return Batch(seconds, [Reply(f, seconds, 40, path) for f in first])


def test_speeds_are_of_all_requests_together() -> None:
    runs = {
        "plain": [run_batch(2, 0.1, 0.2), run_batch(3, 0.1, 0.4)],
        "auto": [
            run_batch(4, 0.1, 2.0, path="speculative"),
            run_batch(1, 0.3, 1.0, path="speculative"),
        ],
    }
    row = ServerComparison(["plain", "auto"], runs).summary("auto")
    assert row["tokens_per_second"] == (80 / 4 + 80 / 1) / 2
    assert row["speedup_range"] == [2 / 4, 3 / 1]
    assert row["speedup"] == (2 / 4 + 3 / 1) / 2
    assert row["first_text_seconds"] == pytest.approx(0.65)
    assert row["last_first_text_seconds"] == 1.5
    assert row["slowest_seconds"] == 2.5
    assert row["paths"] == {"speculative": 4}
    assert row["verdict"].startswith("no difference can be told: 1.75 times")


def test_drafting_pays_if_each_turn_says_so() -> None:
    assert verdict([1.1, 1.2, 1.6]).startswith("drafting pays: 1.20 times")
    assert verdict([0.8, 0.9]).startswith("drafting loses: 0.85 times")
    assert "too short" in verdict([])


def test_short_replies_have_no_ratio() -> None:
    short = Batch(1, [Reply(0.1, 1, 31, "batched"), Reply(0.1, 1, 32, "batched")])
    runs = {"plain": [run_batch(1, 0.1, 0.1)], "auto": [short]}
    row = ServerComparison(["plain", "auto"], runs).summary("auto")
    assert (row["speedup"], row["speedup_range"]) == (None, None)
    assert (row["texts"], row["texts_in_ratios"]) == (2, 0)


def test_modes_take_turns_and_share_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, list[str]]] = []

    def recorded(asked: Request, mode: str, prompts: list[Any]) -> Batch:
        sent.append((mode, [prompt[0]["content"] for prompt in prompts]))
        if mode == "fixed:3" and len(sent) > 5:
            raise ServerFailed("the server answered 500: [malloc] Unable to allocate")
        return run_batch(1, 0.1)

    monkeypatch.setattr(server_load, "run_batch", recorded)
    prompts = [[{"role": "user", "content": text}] for text in "ab"]
    steps = list(compare_modes(ASKED, ["auto", "plain", "fixed:3"], prompts, requests=3, repeat=2))
    assert [mode for mode, _ in sent] == ["plain", "auto", "fixed:3"] * 2 + ["plain", "auto"]
    assert {tuple(texts) for _, texts in sent} == {("a", "b", "a")}
    assert steps[-1].modes == ["plain", "auto"]
    assert list(steps[-1].dropped) == ["fixed:3"]
    assert len(steps[-1].runs["auto"]) == 2


def test_requests_are_decoded_as_asked(server: Server) -> None:
    """The server's pair replies in tokens that the drafter knows; verify length 0 is plain."""
    asked = Request(server.port, 12, 0.0)
    messages = [{"role": "user", "content": "Hello"}]
    plain, drafted = ask(asked, "plain", messages), ask(asked, "fixed:3", messages)
    assert (plain.path, drafted.path) == ("batched", "speculative")
    assert plain.tokens == drafted.tokens > 0
    assert min(plain.first_text, drafted.first_text) > 0
    with pytest.raises(ServerFailed, match="the server answered 400: .*max_tokens"):
        ask(Request(server.port, -3, 0.0), "plain", messages)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerFailed, match="did not start: .*there is no folder"),
        serving(str(tmp_path / "nowhere"), None, 2),
    ):
        pass


def test_the_server_gets_its_kernels() -> None:
    with (
        pytest.raises(ServerFailed, match="did not start: .*--kernels: invalid choice: 'fast'"),
        serving(str(DEMO / "target"), None, 2, kernels="fast"),
    ):
        pass


def test_the_server_knows_no_mlx_lm_draft_models() -> None:
    check_mode("plain")
    check_mode("fixed:3")
    with pytest.raises(InputError, match="the server has no mlx-lm-draft:m; with --concurrency"):
        check_mode("mlx-lm-draft:m")


def test_the_command_measures_the_shipped_pair(tmp_path: Path) -> None:
    prompts, out, plot = tmp_path / "p.txt", tmp_path / "out.json", tmp_path / "load.png"
    prompts.write_text("Ali has 52 bottle caps.\n")
    command = ["bench", "--suite", str(prompts), "--concurrency", "1,2", "--repeat", "1", "-m", "6"]
    command += ["--compare", "fixed:3", "--json", str(out), "--plot", str(plot)]
    result = CliRunner().invoke(app, command)
    assert result.exception is None
    one, two = json.loads(out.read_text())["results"]
    assert (one["requests"], two["requests"]) == (1, 2)
    assert {row["way"]: row["paths"] for row in one["ways"]} == {
        "plain": {"batched": 1},
        "fixed:3": {"speculative": 1},
    }
    assert {row["way"]: sum(row["paths"].values()) for row in two["ways"]} == {
        "plain": 2,
        "fixed:3": 2,
    }
    assert "2 requests at once through dspine-mlx serve" in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")

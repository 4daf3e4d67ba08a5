"""What a terminal shows, at several widths and in colour, and what a pipe gets."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dspine_mlx.cli.screen import print_bars, print_table, split
from dspine_mlx.load import DEMO
from tests.support import forked
from tests.support.terminal import Terminal, on_terminal, plain

pytestmark = pytest.mark.slow

PROMPT = "Tom has 4 apples and buys 3 more. How many apples does he have?"
SAY = ("generate", "-p", PROMPT, "-m", "40", "--verify-length", "5")
GREEN, UNDERLINED = "\x1b[32m", "\x1b[4m"
WIDTHS = [60, 80, 120]


def figures(text: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", text)


def fits(text: str, columns: int) -> bool:
    return all(len(line.rstrip()) <= columns for line in text.splitlines())


def piped(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run("-m", "dspine_mlx.cli", *arguments, check=True)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What SAY says of its text."""
    return json.loads(piped(*SAY, "--json").stdout)


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What inspect says of the shipped drafter."""
    return json.loads(piped("inspect", str(DEMO / "drafter"), "--json").stdout)


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_text_ends_with_five_lines_and_tables_come_after_it(
    columns: int, report: dict[str, Any]
) -> None:
    status, output = on_terminal(*SAY, "--explain", "--stats", columns=columns)
    assert status == 0
    text, _, rest = plain(output).partition("accepted  rounds")
    assert rest
    assert "…" not in output
    assert report["text"] in text
    last = plain(output).rstrip().splitlines()[-4:]
    names = [line.split()[0] for line in last]
    assert names == ["prompt", "generation", "acceptance", "memory"]
    assert fits("\n".join(last), columns)
    found = figures(last[2])
    wanted = (f"{report['acceptance_length']:.2f}", report["accepted"], report["drafted"])
    assert found == list(map(str, wanted))
    assert figures(last[1])[0] == str(report["generation_tokens"])
    counts = rest.partition("offered  rounds")[0]
    shown = {n: int(figures(line)[1]) for line in counts.splitlines() if (n := line[:8].strip())}
    assert {n: c for n, c in shown.items() if c} == report["accepted_histogram"]
    assert fits(counts, columns)


def test_explain_is_a_table_after_the_text() -> None:
    auto = ("generate", "-p", PROMPT, "-m", "24", "--no-profile", "--explain", "--quiet")
    result = piped(*auto)
    assert "survival" not in result.stdout
    lines = result.stderr.splitlines()
    assert any(line.split() == ["token", "what", "happened"] for line in lines)


def test_without_stats_there_is_no_histogram() -> None:
    result = piped(*SAY)
    assert "rounds\n" not in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 6  # the pair that ships, and five lines


@pytest.mark.parametrize(
    ("environment", "style"),
    [({}, GREEN), ({"NO_COLOR": "1"}, UNDERLINED), ({"TERM": "dumb"}, None)],
    ids=["colours", "NO_COLOR", "dumb"],
)
def test_drafted_tokens_are_marked_and_explained(
    environment: dict[str, str], style: str | None, report: dict[str, Any]
) -> None:
    status, output = on_terminal(
        *SAY, "--show-accepted", "--quiet", columns=80, environment=environment
    )
    assert status == 0
    assert report["text"] in plain(output)
    legend = "drafted and accepted; the rest is the target's own" in plain(output)
    assert legend == (style is not None)
    for code in (GREEN, UNDERLINED):
        assert (code in output) == (code == style)


def test_a_pipe_gets_the_bare_text_unless_colours_are_forced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = piped(*SAY, "--quiet").stdout
    marked = (*SAY, "--show-accepted", "--quiet")
    assert piped(*marked).stdout == bare
    monkeypatch.setenv("FORCE_COLOR", "1")
    forced = piped(*marked).stdout
    assert GREEN in forced
    assert plain(forced) == bare


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    prompts = tmp_path_factory.mktemp("bench") / "p.txt"
    prompts.write_text("Ali has 52 bottle caps.\n")
    return ("bench", "--suite", str(prompts), "--repeat", "1", "-m", "34", "--compare", "fixed:3")


@pytest.mark.parametrize("columns", [60, 120])
def test_bench_shows_every_figure_whole(
    columns: int, bench: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    status, output = on_terminal(*bench, "--json", str(out), columns=columns)
    assert status == 0
    assert "…" not in output
    shown = plain(output)[plain(output).index("0 tokens of context") :]
    assert fits(shown, columns)
    found = figures(shown)
    rows: list[dict[str, Any]] = json.loads(out.read_text())["results"][0]["ways"]
    for row in rows:
        for name in ("tokens_per_second", "call_tokens_per_second"):
            assert f"{row[name]:.1f}" in found
        for value in (row["speedup"], *row["speedup_range"], row["peak_memory_gb"]):
            assert f"{value:.2f}" in found


@pytest.mark.parametrize("columns", WIDTHS)
def test_inspect_shows_every_figure_whole(columns: int, facts: dict[str, Any]) -> None:
    status, output = on_terminal("inspect", str(DEMO / "drafter"), columns=columns)
    assert status == 0
    assert fits(plain(output), columns)
    for name in ("parameters", "bytes", "mask_token_id", "proposals"):
        assert f"{facts[name]:,}" in plain(output).split()


@pytest.mark.parametrize("columns", ["0", "00", "-5", "", "wide"])
def test_a_width_that_cant_be_one_is_ignored(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert "dspine" in piped("inspect", str(DEMO / "drafter")).stdout
    assert "generate" in piped("--help").stdout


@pytest.mark.parametrize("width", [20, 60, 61, 80, 120, 200])
def test_tables_are_split_between_columns(width: int) -> None:
    names = ["", *(f"column {i}" for i in range(9))]
    rows = [[f"row {r}", *(f"{r}{i}.{i:05}" for i in range(9))] for r in range(2)]
    screen = Console(width=width, record=True, highlight=False)
    with screen.capture() as capture:
        print_table(screen, names, rows)
    text = capture.get()
    assert fits(text, width)
    assert sorted(figures(text.replace("row 0", "").replace("row 1", ""))) == sorted(
        [*(cell for row in rows for cell in row[1:]), *map(str, range(9))]
    )


def test_columns_that_fit_stay_together() -> None:
    assert split([5, 10, 10, 10], 35) == [[1, 2, 3]]
    assert split([5, 10, 10, 10], 34) == [[1, 2], [3]]
    assert split([50, 60, 10], 40) == [[1], [2]]


def test_bars_are_proportional_and_leave_room_for_the_figures() -> None:
    for width, longest in ((100, 40), (30, 30 - len("0  rounds    "))):
        screen = Console(width=width, highlight=False)
        with screen.capture() as capture:
            print_bars(screen, ("n", "rounds"), [("0", 10), ("1", 0), ("2", 5)])
        lines = [line.split() for line in capture.get().splitlines()[1:]]
        assert [line[:2] for line in lines] == [["0", "10"], ["1", "0"], ["2", "5"]]
        bars = [len(line[2]) if len(line) > 2 else 0 for line in lines]
        assert bars[1] == 0
        assert bars[0] == longest
        assert bars[2] == round(bars[0] / 2)


def test_ctrl_c_ends_a_text_with_its_figures(tmp_path: Path) -> None:
    endless = ("--temp", "50", "--seed", "1", "-m", "-1", "--verify-length", "0")
    with Terminal("generate", "-p", PROMPT, *endless, home=tmp_path) as terminal:
        terminal.expect("see --model.")
        before = len(terminal.raw)
        while len(terminal.raw) < before + 600:
            assert terminal.read(30)
        terminal.send("\x03")
        shown = terminal.expect("GB at most")
        assert re.search(r"\nprompt +\d+ tokens", shown)
        assert re.search(r"generation +\d+ tokens", shown)
        assert terminal.ended() == 130


def test_work_is_announced_on_a_terminal_only(tmp_path: Path) -> None:
    command = ("generate", "-p", PROMPT, "-m", "4")
    environment = {"HOME": str(tmp_path)}
    _, output = on_terminal(*command, columns=80, environment=environment)
    shown = plain(output)
    assert "Loading the model ..." in shown
    assert "Measuring what steps cost here, once per pair ..." in shown
    result = piped(*command)
    assert "..." not in result.stderr

"""bench --live: two texts beside each other, at one time, and a verdict that fits the figures."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.style import Style

from dspine_mlx.cli.bench_live import Side, columns, report, same, speedup, verdict
from dspine_mlx.measure.clock import LEAST_TOKENS
from dspine_mlx.measure.compare import AUTO, PLAIN
from tests.support import forked
from tests.support.terminal import on_terminal, plain

LIVE = ("bench", "--live", "-m", "40")


class Now:
    """A clock's time, set by hand."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def side(mode: str, per_token: float, tokens: int, drafted: bool = False) -> Side:
    """A mode that took so many seconds per token; its texts are numbers."""
    made, now = Side(mode), Now()
    made.clock.now = now
    made.clock.__post_init__()
    for n in range(tokens):
        now.seconds += per_token
        made.clock.token()
        made.tokens.append(n)
        made.pieces.append((made.seconds, f"<{n}>", drafted))
    return made


def screen(width: int, height: int = 50) -> Console:
    return Console(width=width, height=height, force_terminal=True, highlight=False)


def drawn(console: Console, sides: list[Side]) -> str:
    with console.capture() as capture:
        console.print(columns(console, sides))
    return plain(capture.get())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_plain_text_is_shown_as_far_as_it_had_come_by_then(width: int) -> None:
    slow, fast = side(PLAIN, 0.2, 20), side(AUTO, 0.1, 9, drafted=True)
    shown = drawn(screen(width), [slow, fast])
    assert all(len(line) <= width for line in shown.splitlines())
    left = "".join(line[: width // 2] for line in shown.splitlines())
    right = "".join(line[width // 2 :] for line in shown.splitlines())
    assert re.findall(r"<\d+>", re.sub(r"[\s│]", "", left)) == [f"<{n}>" for n in range(4)]  # .9 s
    assert re.findall(r"<\d+>", re.sub(r"[\s│]", "", right)) == [f"<{n}>" for n in range(9)]
    assert "4.4 tokens/s" in left
    assert "10.0 tokens/s" in right


def test_the_second_waits_while_the_first_runs() -> None:
    shown = drawn(screen(80), [side(PLAIN, 0.2, 5), Side(AUTO)])
    assert "5.0 tokens/s" in shown
    assert "waits for its turn" in shown


def test_a_long_text_shows_its_end() -> None:
    shown = drawn(screen(60, height=20), [side(PLAIN, 0.1, 400), Side(AUTO)])
    assert len(shown.splitlines()) <= 20 - 4
    assert "<399>" in re.sub(r"[\s│]", "", shown)
    assert "<0>" not in shown


def test_drafted_tokens_are_marked() -> None:
    tokens, text = side(AUTO, 0.1, 3, drafted=True).until(1.0, Style(color="green"))
    assert tokens == 3
    assert [span.style for span in text.spans] == [Style(color="green")] * 3
    assert side(PLAIN, 0.1, 3).until(0.15, Style(color="green"))[1].plain == "<0>"


def test_the_ratio_is_of_texts_long_enough() -> None:
    slow = side(PLAIN, 0.2, LEAST_TOKENS)
    assert speedup(slow, side(AUTO, 0.1, LEAST_TOKENS)) == pytest.approx(2)
    assert speedup(slow, side(AUTO, 0.1, LEAST_TOKENS - 1)) is None
    assert same(slow, side(AUTO, 0.1, 3))  # as far as it was decoded
    other = side(AUTO, 0.1, 3)
    other.tokens[1] = 9
    assert not same(slow, other)


@pytest.mark.parametrize(
    ("ratio", "words"), [(2.346, "pays here: 2.35"), (0.9, "does not pay here: 0.90"), (1.02, "no")]
)
def test_the_verdict_is_what_was_measured(ratio: float, words: str) -> None:
    assert words in verdict(ratio)


def test_too_short_a_text_gets_no_verdict() -> None:
    console = screen(80)
    modes = [side(PLAIN, 0.2, 4).figures(), side(AUTO, 0.1, 4).figures()]
    with console.capture() as capture:
        report(console, {"ways": modes, "speedup": None, "identical": True})
    shown = plain(capture.get())
    assert "5.0 tokens/s, 4 tokens in 0.80 s" in shown
    assert f"fewer than {LEAST_TOKENS} tokens; raise --max-tokens" in shown


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 120])
def test_on_a_terminal(width: int) -> None:
    status, output = on_terminal(*LIVE, columns=width)
    assert status == 0
    shown = plain(output)
    for word in ("plain decoding", "drafted", "waits for its turn", "verdict", "the same text"):
        assert word in shown
    frames = [line for line in shown.splitlines() if line.startswith(("│", "╭", "╰"))]
    assert {len(line) for line in frames} == {width}
    assert "\x1b[32m" in output


@pytest.mark.slow
def test_piped_and_as_json(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = forked.run("-m", "dspine_mlx.cli", *LIVE, "--json", str(out), check=True)
    lines = result.stdout.splitlines()
    assert [line[:15].strip() for line in lines] == ["plain decoding", "drafted", "verdict"]
    document = json.loads(out.read_text())["results"][0]
    first, second = document["ways"]
    assert [first["way"], second["way"]] == [PLAIN, AUTO]
    assert document["identical"] is True
    ratio = second["tokens_per_second"] / first["tokens_per_second"]
    assert document["speedup"] == pytest.approx(ratio)
    assert f"{ratio:.2f} times plain decoding's speed" in lines[-1]

"""The picture in README.md shows what the command really prints."""

import re
import sys
from xml.etree import ElementTree

import mlx_lm
import pytest

from dspine_mlx.cli.prompting import apply_template, messages_of
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO
from tests.bench.recording import AFTER, BEFORE, LASTS, PROMPT, Piece, draw, in_order, run
from tests.support.documentation import ROOT

GREEN = "#98e024"
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{SVG}text"))


def lines(svg: str) -> list[str]:
    """The lines of the terminal, each character in its column."""
    rows = dict[float, str]()
    for text in texts(svg):
        y, column = float(text.attrib["y"]), round((float(text.attrib["x"]) - 16) / 8.4)
        rows[y] = rows.get(y, "").ljust(column) + (text.text or "")
    return [rows[y] for y in sorted(rows)]


def delay(text: ElementTree.Element) -> float:
    found = re.search(r"animation-delay: ([\d.]+)s", text.attrib.get("style", ""))
    return float(found[1]) if found else 0.0


def test_the_picture_shows_the_text_of_the_pair_that_ships() -> None:
    picture = (ROOT / "docs" / "images" / "generate.svg").read_text(encoding="utf-8")
    model, tokenizer = mlx_lm.load(str(DEMO / "target"))
    prompt = apply_template(tokenizer, messages_of(PROMPT, None, None), {})
    text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=256)
    shown = lines(picture)
    first = shown.index(text.splitlines()[0])
    assert shown[first : first + len(text.splitlines())] == text.splitlines()
    assert "".join(shown).count(PROMPT[:40]) == 1
    assert any(piece.attrib.get("fill") == GREEN for piece in texts(picture))
    assert (
        re.findall(r"(?:href|src|url)\W", picture) == []
    )  # shown as an image, it can load nothing


def test_pieces_appear_as_they_came() -> None:
    pieces = [
        Piece(3.0, "a note\n", True),
        Piece(10.0, "\x1b[32mgreen\x1b[0m <one>", False),
        Piece(10.2, "\x1b[3", False),  # escapes may be torn
        Piece(10.2, "2m and\x1b[0m\r\n", False),
        Piece(11.0, "two\r\n", False),
        Piece(11.1, "summary", True),
    ]
    svg = draw("run it", pieces)
    assert lines(svg)[1:] == ["$ run it", "a note", "green <one> and", "two", "summary"]
    at = {(text.text or "").strip(): (delay(text), text.attrib.get("fill")) for text in texts(svg)}
    assert at["a note"] == (0, None)
    assert at["green"] == (BEFORE, GREEN)
    assert at["<one>"] == (BEFORE, None)
    assert at["and"] == (BEFORE + 0.2 * LASTS, GREEN)
    assert at["two"] == (BEFORE + LASTS, None)
    assert at["summary"] == (BEFORE + LASTS + AFTER, None)
    assert f"slowed down {LASTS:.0f} times" in svg


def test_errors_wait_for_the_end_of_a_line() -> None:
    note, text = Piece(1.0, "note\n", True), Piece(2.0, "text", False)
    errors = [Piece(3.0, "one\n", True), Piece(3.1, "two\n", True)]
    end = Piece(3.2, "\x1b[32m5\r\n\x1b[0m", False)
    assert in_order([note, text, *errors, end]) == [note, text, end, *errors]
    assert in_order([text, end, *errors]) == [text, end, *errors]
    assert in_order([text, *errors]) == [text, *errors]


def test_a_command_runs_in_a_terminal() -> None:
    program = (
        "import sys; print('note', file=sys.stderr, flush=True); "
        "print(sys.stdout.isatty(), 'é', flush=True); print(sys.stderr.isatty(), file=sys.stderr)"
    )
    pieces = run([sys.executable, "-c", program])
    assert "".join(p.text for p in pieces if p.error) == "note\nFalse\n"
    assert "".join(p.text for p in pieces if not p.error) == "True é\r\n"
    seconds = [p.seconds for p in pieces]
    assert seconds == sorted(seconds)
    with pytest.raises(InputError, match="no such"):
        run([sys.executable, "-c", "raise SystemExit('no such')"])

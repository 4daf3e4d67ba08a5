"""The picture of README.md: a terminal in which `dspine-mlx generate --show-accepted` runs.

    python -m tests.bench.recording docs/images/generate.svg

runs the command in a pseudo-terminal, offline, with the pair that ships, and notes when each piece
of its output arrives. The animated SVG plays the text once, slowed down to LASTS seconds so that
rounds can be told apart, and then shows the summary. A viewer without animation shows the end.
"""

import os
import pty
import re
import selectors
import shlex
import subprocess
import sys
import time
from codecs import getincrementaldecoder
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import MONOKAI as THEME
from rich.text import Text

from dspine_mlx.errors import InputError

PROMPT = (
    "Tom has 15 toys. His sister has 5 fewer toys than he has. How many toys do they have together?"
)
COLUMNS, LASTS = 100, 5.0  # of the terminal; seconds from the first token to the last
BEFORE, AFTER = 0.5, 0.5  # seconds before the first token, and before the summary
CELL, LINE, SIZE, MARGIN, BAR = 8.4, 20, 14, 16, 34  # pixels
ESCAPES = re.compile(r"\x1b\[?[0-9;?]*[A-Za-z]?")
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
STYLES = """\
text { font: %dpx %s; white-space: pre }
.later { animation: appear 1ms both }
@keyframes appear { from { opacity: 0 } to { opacity: 1 } }
@media (prefers-reduced-motion: reduce) { .later { animation: none } }"""


@dataclass(frozen=True)
class Piece:
    """Output that arrived at once."""

    seconds: float
    text: str
    error: bool  # on standard error: notes and the summary


def run(words: list[str]) -> list[Piece]:
    """What a command prints, in order; its output goes to a terminal, its errors to a pipe."""
    reader, terminal = pty.openpty()
    settings = os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    pieces = []
    with (
        subprocess.Popen(words, stdout=terminal, stderr=subprocess.PIPE, env=settings) as process,
        selectors.DefaultSelector() as selector,
    ):
        os.close(terminal)
        assert process.stderr is not None
        for file in (reader, process.stderr.fileno()):
            selector.register(file, selectors.EVENT_READ, getincrementaldecoder("utf-8")())
        while selector.get_map():
            for key, _ in selector.select():
                data = read(key.fd)
                text = key.data.decode(data, final=not data)
                pieces.append(Piece(time.perf_counter(), text, key.fd != reader))
                if not data:
                    selector.unregister(key.fd)
    os.close(reader)
    if process.returncode:
        raise InputError(f"{words[0]} failed: " + "".join(piece.text for piece in pieces))
    return pieces


def in_order(pieces: list[Piece]) -> list[Piece]:
    """A terminal passes on late what it gets: errors wait for the end of a line that has begun."""
    ordered, waiting, inside = list[Piece](), list[Piece](), False
    for piece in pieces:
        if piece.error and inside:
            waiting.append(piece)
        else:
            ordered.append(piece)
        if not piece.error:
            inside = not ESCAPES.sub("", piece.text).endswith("\n")
            if not inside:
                ordered, waiting = ordered + waiting, []
    return ordered + waiting


def read(file: int) -> bytes:
    try:
        return os.read(file, 1 << 16)
    except OSError:  # Linux says so when the other end of a terminal is closed
        return b""


def screen(pieces: list[Piece]) -> list[list[Segment]]:
    """Lines of the terminal at the end; a segment's style has the time it appears at."""
    output = "".join(piece.text for piece in pieces).replace("\r\n", "\n").rstrip()
    text = Text.from_ansi(output)  # the styles a terminal would show
    shown, end = "", 0
    for piece in pieces:
        shown += piece.text
        start, end = end, len(ESCAPES.sub("", shown).replace("\r\n", "\n"))
        text.stylize(Style(meta={"at": piece.seconds}), start, end)
    return wrapped(text)


def wrapped(text: Text) -> list[list[Segment]]:
    console = Console(width=COLUMNS, color_system="truecolor", force_terminal=True)
    return console.render_lines(text, pad=False)


def moments(pieces: list[Piece]) -> tuple[float, dict[float, float]]:
    """How many times slower the text comes in the picture, and when each piece appears in it."""
    text = [piece.seconds for piece in pieces if not piece.error]
    first, last = text[0], text[-1]
    slower = LASTS / max(last - first, 1e-3)
    appear = {t: BEFORE + slower * (t - first) for t in text}
    for t in (piece.seconds for piece in pieces if piece.error):
        appear[t] = 0 if t < first else BEFORE + LASTS + AFTER
    return slower, appear


def draw(command: str, pieces: list[Piece]) -> str:
    """An SVG of a terminal with a command and its output."""
    slower, at = moments(pieces)
    lines = [*wrapped(Text.assemble(("$ ", "dim"), command)), *screen(pieces)]
    width = round(COLUMNS * CELL + 2 * MARGIN)
    height = BAR + len(lines) * LINE + MARGIN
    body = [text for y, line in enumerate(lines) for text in draw_line(y, line, at)]
    foreground, background = THEME.foreground_color.hex, THEME.background_color.hex
    dots = [
        f'<circle cx="{MARGIN + 4 + 18 * i}" cy="{BAR // 2}" r="5" fill="{color}"/>'
        for i, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(command)}</title>",
            f"<style>{STYLES % (SIZE, FONTS)}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{background}"/>',
            *dots,
            f'<g fill="{foreground}">',
            f'<text x="{width - MARGIN}" y="{BAR // 2 + 5}" text-anchor="end" opacity="0.6">'
            f"slowed down {slower:.0f} times</text>",
            *body,
            "</g>",
            "</svg>\n",
        ]
    )


def draw_line(y: int, line: list[Segment], at: dict[float, float]) -> list[str]:
    """A `text` for each segment, placed by its column."""
    starts = [0]
    for segment in line:
        starts.append(starts[-1] + segment.cell_length)
    return [
        draw_segment(segment, start, end, y, at)
        for segment, (start, end) in zip(line, pairwise(starts), strict=True)
        if segment.text.strip()
    ]


def draw_segment(segment: Segment, start: int, end: int, y: int, at: dict[float, float]) -> str:
    style = segment.style or Style()
    marks = {
        "x": f"{MARGIN + start * CELL:.1f}",
        "y": f"{BAR + y * LINE + SIZE}",
        "textLength": f"{(end - start) * CELL:.1f}",
    }
    if style.color is not None and not style.color.is_default:
        marks["fill"] = style.color.get_truecolor(THEME).hex
    if style.bold:
        marks["font-weight"] = "bold"
    if style.dim:
        marks["opacity"] = "0.6"
    if "at" in style.meta:
        marks |= {"class": "later", "style": f"animation-delay: {at[style.meta['at']]:.2f}s"}
    attributes = " ".join(f'{name}="{value}"' for name, value in marks.items())
    return f"<text {attributes}>{escape(segment.text)}</text>"


def main(picture: Annotated[Path, typer.Argument(help="SVG to write.")]) -> None:
    if picture.exists():
        raise InputError(f"{picture} exists; remove it or name a new file")
    words = ["dspine-mlx", "generate", "--show-accepted", "-p", PROMPT]
    program = str(Path(sys.executable).with_name(words[0]))
    pieces = in_order([piece for piece in run([program, *words[1:]]) if piece.text])
    picture.write_text(draw(shlex.join(words), pieces), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

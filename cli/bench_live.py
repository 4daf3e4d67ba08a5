"""dspine-mlx bench --live: plain decoding and drafting side by side on one text."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import typer
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from dspine_mlx.cli.screen import console
from dspine_mlx.cli.summary import drafted_style
from dspine_mlx.measure.clock import LEAST_TOKENS, Clock
from dspine_mlx.measure.compare import AUTO, PLAIN, Models, divergence, make_run, untimed
from dspine_mlx.round.statistics import GenerationResponse

TITLES = {PLAIN: "plain decoding", AUTO: "drafted"}
FRAMES = 8  # per second: drawing takes time from decoding
AROUND = 8  # lines of the screen that are not text: frames, and what is printed below
EVEN = 0.03  # difference of speeds that one text does not tell
WARM_UP = 8  # tokens decoded before the clock runs


@dataclass
class Side:
    """One mode's text as it comes. It is timed alone: the other one runs before or after it."""

    mode: str
    clock: Clock = field(default_factory=Clock)
    tokens: list[int] = field(default_factory=list)
    pieces: list[tuple[float, str, bool]] = field(default_factory=list)  # seconds, text, drafted
    last: Any = None

    @property
    def seconds(self) -> float:
        """Since the prompt was read."""
        return self.clock.ended - self.clock.prefilled

    def decode(self, pair: Models, prompt: list[int], max_tokens: int) -> None:
        run = make_run(self.mode, pair)
        for _ in run(prompt, WARM_UP, untimed):
            pass
        self.clock = Clock()
        with closing(run(prompt, max_tokens, self.clock.progress)) as responses:  # type: ignore[type-var]
            for self.last in responses:
                self.clock.token()
                self.tokens.append(self.last.token)
                self.pieces.append((self.seconds, self.last.text, self.last.from_draft))

    def until(self, seconds: float, style: Style) -> tuple[int, Text]:
        """The tokens and the text that had come by then."""
        come = [piece for piece in self.pieces.copy() if piece[0] <= seconds]
        text = Text(overflow="fold")
        for _, shown, drafted in come:
            text.append(shown, style if drafted else None)
        return len(come), text

    def figures(self) -> dict[str, Any]:
        """As a row of bench's --json."""
        row: dict[str, Any] = {
            "way": self.mode,
            "tokens": len(self.tokens),
            "seconds": self.seconds,
            "tokens_per_second": self.clock.decoding_speed,
        }
        if isinstance(self.last, GenerationResponse):
            statistics = self.last.statistics
            row["acceptance_length"] = statistics.acceptance_length
            row["verdict"] = statistics.verdict
        return row


def live(pair: Models, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Decode the prompt plainly, then drafted beside what plain decoding had at the same time."""
    screen, sides = console(), [Side(PLAIN), Side(AUTO)]
    try:
        with shown(screen, sides):
            for side in sides:
                side.decode(pair, prompt, max_tokens)
    except KeyboardInterrupt:
        typer.echo("Interrupted; these are the figures so far.", err=True)
    done = [side for side in sides if side.tokens]
    result: dict[str, Any] = {"ways": [side.figures() for side in done], "speedup": None}
    if len(done) == len(sides):
        result["speedup"] = speedup(*sides)
        result["identical"] = same(*sides) if pair.sampler.temp == 0 else None
    report(screen, result)
    return result


def speedup(plain: Side, drafted: Side) -> float | None:
    """None where the texts are too short for a ratio."""
    if min(len(plain.tokens), len(drafted.tokens)) < LEAST_TOKENS:
        return None
    return drafted.clock.decoding_speed / plain.clock.decoding_speed


def same(plain: Side, drafted: Side) -> bool:
    """Whether the texts agree, as far as both were decoded."""
    shorter = min(len(plain.tokens), len(drafted.tokens))
    return divergence(plain.tokens, drafted.tokens) == shorter


# ---- on the screen


@contextmanager
def shown(screen: Console, sides: list[Side]) -> Iterator[None]:
    """Both texts in columns, on a terminal."""
    if not screen.is_terminal:
        yield
        return
    with Live(
        console=screen,
        get_renderable=lambda: columns(screen, sides),
        refresh_per_second=FRAMES,
        vertical_overflow="crop",
    ):
        yield


def columns(screen: Console, sides: list[Side]) -> Table:
    """The sides at one time: that of the newest one, which runs."""
    now = next((side.seconds for side in reversed(sides) if side.tokens), 0.0)
    most, width = max(3, screen.height - AROUND), screen.width // len(sides) - 4
    table, cells = Table.grid(expand=True), []
    for side in sides:
        table.add_column(ratio=1)
        tokens, text = side.until(now, drafted_style(screen))
        speed = f"{tokens / now:.1f} tokens/s" if tokens else "waits for its turn"
        cells.append((Text("\n").join(text.wrap(screen, width)[-most:]), side.mode, speed))
    height = 2 + max(text.plain.count("\n") + 1 for text, *_ in cells)
    table.add_row(
        *(Panel(text, title=TITLES[m], subtitle=speed, height=height) for text, m, speed in cells)
    )
    return table


def report(screen: Console, result: dict[str, Any]) -> None:
    """A line per side, and whether drafting paid, as it was measured."""
    lines: list[str] = []
    for row in result["ways"]:
        lines.append(
            f"{TITLES[row['way']]:15} {row['tokens_per_second']:.1f} tokens/s, "
            f"{row['tokens']} tokens in {row['seconds']:.2f} s"
        )
        if "acceptance_length" in row:
            lines[-1] += f"; {row['acceptance_length']:.2f} tokens per round"
    if result["speedup"] is not None:
        alike = {True: ", the same text", False: ", another text", None: ""}[result["identical"]]
        lines.append(f"{'verdict':15} {verdict(result['speedup'])}{alike}")
    elif "identical" in result:
        lines.append(
            f"{'verdict':15} none: a text has fewer than {LEAST_TOKENS} tokens; raise "
            "--max-tokens, or take a prompt with a longer answer"
        )
    for line in lines:
        screen.print(line, markup=False, soft_wrap=True)


def verdict(speedup: float) -> str:
    """What was measured, in words."""
    if abs(speedup - 1) < EVEN:
        return f"drafting makes no difference here: {speedup:.2f} times plain decoding's speed"
    pays = "pays" if speedup > 1 else "does not pay"
    return f"drafting {pays} here: {speedup:.2f} times plain decoding's speed"

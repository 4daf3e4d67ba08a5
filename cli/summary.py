"""Output of `generate`: the text, its figures, and tables after it."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.style import Style
from rich.table import Table

from dspine_mlx.cli.screen import console, print_bars

if TYPE_CHECKING:
    from dspine_mlx.round.statistics import GenerationResponse


def show(
    responses: "Iterator[GenerationResponse]", by_origin: bool
) -> "tuple[GenerationResponse, bool]":
    """Print the text as it comes; by_origin marks what was drafted, where there are colours.

    Returns the last response, and whether Ctrl-C came after it.
    """
    screen, last, interrupted = console(), None, False
    marked = by_origin and screen.color_system is not None
    style = drafted_style(screen)
    try:
        for last in responses:
            if marked:
                drafted = style if last.from_draft else None
                screen.out(last.text, style=drafted, end="", highlight=False)
            else:
                typer.echo(last.text, nl=False)
    except KeyboardInterrupt:
        if last is None:
            raise
        interrupted = True
    typer.echo()
    if marked:
        legend = console(stderr=True)
        legend.out("drafted and accepted", style=style, end="", highlight=False)
        legend.out("; the rest is the target's own", highlight=False)
    assert last is not None
    return last, interrupted


def drafted_style(screen: Console) -> Style:
    return Style(underline=True) if screen.no_color else Style(color="green")


def report(responses: "Iterator[GenerationResponse]", ranks: int = 1) -> dict[str, Any]:
    """The JSON object that --json prints. ranks: machines that have made the text."""
    text, tokens = "", []
    for last in responses:
        text += last.text
        tokens.append(last.token)
    statistics = last.statistics
    return {
        "text": text,
        "tokens": tokens,
        "prompt_tokens": last.prompt_tokens,
        "generation_tokens": last.generation_tokens,
        "prompt_tps": last.prompt_tps,
        "generation_tps": last.generation_tps,
        "rounds": statistics.rounds,
        "drafted": statistics.drafted,
        "accepted": statistics.accepted,
        "acceptance_length": statistics.acceptance_length,
        "accepted_histogram": histogram(statistics.accepted_histogram),
        "verify_lengths": histogram(statistics.verify_lengths),
        "peak_memory_gb": last.peak_memory,
        "finish_reason": last.finish_reason,
        "verdict": statistics.verdict,
        "ranks": ranks,
    }


def histogram(counts: dict[int, int]) -> dict[str, int]:
    return {str(key): counts[key] for key in sorted(counts)}


def call_speed(last: "GenerationResponse") -> float:
    """Tokens per second of the whole call, prefill included."""
    prefill = last.prompt_tokens / last.prompt_tps if last.prompt_tps else 0.0
    decoding = last.generation_tokens / last.generation_tps if last.generation_tps else 0.0
    seconds = prefill + decoding
    return last.generation_tokens / seconds if seconds else 0.0


def summary(last: "GenerationResponse") -> None:
    """Print speed and acceptance in at most five lines, on standard error."""
    statistics = last.statistics
    lines = [
        f"prompt      {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tokens/s",
        f"generation  {last.generation_tokens} tokens, {last.generation_tps:.1f} tokens/s; "
        f"whole call {call_speed(last):.1f}",
    ]
    if statistics.rounds:
        lines.append(
            f"acceptance  {statistics.acceptance_length:.2f} tokens per round, "
            f"{statistics.accepted} of {statistics.drafted} drafted"
        )
        if statistics.lookups:
            lines[-1] += f"; {statistics.lookups} of {statistics.rounds} rounds copied earlier text"
    lines.append(f"memory      {last.peak_memory:.2f} GB at most")
    if statistics.verdict:
        lines.append(statistics.verdict)
    for line in lines:
        typer.echo(line, err=True)


def show_statistics(last: "GenerationResponse") -> None:
    """Print how many rounds accepted and offered how many tokens, on standard error."""
    screen, statistics = console(stderr=True), last.statistics
    if not statistics.rounds:
        typer.echo("No round was drafted.", err=True)
        return
    for name, counts in (
        ("accepted", statistics.accepted_histogram),
        ("offered", statistics.verify_lengths),
    ):
        print_bars(screen, (name, "rounds"), all_counts(counts))


def all_counts(counts: "Counter[int]") -> list[tuple[str, float]]:
    return [(str(n), counts[n]) for n in range(max(counts) + 1)]


def show_rounds(lines: list[str]) -> None:
    """Print --explain's table, a row per round or probe, on standard error."""
    screen = console(stderr=True)
    table = Table("token", "what happened", box=None, padding=(0, 2, 0, 0))
    for line in lines:
        where, colon, what = line.partition(": ")
        table.add_row(*((where.removeprefix("at "), what) if colon else ("", line)))
    screen.print(table, markup=False)

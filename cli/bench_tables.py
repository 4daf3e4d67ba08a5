"""Tables and plots of dspine-mlx bench."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from dspine_mlx.cli.plots import About, loads, speedups
from dspine_mlx.cli.screen import console, print_bars, print_table
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.measure.clock import LEAST_TOKENS
from dspine_mlx.verify_length.store import describe, device_name

Row = dict[str, Any]


def label(mode: str) -> str:
    """A mode's label, without the folder of its draft model."""
    kind, colon, model = mode.partition(":")
    return f"{kind}{colon}{model.rstrip('/').rpartition('/')[2]}"


def show_depth(result: Row) -> None:
    screen = console()
    screen.print(f"\n{result['depth']} tokens of context before the prompt")
    print_table(screen, *comparison(result["ways"]))
    show_ratios(screen, result["ways"])
    show_dropped(result)
    if result["splits"]:
        screen.print(
            "\nMilliseconds of a round in which each part is waited for. Normally they overlap: "
            "the sum may exceed the same round left alone. host is what remains: policy, Python, "
            "the reader of the text."
        )
        print_table(screen, *split_rows(result["splits"]))


def show_dropped(result: Row) -> None:
    for mode, reason in result["dropped"].items():
        typer.echo(f"{label(mode)} was dropped: {reason}", err=True)


def show_batches(result: Row) -> None:
    screen = console()
    screen.print(f"\n{result['requests']} requests at once through dspine-mlx serve")
    rows = result["ways"]
    names = ["", "tokens/s in all", "speed-up", "first text", "of the last", "slowest", "decoded"]
    cells = [
        (
            label(row["way"]),
            f"{row['tokens_per_second']:.1f}",
            ratio(row),
            milliseconds(row["first_text_seconds"]),
            milliseconds(row["last_first_text_seconds"]),
            milliseconds(row["slowest_seconds"]),
            ", ".join(f"{path} {n}" for path, n in row["paths"].items()),
        )
        for row in rows
    ]
    print_table(screen, names, cells)
    show_ratios(screen, rows)
    for row in rows[1:]:
        screen.print(f"{label(row['way'])}: {row['verdict']}")
    show_dropped(result)


def show_ratios(screen: Console, rows: Sequence[Row]) -> None:
    """Speed-ups as a bar chart, where texts were long enough to tell."""
    told = [row for row in rows if row["speedup"] is not None]
    if told:
        print_bars(screen, ("", ""), [(label(row["way"]), row["speedup"]) for row in told])
    short = sum(row["texts"] - row["texts_in_ratios"] for row in rows)
    if short:
        screen.print(
            f"{short} of {sum(row['texts'] for row in rows)} texts have fewer than {LEAST_TOKENS} "
            "tokens, too few for a speed-up; raise --max-tokens, or take prompts with longer "
            "answers."
        )


Cells = tuple[list[str], list[list[str]]]  # names of columns, and rows


def comparison(rows: Sequence[Row]) -> Cells:
    names = ["", "tokens/s", "whole call", "speed-up", "per round", "same", "fork", "first", "GB"]
    energy = any("joules_per_token" in row for row in rows)
    auto = any(row["auto_speedup"] for row in rows)
    names += ["auto"] * auto + ["J/token"] * energy
    return names, [
        [
            label(row["way"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['call_tokens_per_second']:.1f}",
            ratio(row),
            f"{row['acceptance_length']:.2f}",
            "-" if row["identical"] is None else f"{row['identical']}/{row['texts']}",
            first_divergence(row),
            milliseconds(row["first_token_seconds"]),
            f"{row['peak_memory_gb']:.2f}",
            *([speed_of_auto(row)] * auto),
            *([f"{row['joules_per_token']:.3f}" if "joules_per_token" in row else ""] * energy),
        ]
        for row in rows
    ]


def speed_of_auto(row: Row) -> str:
    return "-" if row["auto_speedup"] is None else f"{row['auto_speedup']:.2f}"


def ratio(row: Row) -> str:
    if row["speedup"] is None:
        return "-"
    low, high = row["speedup_range"]
    return f"{row['speedup']:.2f} ({low:.2f}-{high:.2f})"


def first_divergence(row: Row) -> str:
    """The earliest token that differs from plain decoding's, and the margin there in nats."""
    if not row["forks"]:
        return ""
    divergence = min(row["forks"], key=lambda divergence: divergence["token"])
    margin = "" if divergence["margin"] is None else f" ({divergence['margin']:.2g})"
    return f"{divergence['token']}{margin}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def split_rows(splits: Sequence[Row]) -> Cells:
    names = ["", "offered", *splits[0]["seconds"], "sum", "left alone"]
    rows = []
    for row in splits:
        times = [*row["seconds"].values(), sum(row["seconds"].values()), row["normal_seconds"]]
        rows.append([label(row["way"]), str(row["length"]), *(f"{1e3 * t:.1f}" for t in times)])
    return names, rows


def labelled(results: Sequence[Row]) -> list[Row]:
    """Results with the modes' labels, for plots."""
    return [
        result | {"rows": [row | {"label": label(row["way"])} for row in result["ways"]]}
        for result in results
    ]


def draw(results: Sequence[Row], plot: Path, drafter: Drafter | None) -> None:
    pair = "no drafter" if drafter is None else describe(drafter)
    speedups(labelled(results), plot, About(pair, device_name()))


def draw_loads(results: Sequence[Row], plot: Path, model: str | None, drafter: str | None) -> None:
    pair = f"{model or 'the pair that ships'}, {drafter or 'its own drafter'}"
    loads(labelled(results), plot, About(pair, device_name()))

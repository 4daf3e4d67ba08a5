"""dspine-mlx bench --rows: what several rows of a product cost on this Mac."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import typer

from dspine_mlx.cli.bench_runs import run_all
from dspine_mlx.cli.screen import console, print_table
from dspine_mlx.load import load
from dspine_mlx.measure.product_rows import (
    KINDS,
    ROWS,
    Group,
    ShapeTimes,
    groups_of,
    time_groups,
    typical_groups,
)
from dspine_mlx.target.model import Target
from dspine_mlx.verify_length.store import device_name

MEANING = (
    "First column: one row, by MLX. The others: that many rows, in multiples of one row. "
    "=: with the bits of one row. 4x8: the fastest cut of a kernel."
)


def rows_of_products(model: str | None) -> list[dict[str, Any]]:
    """Time the shapes of a target, or typical ones; print the tables."""
    groups = typical_groups() if model is None else groups_of_model(model)
    last, finished = run_all(time_groups(groups), "shapes", len(groups))
    times = last or []
    show(times)
    if finished and len(times) < len(groups):
        typer.echo(f"{len(groups) - len(times)} shapes were left out: the time was up.", err=True)
    if not finished:
        typer.echo("Interrupted; these are the results so far.", err=True)
    return [one.as_dict() for one in times]


def groups_of_model(model: str) -> list[Group]:
    target, _, _ = load(model)
    return groups_of(Target(target))


def show(times: Sequence[ShapeTimes]) -> None:
    screen = console()
    screen.print(f"{device_name()}, MLX {version('mlx')}, dspine-mlx {version('dspine-mlx')}")
    screen.print(MEANING)
    for one in times:
        layers = f" ({one.layers} layers)" if one.layers else ""
        screen.print(f"\n{one.shape}{layers}", markup=False)
        print_table(screen, ["", *map(str, one.rows)], list(cells(one)))
        for reason in one.rejected:
            screen.print(f"left out: {reason}", markup=False)


def cells(one: ShapeTimes) -> list[list[str]]:
    """A line per kind of product."""
    single = one.rows[ROWS[0]]["stock"].seconds
    lines = []
    for kind in KINDS:
        line = [kind]
        for rows, best in one.rows.items():
            if rows == 1:
                line.append(f"{1e3 * single:.3f} ms" if kind == "stock" else "")
            elif kind in best:
                timed = best[kind]
                bits, cut = "=" * timed.exact, timed.product.removeprefix(kind)
                line.append(f"{timed.seconds / single:.2f}{bits}{cut}")
            else:
                line.append("-")
        lines.append(line)
    return lines

"""dspine-mlx inspect: what a drafter's folder is."""

import json
from typing import Annotated, Any

import typer


def inspect(
    path: Annotated[str, typer.Argument(help="A drafter's folder or Hub id, converted or not.")],
    revision: Annotated[str | None, typer.Option(help="Revision on the Hub.")] = None,
    check_weights: Annotated[
        bool,
        typer.Option(
            "--check-weights",
            help="Read every weight too, and compare a converted folder with its digests.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Say what a drafter is: method, layout, the target it fits, sizes, and any problems."""
    from dspine_mlx.convert.report import report
    from dspine_mlx.load import resolve

    facts = report(resolve(path, revision), check_weights)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        show(facts)
    if facts["problems"]:
        raise typer.Exit(1)


def show(facts: dict[str, Any]) -> None:
    from rich.table import Table

    from dspine_mlx.cli.screen import console

    table = Table(box=None, show_header=False)
    for name, value in facts.items():
        if value in (None, [], {}):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items() if not isinstance(v, dict))
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        elif type(value) is int:
            value = f"{value:,}"
        table.add_row(name.replace("_", " "), str(value))
    console().print(table, markup=False)

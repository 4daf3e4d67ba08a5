"""dspine-mlx inspect: facts about a drafter's or target's folder."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dspine_mlx.cli.groups import Commands
from dspine_mlx.errors import InputError

app = Commands()


@app.command()
def inspect(
    path: Annotated[
        str, typer.Argument(help="A drafter, converted or not, or a target: folder or Hub id.")
    ],
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
    """Describe a drafter: method, layout, the target it fits, sizes, and any problems. For a
    target: its kind and sizes, and public drafters for it."""
    from dspine_mlx.models.needs import check_needs

    check_needs(path)  # before large imports, so that it is said at once

    from dspine_mlx.load import resolve

    facts = facts_of(resolve(path, revision), check_weights, path)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        show(facts)
    if facts["problems"]:
        raise typer.Exit(1)


def facts_of(folder: Path, check_weights: bool, name: str) -> dict[str, Any]:
    from dspine_mlx.checkpoints.files import read_config
    from dspine_mlx.convert.report import report
    from dspine_mlx.models.registry import fitting, registry
    from dspine_mlx.target.facts import is_target, target_facts

    try:
        return report(folder, check_weights)
    except InputError:
        if is_target(read_config(folder)):
            drafters = [entry.id for entry in fitting(name, registry())]
            return target_facts(folder) | {"drafters": drafters}
        raise


def show(facts: dict[str, Any]) -> None:
    from rich.table import Table

    from dspine_mlx.cli.screen import console

    table = Table("", "", box=None, show_header=False)
    table.columns[1].overflow = "fold"
    for name, value in facts.items():
        if value in (None, [], {}):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items() if not isinstance(v, dict))
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        elif isinstance(value, int):
            value = f"{value:,}"
        table.add_row(name.replace("_", " "), str(value))
    console().print(table, markup=False)

"""dspine-mlx report: facts and figures about this machine, to share."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dspine_mlx.cli.groups import Commands
from dspine_mlx.cli.options import DraftOption, TargetOption
from dspine_mlx.cli.output import check_new, new_file

app = Commands()


@app.command()
def report(
    output: Annotated[
        Path | None, typer.Option(help="Write to this new file; default: print.")
    ] = None,
    bench: Annotated[
        bool, typer.Option("--bench", help="Also measure the pair's speed on two short prompts.")
    ] = False,
    model: TargetOption = None,
    draft_model: DraftOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object only, no text.")] = False,
) -> None:
    """Make a report to attach to a bug, or to send as a measurement of your chip.

    It has doctor's findings, versions, the measured costs and calibrations on file, numbers from
    the pair's config.json and, with --bench, a short measurement, as text and then as JSON. It has
    no prompts, no generated text, no paths, and no names of user, machine or models. Read it before
    you send it.
    """
    check_new(output)
    from dspine_mlx.models.needs import check_pair

    check_pair(model, draft_model)  # before large imports, so that it is said at once
    from dspine_mlx.measure.report import as_text, bundle

    found = bundle(model, draft_model, bench)
    text = json.dumps(found) + "\n" if as_json else as_text(found)
    if output is None:
        typer.echo(text, nl=False)
        return
    with new_file(output) as part:
        part.write_text(text, encoding="utf-8")
    typer.echo(f"Written to {output}; read it before you send it.")

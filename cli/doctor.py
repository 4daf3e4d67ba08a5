"""dspine-mlx doctor: what works here, and what to do about what does not."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from dspine_mlx.cli.groups import Commands

app = Commands()

MARKS = {"ok": ("green", "ok"), "note": ("yellow", "note"), "problem": ("red", "PROBLEM")}


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Examine this machine: chip, memory, packages, kernels, measured costs, caches.

    Gives advice where there is something to do. The exit status is 1 if something does not work (a
    PROBLEM), and 0 with notes only.
    """
    from dspine_mlx.group.meet import follows
    from dspine_mlx.measure.doctor import PROBLEM, examine

    findings = list(examine())
    if follows():  # rank 0 speaks for the group
        raise typer.Exit(0)
    sound = all(finding.status != PROBLEM for finding in findings)
    if as_json:
        typer.echo(json.dumps({"sound": sound, "findings": [asdict(f) for f in findings]}))
    else:
        for finding in findings:
            colour, mark = MARKS[finding.status]
            advice = f" ({finding.advice})" if finding.advice else ""
            label = typer.style(f"{mark:8}", fg=colour)
            typer.echo(f"{label}{finding.name}: {finding.detail}{advice}")
    raise typer.Exit(0 if sound else 1)

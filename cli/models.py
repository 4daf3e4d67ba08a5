"""dspine-mlx models: public drafters, and which fit a target."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspine_mlx.cli.groups import Commands

if TYPE_CHECKING:
    from dspine_mlx.models.registry import Entry

app = Commands()


@app.command()
def models(
    model: Annotated[
        str | None, typer.Argument(help="A target, folder or Hub id: show what fits it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """List public drafters, or those that fit a model, with what is known of them.

    Reads only files on this machine. Your own entries go into
    ~/.config/dspine-mlx/drafters.json, in the format of dspine_mlx/models/drafters.json.
    """
    from dspine_mlx.models.registry import PAIR, fitting, registry

    known = registry()
    entries = [e for e in known if e != PAIR] if model is None else fitting(model, known)
    if as_json:
        listed = [asdict(entry) | facts(model, entry) for entry in entries]
        typer.echo(json.dumps({"model": model, "drafters": listed}))
    elif model is None:
        show_all(entries)
    elif entries:
        for entry in entries:
            show(model, entry)
    else:
        typer.echo(f"No public drafter is known for {model}; `dspine-mlx models` lists all.")
        raise typer.Exit(1)


def facts(model: str | None, entry: "Entry") -> dict[str, Any]:
    """What this machine knows of a drafter, and of it with a target."""
    from dspine_mlx.drafters import METHODS
    from dspine_mlx.models.gain import gains
    from dspine_mlx.models.hub import cached_folder

    here = cached_folder(entry.id, entry.revision) or cached_folder(entry.id)
    target = None if model is None else cached_folder(model)
    return {
        "readable": entry.method in METHODS,
        "here": None if here is None else str(here),
        "target_here": None if target is None else str(target),
        "predicted": [asdict(gain) for gain in gains(target, entry)],
        "contradictions": contradictions_of(model, entry),
    }


def contradictions_of(model: str | None, entry: "Entry") -> list[str] | None:
    """By both config.json, if they are here; None: not compared."""
    from dspine_mlx.checkpoints.files import read_json
    from dspine_mlx.models.fit import contradictions
    from dspine_mlx.models.hub import cached_file, folder_of

    configs = []
    for name, revision in ((entry.id, entry.revision), (model or "", None)):
        folder = folder_of(name) if model is not None else None
        path = folder / "config.json" if folder else cached_file(name, "config.json", revision)
        if model is None or path is None:
            return None
        configs.append(read_json(path))
    return contradictions(*configs)


def show_all(entries: "list[Entry]") -> None:
    from dspine_mlx.cli.screen import console, print_table
    from dspine_mlx.models.hub import cached_folder

    names = ("drafter", "for", "method", "block", "GB", "licence", "tokens per round", "here")
    rows = []
    for entry in entries:
        per_round = sorted({p.tokens_per_round for p in entry.published})
        here = cached_folder(entry.id, entry.revision) or cached_folder(entry.id)
        rows.append(
            (
                entry.id,
                ", ".join(target.rsplit("/", 1)[-1] for target in entry.targets),
                entry.method,
                entry.block or "?",
                entry.gigabytes or "?",
                entry.licence or "?",
                " to ".join(f"{n:.2f}" for n in dict.fromkeys((*per_round[:1], *per_round[-1:])))
                or "?",
                "yes" if here else "no",
            )
        )
    print_table(console(), names, rows)
    typer.echo(
        "Tokens per round as others published them; ?: not found. Nothing here was run by this "
        "project. `dspine-mlx models MODEL` says more.",
        err=True,
    )


def show(model: str, entry: "Entry") -> None:
    """One drafter for a target, a fact per line."""
    from dspine_mlx.cli.screen import console
    from dspine_mlx.models.gain import Gain
    from dspine_mlx.models.registry import Published

    known = facts(model, entry)
    size = "" if entry.gigabytes is None else f", {entry.gigabytes} GB"
    layout = f"{entry.layout or 'unknown'} layout"
    lines = [
        f"{entry.method}, block {entry.block or 'unknown'}, {layout}{size}",
        f"licence: {entry.licence or 'none found'}; revision: {entry.revision or 'the newest'}",
        f"tested with this package: {entry.tested}",
        "here: " + (known["here"] or "no, it would be downloaded"),
    ]
    if not known["readable"]:
        lines.append("this version can't read it")
    if not entry.automatic:
        lines.append("not taken by --draft-model auto")
    if entry.note:
        lines.append(entry.note)
    if known["contradictions"] is not None:
        wrong = "; ".join(known["contradictions"])
        lines.append(f"by their configs it does not fit: {wrong}" if wrong else "the configs agree")
    for p in entry.published:
        up_to = "" if p.offered is None else f" of up to {p.offered + 1}"
        lines.append(
            f"published: {p.tokens_per_round} tokens per round{up_to} on {p.texts}; {p.where} "
            f"({p.source})"
        )
    for gain in known["predicted"]:
        published = Published(**gain.pop("published"))
        lines.append(Gain(**gain, published=published).words())
    if not known["predicted"] and any(p.offered for p in entry.published):
        lines.append("gain here: not predicted, as no costs of this pair were measured yet")
    lines.append(f"sources: {', '.join(entry.sources)}")
    screen = console()
    screen.print(entry.id, style="bold", markup=False)
    for line in lines:
        screen.print(f"  {line}", markup=False, soft_wrap=True)

"""Which drafter a command takes: the one that is named, the registry's, or none and a hint."""

import typer


def chosen(model: str | None, draft_model: str | None) -> tuple[str | None, str | None]:
    """The drafter's name and revision; says what `auto` took, or what would fit."""
    from dspine_mlx.models.choose import AUTO, choose, hint

    if model is None:
        return (None if draft_model == AUTO else draft_model), None
    if draft_model is None:
        typer.echo(f"No drafter: plain decoding; {hint(model)}.", err=True)
        return None, None
    if draft_model != AUTO:
        return draft_model, None
    name, revision, entry = choose(model)
    typer.echo(
        f"Drafter: {name}; licence: {entry.licence or 'none found'}; tested: {entry.tested}.",
        err=True,
    )
    return name, revision

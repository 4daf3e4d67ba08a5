"""Which drafter a command takes: the one that is named, the registry's, or none and a hint."""

import typer


def chosen(model: str | None, draft_model: str | None) -> tuple[str | None, str | None]:
    """The drafter's name and revision; says what `auto` took."""
    from dspine_mlx.models.choose import AUTO, choose

    if draft_model != AUTO:
        return draft_model, None
    if model is None:
        return None, None
    name, revision, entry = choose(model)
    typer.echo(
        f"Drafter: {name}; licence: {entry.licence or 'none found'}; tested: {entry.tested}.",
        err=True,
    )
    return name, revision


def say_what_fits(model: str | None) -> None:
    """For a target that was loaded alone."""
    from dspine_mlx.models.choose import hint

    typer.echo(f"No drafter: plain decoding. {hint(model or '')}.", err=True)

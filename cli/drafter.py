"""Which drafter a command takes: the one that is named, the registry's, or none and a hint."""

import typer


def chosen(model: str | None, draft_model: str | None) -> str | None:
    """The drafter's name; for `auto` the folder of the registry's, after saying what it is."""
    from dspine_mlx.load import resolve
    from dspine_mlx.models.choose import AUTO, choose
    from dspine_mlx.models.fit import check_configs

    if draft_model != AUTO:
        return draft_model
    if model is None:
        return None
    name, revision, entry = choose(model)
    licence = entry.licence or "none found"
    typer.echo(f"Drafter: {name}; licence: {licence}; tested: {entry.tested}.", err=True)
    check_configs(model, name, revision)
    return str(resolve(name, revision))


def say_what_fits(model: str | None) -> None:
    """For a target that was loaded alone."""
    from dspine_mlx.models.choose import hint

    typer.echo(f"No drafter: plain decoding. {hint(model or '')}.", err=True)

"""dspine-mlx serve: mlx_lm.server with a drafter."""

import typer

from dspine_mlx.cli.groups import Commands

app = Commands()


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def serve(context: typer.Context) -> None:
    """Serve a model with a drafter over HTTP: mlx_lm.server, its flags, and some more."""
    import argparse

    from dspine_mlx.models.needs import check_pair

    names = argparse.ArgumentParser("serve", add_help=False, allow_abbrev=False)
    for flag in ("--model", "--draft-model"):
        names.add_argument(flag, nargs="?")
    found, _ = names.parse_known_args(context.args)
    check_pair(found.model, found.draft_model)  # before large imports, so that it is said at once

    from dspine_mlx.server import main

    main(context.args)

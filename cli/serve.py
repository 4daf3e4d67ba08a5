"""dspine-mlx serve: mlx_lm.server with a drafter."""

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}  # how to register `serve`


def serve(context: typer.Context) -> None:
    """Serve a model with a drafter over HTTP: mlx_lm.server, its flags, and some more."""
    from dspine_mlx.server import main

    main(context.args)

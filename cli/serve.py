"""dspine-mlx serve: mlx_lm.server with a drafter."""

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}  # how to register `serve`


def serve(context: typer.Context) -> None:
    """Serve a model with a drafter: mlx_lm.server's endpoints and flags, and some of our own."""
    from dspine_mlx.server import main

    main(context.args)

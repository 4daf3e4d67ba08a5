"""Options that several commands have."""

from typing import Annotated

import typer

PAIR = "Pair"

TargetOption = Annotated[
    str | None,
    typer.Option(
        help="Target: an MLX model folder or Hub id. Without it, the small pair that ships with "
        "the package.",
        rich_help_panel=PAIR,
    ),
]

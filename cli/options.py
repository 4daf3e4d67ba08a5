"""Options that several commands have."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

PAIR = "Pair"

TargetOption = Annotated[
    str | None,
    typer.Option(
        help="Target: an MLX model folder or Hub id. Without it, the small pair that ships with "
        "the package.",
        rich_help_panel=PAIR,
    ),
]


class SeveralValues(TyperCommand):
    """A command whose list options take several values each, as mlx-lm's do: --x A B."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = (p for p in self.params if isinstance(p, TyperOption) and p.multiple)
        names = {name for option in lists for name in option.opts}
        return super().parse_args(ctx, repeated(args, names))


def repeated(args: Sequence[str], names: set[str]) -> list[str]:
    """--x A B as --x A --x B."""
    out: list[str] = []
    current: str | None = None
    for arg in args:
        if arg.startswith("-") and arg != "-":
            current = arg if arg in names else None
        elif current is not None and out[-1] != current:
            out.append(current)
        out.append(arg)
    return out

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

DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        help="Drafter: a folder or Hub id of a checkpoint, or 'auto' for a public one that fits.",
        rich_help_panel=PAIR,
    ),
]
AdapterOption = Annotated[
    str | None, typer.Option(help="Adapter weights for the target.", rich_help_panel=PAIR)
]
TrustOption = Annotated[
    bool, typer.Option(help="Let the tokenizer run its own code.", rich_help_panel=PAIR)
]
DraftQuantOption = Annotated[
    int | None,
    typer.Option(
        help="Quantise the drafter's large matrices to 4 or 8 bits while loading it.",
        rich_help_panel=PAIR,
    ),
]
VerifyLengthOption = Annotated[
    str | None,
    typer.Option(
        help="Drafted tokens offered to the target per round: 'auto' (the default), or a "
        "number; 0 is plain decoding.",
        rich_help_panel=PAIR,
    ),
]
KernelsOption = Annotated[
    str,
    typer.Option(
        help="'auto': the package's kernels where they win; 'exact': verify only with plain "
        "decoding's bits, as checked here; 'off': plain MLX.",
        rich_help_panel=PAIR,
    ),
]
NoLookupOption = Annotated[
    bool,
    typer.Option(
        "--no-lookup",
        help="Don't offer copies of earlier text where they are worth more than a draft.",
        rich_help_panel=PAIR,
    ),
]
PATIENCE = 300.0  # seconds
PipelineOption = Annotated[
    bool,
    typer.Option(
        "--pipeline",
        help="On several machines, with mlx.launch: split the target by layers, not by tensors.",
        rich_help_panel=PAIR,
    ),
]
PatienceOption = Annotated[
    float,
    typer.Option(
        help="On several machines: seconds to wait for another one before all end.",
        rich_help_panel=PAIR,
        min=1.0,
    ),
]
NoProfileOption = Annotated[
    bool,
    typer.Option(
        "--no-profile",
        help="For verify length 'auto': guess what a step costs at first, don't measure it.",
        rich_help_panel=PAIR,
    ),
]


class SeveralValues(TyperCommand):
    """A command whose list options take several values, as mlx-lm's do: --x A B."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = (p for p in self.params if isinstance(p, TyperOption) and p.multiple)
        names = {name for option in lists for name in option.opts}
        return super().parse_args(ctx, repeated(args, names))


def repeated(args: Sequence[str], names: set[str]) -> list[str]:
    """Rewrite --x A B as --x A --x B."""
    out: list[str] = []
    current: str | None = None
    for arg in args:
        if arg.startswith("-") and arg != "-":
            current = arg if arg in names else None
        elif current is not None and out[-1] != current:
            out.append(current)
        out.append(arg)
    return out

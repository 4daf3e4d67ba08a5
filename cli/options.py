"""Options that several commands have, alone and in groups."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperOption

from dspine_mlx.errors import InputError

PAIR, SAMPLING, CACHE = "Pair", "Sampling", "Cache"

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
        help="Drafter: a folder or Hub id of a checkpoint; 'auto' for a public one that fits; "
        "'lookup' for none, only copies of earlier text.",
        rich_help_panel=PAIR,
    ),
]
SystemPromptOption = Annotated[str | None, typer.Option(help="System message.")]
TemplateOption = Annotated[
    str,
    typer.Option(
        "--chat-template-args",
        "--chat-template-config",
        help="Arguments of the chat template, a JSON object.",
    ),
]
MaxKvSizeOption = Annotated[
    int | None,
    typer.Option(
        help="Keep only this many positions: the first 4 and the newest.", rich_help_panel=CACHE
    ),
]
PrefillStepOption = Annotated[
    int, typer.Option(help="Prompt tokens per forward pass.", rich_help_panel=CACHE)
]
KernelsOption = Annotated[
    str,
    typer.Option(
        help="'auto': the package's kernels where they win; 'exact': verify only with plain "
        "decoding's bits, as checked here; 'off': plain MLX.",
        rich_help_panel=PAIR,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object only.")]


class Pair(NamedTuple):
    """A target, its drafter, and how they draft."""

    model: TargetOption = None
    draft_model: DraftOption = None
    adapter_path: Annotated[
        str | None, typer.Option(help="Adapter weights for the target.", rich_help_panel=PAIR)
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option(help="Let the tokenizer run its own code.", rich_help_panel=PAIR)
    ] = False
    draft_quant: Annotated[
        int | None,
        typer.Option(
            help="Quantise the drafter's large matrices to 4 or 8 bits while loading it.",
            rich_help_panel=PAIR,
        ),
    ] = None
    verify_length: Annotated[
        str | None,
        typer.Option(
            help="Drafted tokens offered to the target per round: 'auto' (the default), or a "
            "number; 0 is plain decoding.",
            rich_help_panel=PAIR,
        ),
    ] = None
    kernels: KernelsOption = "auto"
    no_lookup: Annotated[
        bool,
        typer.Option(
            "--no-lookup",
            help="Don't offer copies of earlier text where they are worth more than a draft.",
            rich_help_panel=PAIR,
        ),
    ] = False
    no_profile: Annotated[
        bool,
        typer.Option(
            "--no-profile",
            help="For verify length 'auto': guess what a step costs at first, don't measure it.",
            rich_help_panel=PAIR,
        ),
    ] = False


class Sampling(NamedTuple):
    """How tokens are drawn: the fields of `Sampler` that a user sets."""

    temp: Annotated[
        float, typer.Option(help="Temperature; 0 is greedy.", rich_help_panel=SAMPLING)
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(
            help="Keep the likeliest tokens up to this mass; 1: all.", rich_help_panel=SAMPLING
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        typer.Option(
            help="Drop tokens below this share of the top one's probability; 0: none.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0
    min_tokens_to_keep: Annotated[
        int, typer.Option(help="Tokens that min-p always keeps.", rich_help_panel=SAMPLING)
    ] = 1
    top_k: Annotated[
        int,
        typer.Option(
            help="Keep this many of the likeliest tokens; 0: all.", rich_help_panel=SAMPLING
        ),
    ] = 0
    xtc_probability: Annotated[
        float,
        typer.Option(
            help="Chance, per token, that XTC leaves out the top choices.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        typer.Option(
            help="Probability from which a token is a top choice for XTC.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.1


def parse_verify_length(value: str | None, num_draft_tokens: int | None = None) -> int | str:
    """--verify-length, or --num-draft-tokens, which is mlx-lm's name for it."""
    if num_draft_tokens is not None:
        if value is not None:
            raise InputError("--num-draft-tokens is --verify-length under another name; give one")
        if num_draft_tokens < 0:
            raise InputError(f"--num-draft-tokens is {num_draft_tokens}; it must be at least 0")
        return num_draft_tokens
    if value is None or value == "auto":
        return "auto"
    if not (value.isascii() and value.isdecimal() and len(value) < 10):
        raise InputError(f"--verify-length is {value!r}; it must be 'auto' or a number from 0 on")
    return int(value)


def whole_numbers(flag: str, value: str) -> list[int]:
    """Whole numbers of up to nine digits, separated by commas."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise InputError(
            f"{flag} is {value[:60]!r}; it must be whole numbers separated by commas, as in 1,9,17"
        )
    return [int(part) for part in parts]


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

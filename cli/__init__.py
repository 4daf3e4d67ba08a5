"""The dspine-mlx command: one file per subcommand."""

import errno
import io
import os
import sys
from functools import cache
from importlib import import_module
from types import TracebackType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dspine_mlx import __version__
from dspine_mlx.cli.groups import Commands
from dspine_mlx.cli.ranks import of_another_rank
from dspine_mlx.errors import InputError, LostRank

WIDEST = 4  # digits of a number of columns
TEMPORARY = {"TMPDIR", "TMP", "TEMP", "TEMPDIR"}  # where MLX puts files that it compiles
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP)

# The modules of this folder that are commands, with the first sentence of their help.
COMMANDS = {
    "generate": "Generate text: the target's own, made faster by a drafter.",
    "chat": "Chat with a model. Drafted tokens are coloured; /help lists the commands.",
    "models": "List public drafters, or those that fit a model, with what is known of them.",
    "serve": "Serve a model with a drafter over HTTP: mlx_lm.server, its flags, and some more.",
    "bench": "Measure speed against mlx-lm's own decoding, all modes in turn in one run.",
    "calibrate": "Fit the drafter's confidence to what the target accepts.",
    "convert": "Convert a published drafter checkpoint to an MLX folder.",
    "inspect": "Describe a drafter: method, layout, the target it fits, sizes, and any problems.",
    "doctor": "Examine this machine: chip, memory, packages, kernels, measured costs, caches.",
    "report": "Make a report to attach to a bug, or to send as a measurement of your chip.",
    "train": "Train a drafter for a target, in MLX.",
}


@cache
def command_named(name: str) -> Any:
    """A command, or a group of them, as typer builds it."""
    return typer.main.get_command(import_module(f"dspine_mlx.cli.{name}").app)


class OneModule(TyperGroup):
    """All commands by their summaries. Only the one that runs is imported."""

    def __init__(self, **settings: Any) -> None:
        summaries = {name: TyperCommand(name, help=text) for name, text in COMMANDS.items()}
        super().__init__(**settings | {"commands": summaries})

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command_named(name) if name in COMMANDS else command, rest


app = Commands(
    name="dspine-mlx",
    cls=OneModule,
    add_completion=True,
    help="Speculative decoding on Apple Silicon with DSpine drafters, on MLX and mlx-lm.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dspine-mlx {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if not debug:
        sys.excepthook = one_sentence
    check_current_folder()


def one_sentence(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """The sentence that a failure prints in place of a traceback."""
    if issubclass(kind, KeyboardInterrupt):
        return
    typer.echo(f"dspine-mlx: {' '.join(str(error).split()) or kind.__name__}", err=True)


def check_current_folder() -> None:
    """Require one: transformers asks for it when it is imported."""
    try:
        os.getcwd()
    except OSError as error:
        raise InputError(
            f"the current folder can't be found ({error.strerror}); change to one that exists"
        ) from error


def prepare_environment() -> None:
    """Ignore an impossible width, and a place for temporary files where there can't be any, as
    Python does and MLX does not."""
    width = os.environ.get("COLUMNS", "1")
    if not width.strip("0") or len(width) > WIDEST:
        del os.environ["COLUMNS"]
    for name in TEMPORARY & os.environ.keys():
        folder = os.environ[name]
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            del os.environ[name]


def prepare_streams() -> None:
    """Print '?' for characters that the locale lacks.

    Closed streams lead nowhere, lest a file of weights becomes standard input, which MLX refuses.
    """
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(free)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main() -> None:
    """Run the command. Exit status: 0; 2 for bad usage or bad input; 1 for a failure."""
    prepare_environment()
    prepare_streams()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch is missing
    try:
        app()
    except InputError as error:
        if of_another_rank():
            sys.exit(0)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(2)
    except LostRank as error:  # its collectives wait for ever, and the end of the process for them
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        os._exit(1)
    except OSError as error:
        if error.errno not in (*NO_ROOM, *NO_NAME):
            raise
        place = error.filename or "standard output"
        one_sentence(InputError, InputError(f"{place} can't be used: {error.strerror}"), None)
        sys.exit(2)

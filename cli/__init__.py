"""The dspine-mlx command: one file per subcommand."""

import io
import os
import sys
from types import TracebackType
from typing import Annotated

import typer

from dspine_mlx import __version__
from dspine_mlx.cli.bench import bench
from dspine_mlx.cli.calibrate import calibrate
from dspine_mlx.cli.chat import chat
from dspine_mlx.cli.convert import convert
from dspine_mlx.cli.doctor import doctor
from dspine_mlx.cli.generate import generate
from dspine_mlx.cli.inspect import inspect
from dspine_mlx.cli.models import models
from dspine_mlx.cli.options import SeveralValues
from dspine_mlx.cli.report import report
from dspine_mlx.cli.serve import SETTINGS, serve
from dspine_mlx.cli.train import app as train
from dspine_mlx.errors import InputError, LostRank

WIDEST = 4  # digits of a number of columns

app = typer.Typer(
    name="dspine-mlx",
    help="Speculative decoding on Apple Silicon with DSpine drafters, on MLX and mlx-lm.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=SeveralValues)(generate)
app.command()(chat)
app.command()(convert)
app.command()(inspect)
app.command()(models)
app.command()(bench)
app.command()(doctor)
app.command()(report)
app.command()(calibrate)
app.command(context_settings=SETTINGS, add_help_option=False)(serve)
app.add_typer(train, name="train")


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


def one_sentence(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """The sentence that a failure prints in place of a traceback."""
    if issubclass(kind, KeyboardInterrupt):
        return
    typer.echo(f"dspine-mlx: {' '.join(str(error).split()) or kind.__name__}", err=True)


def prepare_streams() -> None:
    """Ignore an impossible width, and print '?' for characters that the locale lacks.

    Closed streams lead nowhere, lest a file of weights becomes standard input, which MLX refuses.
    """
    width = os.environ.get("COLUMNS", "1")
    if not width.strip("0") or len(width) > WIDEST:
        del os.environ["COLUMNS"]
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(free)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main() -> None:
    """Run the command. Exit status: 0; 2 for bad usage or bad input; 1 for a failure."""
    prepare_streams()
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


def of_another_rank() -> bool:
    """Whether rank 0 of a group of machines says what is wrong."""
    from dspine_mlx.group.meet import follows

    return follows()

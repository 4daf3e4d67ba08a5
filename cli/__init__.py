"""The dspine-mlx command: one file per subcommand."""

import errno
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
from dspine_mlx.cli.groups import Commands
from dspine_mlx.cli.inspect import inspect
from dspine_mlx.cli.models import models
from dspine_mlx.cli.options import SeveralValues
from dspine_mlx.cli.ranks import of_another_rank
from dspine_mlx.cli.report import report
from dspine_mlx.cli.serve import SETTINGS, serve
from dspine_mlx.cli.train import app as train
from dspine_mlx.errors import InputError, LostRank

WIDEST = 4  # digits of a number of columns
TEMPORARY = {"TMPDIR", "TMP", "TEMP", "TEMPDIR"}  # where MLX puts files that it compiles
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP)

app = Commands(
    name="dspine-mlx",
    help="Speculative decoding on Apple Silicon with DSpine drafters, on MLX and mlx-lm.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=SeveralValues)(generate)
app.command()(chat)
app.command()(models)
app.command(context_settings=SETTINGS, add_help_option=False)(serve)
app.command()(bench)
app.command()(calibrate)
app.command()(convert)
app.command()(inspect)
app.command()(doctor)
app.command()(report)
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

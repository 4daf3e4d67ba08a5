"""What the real command lines make of their arguments, without doing it."""

import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer
from mlx_lm import server as host
from packaging.requirements import Requirement

from dspine_mlx.cli import OneModule, app, command_named
from dspine_mlx.server import app as server_app
from dspine_mlx.server import main as serve


@dataclass
class Call:
    """A command of the real command line: its name, and its parameters as parsed."""

    name: str
    params: dict[str, Any]
    stdout: str = ""
    stderr: str = ""

    @property
    def paths(self) -> list[Path]:
        return [value for value in self.params.values() if isinstance(value, Path)]


def subcommands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(command, typer.core.TyperGroup):
        yield name, command
        return
    for part, sub in command.commands.items():
        whole = command_named(part) if isinstance(command, OneModule) else sub
        yield from subcommands(whole, f"{name} {part}".strip())


def understood(arguments: list[str], program: typer.Typer = app) -> Call:
    """What a command line makes of its arguments; its own error if it refuses them."""
    if arguments[:1] == ["serve"]:
        serve_understands(arguments[1:])
        return Call("serve", {})
    root, calls = typer.main.get_command(program), list[Call]()

    def note(called: str, **params: Any) -> None:
        calls.append(Call(called, params))

    with ExitStack() as patches:
        for name, command in subcommands(root):
            patches.enter_context(patch.object(command, "callback", partial(note, name)))
        root.main(arguments, standalone_mode=False)
    (call,) = calls
    return call


@contextmanager
def nothing_served() -> Iterator[None]:
    """Within the block mlx_lm.server's main ends when it has parsed its flags."""
    with ExitStack() as patches:
        for owner, name in ((server_app, "bind"), (host, "run"), (host, "ModelProvider")):
            patches.enter_context(patch.object(owner, name, autospec=True))
        patches.enter_context(patch.object(sys, "argv", []))
        yield


def serve_understands(arguments: list[str]) -> None:
    with nothing_served():
        serve(arguments)


def script_understands(module_name: str, arguments: list[str]) -> None:
    """`python -m` of a script in tests/bench or recipes."""
    module = import_module(module_name)
    names = vars(module)
    if "typer" in names:
        understood(arguments, names["app"] if "app" in names else one_command(names["main"]))
    elif "argparse" in names:
        parse = ArgumentParser.parse_args

        def parse_only(parser: ArgumentParser) -> None:
            parse(parser)
            raise StopIteration

        with (
            patch.object(sys, "argv", [module_name, *arguments]),
            patch.object(ArgumentParser, "parse_args", parse_only),
            pytest.raises(StopIteration),
        ):
            names["main"]()
    else:
        assert callable(names["main"])
        assert not arguments


def one_command(main: Callable[..., None]) -> typer.Typer:
    program = typer.Typer()
    program.command()(main)
    return program


def pip_understands(arguments: list[str]) -> None:
    """Extras of this package that are installed must be there."""
    known = set(metadata.metadata("dspine-mlx").get_all("Provides-Extra") or [])
    for argument in arguments:
        if re.match(r"(dspine-mlx|\.)(\[|$)", argument):
            wanted = Requirement(re.sub(r"^\.", "dspine-mlx", argument))
            assert wanted.extras <= known, f"{argument}: there are {sorted(known)}"


def ours(words: list[str]) -> list[str] | None:
    """The arguments, if the words call dspine-mlx, on one machine or by mlx.launch."""
    words = launched(words)
    return words[1:] if Path(words[0]).name == "dspine-mlx" else None


def launched(words: list[str]) -> list[str]:
    """The command that mlx.launch starts on every machine; others as they are."""
    if words[0] != "mlx.launch":
        return words
    return words[words.index("--") + 1 :]


def parse_words(words: list[str]) -> bool:
    """Check a command's options; whether it is a command that is known here."""
    words = launched(words)
    if (arguments := ours(words)) is not None:
        understood(arguments)
    elif Path(words[0]).name == "python" and words[1] == "-m" and "." in words[2]:
        script_understands(words[2], words[3:])
    elif Path(words[0]).name == "pip":
        pip_understands(words[1:])
    else:
        return False
    return True

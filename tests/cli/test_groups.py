"""Groups of options: named tuples that typer sees field by field."""

import subprocess
import sys
from typing import Annotated, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from dspine_mlx.cli import COMMANDS, command_named
from dspine_mlx.cli.groups import Commands, grouped

Size = Annotated[int, typer.Option("--size", "-s", help="How large.")]


class Shape(NamedTuple):
    """Two fields with a default, one without."""

    name: Annotated[str, typer.Option()]
    size: Size = 3
    round: Annotated[bool, typer.Option("--round")] = False


def run(*arguments: str) -> tuple[int, str]:
    app, seen = typer.Typer(), []

    @app.command()
    @grouped
    def command(shape: Shape, count: int = 1, extra: Annotated[str, typer.Option()] = "x") -> None:
        """What it does."""
        seen.append((shape, count, extra))

    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, repr(seen[0]) if seen else result.output


def test_fields_are_options_and_come_back_as_the_named_tuple() -> None:
    given = run("--name", "a", "-s", "5", "--round", "--count", "2")
    assert given == (0, repr((Shape("a", 5, True), 2, "x")))
    assert run("--name", "b") == (0, repr((Shape("b"), 1, "x")))


def test_a_field_without_a_default_is_required_and_values_are_checked() -> None:
    status, said = run("--size", "1")
    assert status == 2
    assert "--name" in said
    assert run("--name", "a", "--size", "large")[0] == 2


def test_help_is_the_commands_and_the_fields() -> None:
    status, said = run("--help")
    assert status == 0
    for word in ("What it does.", "--name", "--size", "-s", "How large.", "--count", "--extra"):
        assert word in said
    assert "--shape" not in said


def test_help_flows_over_the_sources_lines() -> None:
    app = Commands()

    @app.command()
    def command() -> None:
        """What it does, in
        two lines.

        More
        of it.
        """

    assert typer.main.get_command(app).help == "What it does, in two lines.\n\nMore of it."


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_of_a_command_is_the_first_sentence_of_its_help(name: str) -> None:
    said = command_named(name).help
    assert said is not None
    assert said.startswith(COMMANDS[name])
    assert said[len(COMMANDS[name]) :][:1] in ("", " ", "\n")


def test_one_command_is_imported_and_no_other() -> None:
    code = """
import sys
from dspine_mlx.cli import app
app(["inspect", "--help"], standalone_mode=False)
print([name for name in sys.modules if name in %r])
"""
    modules = [f"dspine_mlx.cli.{name}" for name in COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", code % modules], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "['dspine_mlx.cli.inspect']"

"""Help and shell completion of the installed command: light, complete, offline."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

COMMANDS = [
    "generate",
    "chat",
    "convert",
    "inspect",
    "bench",
    "doctor",
    "report",
    "calibrate",
    "train",
]
HEAVY = {"mlx", "mlx_lm", "numpy", "huggingface_hub", "transformers", "matplotlib"}
HEAVY |= {"prompt_toolkit"}


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """As the installed script starts, and then the heavy modules that are loaded, on stderr."""
    script = tmp_path / "start.py"
    script.write_text(
        "import sys\n"
        "sys.argv[0] = 'dspine-mlx'\n"
        "from dspine_mlx.cli import main\n"
        "try:\n    main()\n"
        f"finally:\n    print(*sorted({HEAVY} & sys.modules.keys()), file=sys.stderr)\n"
    )
    return [sys.executable, str(script)]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=str)
def test_help_loads_nothing_heavy(command: list[str], program: list[str]) -> None:
    environment = os.environ | {"COLUMNS": "100", "TERM": "dumb"}
    result = subprocess.run(
        [*program, *command, "--help"], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stderr.split() == []
    assert f"Usage: {' '.join(['dspine-mlx', *command])} " in result.stdout
    if not command:
        listed = result.stdout.partition("Commands")[2]
        assert [name for name in [*COMMANDS, "serve"] if name not in listed] == []


def complete(program: list[str], line: str) -> list[str]:
    """What bash offers after a line."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    environment = os.environ | words | {"_DSPINE_MLX_COMPLETE": "complete_bash"}
    result = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    return result.stdout.split()


def test_bash_completes_commands_and_flags(program: list[str]) -> None:
    assert complete(program, "dspine-mlx be") == ["bench"]
    assert complete(program, "dspine-mlx re") == ["report"]
    assert complete(program, "dspine-mlx bench --conc") == ["--concurrency"]
    assert complete(program, "dspine-mlx train r") == ["run", "regenerate"]


def test_the_completion_script_is_for_this_shell_and_command(program: list[str]) -> None:
    shown = subprocess.run(
        ["bash", "-c", '"$@" --show-completion; true', "bash", *program],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "_DSPINE_MLX_COMPLETE=complete_bash" in shown
    assert shown.splitlines()[-1] == "complete -o default -F _dspine_mlx_completion dspine-mlx"
    checked = subprocess.run(["bash", "-n"], input=shown, text=True, check=False)
    assert checked.returncode == 0


def test_completion_installs_into_the_home_folder(program: list[str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    subprocess.run(
        ["bash", "-c", '"$@" --install-completion; true', "bash", *program],
        capture_output=True,
        env=os.environ | {"HOME": str(home)},
        check=True,
    )
    (script,) = (home / ".bash_completions").iterdir()
    assert str(script) in (home / ".bashrc").read_text()
    assert "_DSPINE_MLX_COMPLETE=complete_bash" in script.read_text()

"""A bad day for the command line: no home, closed or broken streams, other encodings."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dspine_mlx.cli import app, prepare_environment
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO
from tests.support import forked

pytestmark = pytest.mark.slow

PROGRAM = (sys.executable, "-m", "dspine_mlx.cli")
SAY = ("generate", "-m", "2", "--no-profile", "--quiet")
OTHER_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
Arguments = list[str | bytes]


def run(
    arguments: Arguments, environment: Mapping[str, str] | None = None, shell: str = 'exec "$@"'
) -> subprocess.CompletedProcess[bytes]:
    """The command as a shell starts it, with the environment's changes."""
    command = ["sh", "-c", shell, "sh", *PROGRAM, *arguments]
    return subprocess.run(
        command, capture_output=True, env=os.environ | (environment or {}), check=False
    )


def preloaded(
    arguments: list[str], environment: Mapping[str, str] | None = None, out: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The command where nothing but its arguments matters, or where its output goes."""
    return forked.run("-m", "dspine_mlx.cli", *arguments, env=environment, out=out)


def one_sentence(
    result: subprocess.CompletedProcess[bytes] | subprocess.CompletedProcess[str],
) -> str:
    """What is said with status 2: no traceback, one line of ours."""
    said = result.stderr if isinstance(result.stderr, str) else result.stderr.decode()
    assert result.returncode == 2, said
    (line,) = [line for line in said.splitlines() if line.startswith("dspine-mlx: ")]
    assert "Traceback" not in said
    return line


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
@pytest.mark.parametrize(
    "command", [[*SAY, "-p", "hi"], ["doctor"], ["inspect", str(DEMO / "drafter")]]
)
def test_a_user_without_a_home(command: Arguments, tmp_path: Path) -> None:
    """As in containers: HOME is not set, and no passwd entry has the user's number."""
    environment = {k: v for k, v in os.environ.items() if k != "HOME"}
    stranger = ["unshare", "-U", "--map-user=54321"]
    result = subprocess.run(
        [*stranger, *PROGRAM, *command],
        capture_output=True,
        env=environment | {"TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        check=False,
    )
    if b"unshare failed" in result.stderr:
        pytest.skip("no user namespaces here")
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "~").exists()


BYTES = b"\xff\xfe"


@pytest.mark.parametrize(
    "flag", ["-p", "--system-prompt", "--prefill-response", "--extra-eos-token"]
)
@pytest.mark.parametrize("environment", [{}, OTHER_LOCALE], ids=["UTF-8", "C"])
def test_bytes_that_are_no_text(flag: str, environment: dict[str, str]) -> None:
    prompt: Arguments = [] if flag == "-p" else ["-p", "hi"]
    said = one_sentence(run([*SAY, *prompt, flag, BYTES], environment))
    name = "--prompt" if flag == "-p" else flag
    assert said == f"dspine-mlx: {name} has bytes that are not UTF-8: '\\udcff\\udcfe'"


def test_a_prompt_in_utf8_where_the_locale_has_none() -> None:
    """The same tokens as where it has."""
    prompts = [
        json.loads(run([*SAY, "-p", "3 Äpfel 苹果", "--json"], environment).stdout)
        for environment in (OTHER_LOCALE, {"LC_ALL": "C.UTF-8"})
    ]
    assert prompts[0]["prompt_tokens"] == prompts[1]["prompt_tokens"]
    assert prompts[0]["tokens"] == prompts[1]["tokens"]


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        ('exec "$@" <&-', "standard input is closed, so '-p -' has nothing to read; use -p TEXT"),
        ('exec "$@" 0>/dev/null', "standard input can't be read: "),
        ('printf "\\377" | "$@"', "standard input is not UTF-8: "),
        ('"$@" </dev/null', "the prompt is empty; give at least one token"),
    ],
)
def test_standard_input_without_a_prompt(shell: str, message: str) -> None:
    assert one_sentence(run([*SAY, "-p", "-"], shell=shell)).startswith(f"dspine-mlx: {message}")


def test_the_home_of_nobody() -> None:
    said = one_sentence(preloaded([*SAY, "-p", "hi", "--model", "~nobody-here/model"]))
    assert said.startswith("dspine-mlx: ~nobody-here/model can't be found: ")


@pytest.mark.parametrize("shell", ['exec "$@" >&-', 'exec "$@" 2>&-'], ids=["output", "error"])
def test_a_closed_stream_is_no_failure(shell: str) -> None:
    assert run([*SAY, "-p", "hi"], shell=shell).returncode == 0


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "-p", "hi", "-m", "300"],
        ["generate", "-p", "hi", "-m", "300", "--show-accepted"],
        ["generate", "-p", "hi", "-m", "300", "--json"],
        ["inspect", str(DEMO / "drafter")],
        ["--help"],
    ],
    ids=" ".join,
)
def test_piping_into_head_ends_quietly(command: Arguments) -> None:
    result = run(command, shell='"$@" | head -c 1')
    said = result.stderr.decode()
    assert len(result.stdout) == 1
    for word in ("Traceback", "Broken", "Exception", "dspine-mlx: "):
        assert word not in said


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{{ nosuch.thing }}",
        "{{ messages[9].role }}",
    ],
)
def test_a_broken_chat_template(template: str, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(DEMO / "target", folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    result = CliRunner().invoke(app, [*SAY, "-p", "hi", "--model", str(folder)])
    assert isinstance(result.exception, InputError)
    assert "this model's chat template " in str(result.exception)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["--version"],
        ["generate", "--help"],
        ["serve", "--help"],
        ["models"],
        ["inspect", str(DEMO / "drafter")],
        [*SAY, "-p", "hi"],
        [*SAY, "-p", "hi", "--json"],
    ],
    ids=" ".join,
)
def test_an_output_without_room(command: list[str]) -> None:
    said = one_sentence(preloaded(command, out=Path("/dev/full")))
    assert said == "dspine-mlx: standard output can't be used: No space left on device"


@pytest.mark.parametrize("command", [[*SAY, "-p", "hi"], ["inspect", "."], ["doctor"]])
def test_a_current_folder_that_is_gone(command: Arguments, tmp_path: Path) -> None:
    gone = f'mkdir "{tmp_path}/x" && cd "{tmp_path}/x" && rmdir "{tmp_path}/x" && exec "$@"'
    said = one_sentence(run(command, shell=gone))
    assert said.startswith("dspine-mlx: the current folder can't be found (")


@pytest.mark.parametrize("name", ["TMPDIR", "TMP", "TEMP", "TEMPDIR"])
def test_temporary_files_have_a_place_all_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX compiles into it on the CPU; here it is a file, or missing."""
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "missing", ""):
        monkeypatch.setenv(name, str(wrong))
        prepare_environment()
        assert name not in os.environ


@pytest.mark.parametrize("streams", ["<&-", "<&- >&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_files_of_weights(streams: str) -> None:
    assert run([*SAY, "-p", "hi"], shell=f'exec "$@" {streams}').returncode == 0


@pytest.mark.parametrize("columns", ["100000000", "9" * 30])
def test_no_screen_is_that_wide(columns: str) -> None:
    result = preloaded(["--help"], {"COLUMNS": columns})
    assert result.returncode == 0
    assert max(map(len, result.stdout.splitlines())) < 1000


@pytest.mark.parametrize("port", ["65536", "-1", "70000000000"])
def test_ports_are_ports(port: str) -> None:
    assert "it must lie between 0 and 65535" in one_sentence(preloaded(["serve", "--port", port]))


def test_a_host_of_no_name() -> None:
    said = one_sentence(run(["serve", "--port", "0", "--no-profile", "--host", b"\xff"]))
    assert "--host is '\\udcff', which is no name of a host" in said


@pytest.mark.parametrize("flag", ["--model", "--prompt-cache-file"])
def test_names_that_are_too_long(flag: str) -> None:
    said = one_sentence(preloaded([*SAY, "-p", "hi", flag, "x" * 5000]))
    assert "x" * 99 in said


def test_a_home_whose_name_is_too_long() -> None:
    """Nothing is kept, and it works all the same."""
    result = preloaded([*SAY, "-p", "hi"], {"HOME": "/x" * 2500})
    assert result.returncode == 0, result.stderr[-300:]


def test_prompts_of_no_name() -> None:
    said = one_sentence(preloaded(["calibrate", "--prompts", ""]))
    assert said.startswith("dspine-mlx: there is no suite or file ")

"""Any number in any numeric flag: status 0 or 2, and in place, which ends with the interpreter if
MLX does. A failing example is printed with the blob that brings it back."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dspine_mlx.cli import app, command_named
from dspine_mlx.errors import InputError
from dspine_mlx.load import load

EDGES = [
    s * 2**k + d for k in (0, 5, 15, 16, 31, 32, 53, 63, 64) for d in (-1, 0, 1) for s in (-1, 1)
]
WHOLE = st.integers(-2, 300) | st.sampled_from(EDGES) | st.integers()
REAL = st.floats() | st.sampled_from([0.0, 1e-45, 1e-38, 1e38, 0.5, 1.0])
FLAGS: dict[str, st.SearchStrategy[int] | st.SearchStrategy[float]] = {
    "--max-kv-size": WHOLE,
    "--prefill-step-size": WHOLE,
    "--kv-bits": WHOLE,
    "--kv-group-size": WHOLE | st.sampled_from([32, 64]),
    "--quantized-kv-start": WHOLE,
    "--seed": WHOLE,
    "--top-k": WHOLE | st.sampled_from([2047, 2048, 2049]),
    "--min-tokens-to-keep": WHOLE,
    "--verify-length": WHOLE,
    "--draft-quant": WHOLE,
    "--temp": REAL,
    "--top-p": REAL,
    "--min-p": REAL,
    "--xtc-probability": REAL,
    "--xtc-threshold": REAL,
    "--patience": REAL,
}


@pytest.fixture(scope="module", autouse=True)
def loaded_once() -> None:
    """The pair's files are in the page cache before the first example."""
    load()


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    values=st.sets(st.sampled_from(sorted(FLAGS)), max_size=2).flatmap(
        lambda names: st.fixed_dictionaries({name: FLAGS[name] for name in sorted(names)})
    ),
    tokens=st.integers(-2, 4),
)
def test_any_number_in_any_flag(values: dict[str, float], tokens: int) -> None:
    flags = [f"{flag}={value!r}" for flag, value in values.items()]
    tokens = 3 if tokens == -1 else tokens  # without a limit it would go on to the context's end
    command = ["generate", "-p", "hi", f"--max-tokens={tokens}", "--no-profile", "--quiet", *flags]
    result = CliRunner().invoke(app, command)
    if isinstance(result.exception, InputError):
        assert "\n" not in str(result.exception)
    else:
        assert result.exit_code in (0, 2), result.exception


COMMANDS: dict[str, Callable[[int], list[str]]] = {
    "bench": lambda n: ["bench", "--suite", "nosuch", f"--limit={n}", f"--repeat={n}", f"-m={n}"],
    "calibrate": lambda n: ["calibrate", "--prompts", "nosuch", f"--limit={n}"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@settings(max_examples=30, deadline=None, print_blob=True)
@given(number=WHOLE)
def test_numbers_are_read_before_the_work(command: Callable[[int], list[str]], number: int) -> None:
    result = CliRunner().invoke(app, command(number))
    assert isinstance(result.exception, InputError) or result.exit_code == 2


def test_flags_of_generate_that_take_numbers_are_all_tried() -> None:
    numeric = {
        max(p.opts, key=len)
        for p in command_named("generate").params
        if type(p.default) in (int, float) and not p.is_flag
    }
    assert numeric - {"--max-tokens"} <= FLAGS.keys()

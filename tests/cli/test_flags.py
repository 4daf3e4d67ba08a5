"""Flags and arguments beside those of the installed mlx-lm, so that a new one is noticed."""

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import mlx_lm
import pytest
from mlx_lm.chat import setup_arg_parser as chat_parser
from mlx_lm.convert import configure_parser
from mlx_lm.generate import generate_step, setup_arg_parser, speculative_generate_step
from typer.core import TyperOption
from typer.testing import CliRunner

import dspine_mlx
from dspine_mlx.cli import app, command_named
from dspine_mlx.cli.chat import chat
from dspine_mlx.cli.convert import convert
from dspine_mlx.cli.generate import generate
from dspine_mlx.cli.options import repeated
from dspine_mlx.errors import InputError

# flag -> ours, where a default differs on purpose
DEFAULTS: dict[str, dict[str, Any]] = {
    "generate": {"--prompt": None, "--max-tokens": 256, "--num-draft-tokens": None},
    "convert": {"--hf-path": None, "--mlx-path": "mlx_drafter"},
    "chat": {"--model": None, "--xtc-threshold": 0.1},
}
FUNCTIONS: dict[str, Callable[..., None]] = {
    "generate": generate,
    "convert": convert,
    "chat": chat,
}


def options(command: str) -> dict[str, TyperOption]:
    """Our options by flag."""
    found = [p for p in command_named(command).params if isinstance(p, TyperOption)]
    return {flag: option for option in found for flag in option.opts}


def same_default(theirs: Any, ours: Any) -> bool:
    """An empty JSON object, an empty list and nothing are the same."""
    empty: tuple[Any, ...] = (None, (), [], "{}")
    return theirs == ours or str(theirs) == str(ours) or (theirs in empty and ours in empty)


def kind_of(command: str, name: str | None) -> type:
    """What an option's value is, paths being text and lists their items."""
    assert name is not None
    hint = get_type_hints(FUNCTIONS[command])[name]
    kinds = {k for part in get_args(hint) or (hint,) for k in get_args(part) or (part,)}
    (kind,) = kinds - {type(None)}
    return str if kind is Path else kind


@pytest.mark.parametrize(
    ("command", "parser"),
    [("generate", setup_arg_parser), ("convert", configure_parser), ("chat", chat_parser)],
)
def test_every_flag_of_mlx_lm_is_ours(
    command: str, parser: Callable[[], argparse.ArgumentParser]
) -> None:
    """By name, kind, number of values and default."""
    ours = options(command)
    for action in parser()._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        assert set(action.option_strings) <= ours.keys(), action.option_strings
        flag = max(action.option_strings, key=len)
        option = ours[flag]
        if isinstance(action, argparse._StoreTrueAction):
            assert option.is_flag, flag
            assert option.default is False
            continue
        assert not option.is_flag, flag
        assert option.multiple == (action.nargs == "+"), flag
        assert kind_of(command, option.name) == (
            action.type if action.type in (int, float) else str
        )
        default = DEFAULTS[command].get(flag, action.default)
        assert same_default(default, option.default), flag


REFUSED = [
    (["generate", "-p", "a", "--image", "a.png", "b.png"], "drafters read text"),
    (["chat", "--pipeline"], "needs several machines: start this command with mlx.launch"),
    (["convert", "--hf-path", "x", "--quant-predicate", "mixed_2_6"], "packed alike"),
    (["convert", "--hf-path", "x", "-d"], "can't bring a drafter's exact weights back"),
    (["convert", "--hf-path", "x", "--trust-remote-code"], "has no code to run"),
]


@pytest.mark.parametrize(("arguments", "reason"), REFUSED, ids=str)
def test_what_makes_no_sense_is_refused_with_the_reason(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, InputError)
    assert reason in str(result.exception)


def test_lists_take_several_values_as_argparse_does() -> None:
    names = {"--eos", "--image"}
    given = ["--eos", "a", "b", "-p", "x", "--image", "c", "--eos", "d", "--temp", "1"]
    parser = argparse.ArgumentParser()
    for flag in ("-p", "--temp"):
        parser.add_argument(flag)
    for flag in ("--eos", "--image"):
        parser.add_argument(flag, nargs="+", action="extend")
    wanted = vars(parser.parse_args(given))
    assert vars(parser.parse_args(repeated(given, names))) == wanted
    spread = ["--eos", "a", "--eos", "b", "-p", "x", "--image", "c", "--eos", "d", "--temp", "1"]
    assert repeated(given, names) == spread
    assert repeated(["--eos", "a", "-"], names) == ["--eos", "a", "--eos", "-"]


def parameters(*functions: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Arguments by name; those that only collect others are left out."""
    found: dict[str, inspect.Parameter] = {}
    for function in functions:
        found |= inspect.signature(function).parameters
    return {n: p for n, p in found.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}


def test_stream_generate_has_mlx_lms_arguments() -> None:
    theirs = parameters(generate_step, mlx_lm.stream_generate, speculative_generate_step)
    del theirs["input_embeddings"]  # of images and the like: drafters read text
    ours = parameters(dspine_mlx.stream_generate)
    assert theirs.keys() <= ours.keys()
    # prefill_step_size: mlx-lm has two; the others are a drafter's, which need not be there
    own = {"prompt_cache", "sampler", "prefill_step_size", "draft_model", "num_draft_tokens"}
    for name in theirs.keys() - own:
        assert ours[name].default == theirs[name].default, name
    assert ours["draft_model"].default is ours["num_draft_tokens"].default is None

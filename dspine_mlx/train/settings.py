"""Settings by name: --set loss.ce_weight=0.5 to fields of the config classes, checked."""

import json
from collections.abc import Mapping
from dataclasses import replace
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dspine_mlx.errors import InputError

SECTIONS = ("train", "loss", "drafter")
MOST = 1e9  # of a number
Config = TypeVar("Config")


def parse_settings(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Parse SECTION.NAME=VALUE texts, by section. A value is JSON; anything else is a string."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for text in texts:
        name, equals, value = text.partition("=")
        section, _, key = name.partition(".")
        if not equals or not key or section not in sections:
            raise InputError(
                f"--set is {text!r}; it must be SECTION.NAME=VALUE with a section of "
                f"{', '.join(SECTIONS)}"
            )
        try:
            sections[section][key] = json.loads(value)
        except (ValueError, RecursionError):
            sections[section][key] = value
    return sections


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy of a config dataclass with some fields changed, their names and types checked."""
    hints = get_type_hints(type(config))
    for name, value in changes.items():
        if name not in hints:
            raise InputError(f"there is no setting {name}; there are {', '.join(hints)}")
        if not fits(hints[name], value):
            wanted = hints[name].__name__ if isinstance(hints[name], type) else str(hints[name])
            raise InputError(f"{name} is {value!r}; it must be {wanted.replace('typing.', '')}")
    tuples = {k: tuple(v) for k, v in changes.items() if isinstance(v, list)}
    return replace(config, **dict(changes) | tuples)  # type: ignore[type-var]


def fits(hint: Any, value: Any) -> bool:
    """Whether a JSON value is of an annotated type; an int is also a float."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (Union, UnionType):
        return any(fits(arg, value) for arg in args)
    if origin is tuple:
        if not isinstance(value, list | tuple) or args[-1] is not ... and len(args) != len(value):
            return False
        return all(fits(args[0], v) for v in value)
    if hint is float:
        return type(value) in (int, float) and -MOST <= value <= MOST  # no NaN
    if hint is int:
        return type(value) is int and -MOST <= value <= MOST
    return value is None if hint is type(None) else type(value) is hint

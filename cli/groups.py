"""Typer for commands of many options: dataclasses that it sees field by field, help that flows."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import typer

Command = Callable[..., None]


def grouped(command: Command) -> Command:
    """A command whose dataclass arguments are options, one per field, with the field's default."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = [
        option
        for argument in inspect.signature(command).parameters.values()
        for option in (
            options_of(groups[argument.name])
            if argument.name in groups
            else [argument.replace(kind=argument.KEYWORD_ONLY, annotation=hints[argument.name])]
        )
    ]

    @wraps(command)
    def flat(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {option.name: option.annotation for option in parameters}
    return flat


def options_of(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default_of(field),
            annotation=hints[field.name],
        )


class Commands(typer.Typer):
    """A Typer whose help has paragraphs that fit the terminal, not the source's lines."""

    def command(self, *args: Any, **settings: Any) -> Callable[[Any], Any]:
        def register(function: Any) -> Any:
            text = settings.pop("help", None) or inspect.getdoc(function) or ""
            flowing = "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
            return super(Commands, self).command(*args, help=flowing, **settings)(function)

        return register


def default_of(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default

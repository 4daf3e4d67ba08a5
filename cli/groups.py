"""Typer for commands of many options: named tuples that it sees field by field, help that flows."""

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import typer

Command = Callable[..., None]


def grouped(command: Command) -> Command:
    """A command whose named tuples are options, one per field, with the field's default."""
    arguments = inspect.signature(command).parameters.values()
    groups = {a.name: a.annotation for a in arguments if is_group(a.annotation)}
    parameters = [
        option
        for argument in arguments
        for option in (
            options_of(argument.annotation)
            if argument.name in groups
            else [argument.replace(kind=argument.KEYWORD_ONLY)]
        )
    ]

    @wraps(command)
    def flat(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field: values.pop(field) for field in kind._fields})
        command(**values)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {option.name: option.annotation for option in parameters}
    return flat


def is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, tuple)


def options_of(group: Any) -> Iterator[inspect.Parameter]:
    for field, annotation in group.__annotations__.items():
        yield inspect.Parameter(
            field,
            inspect.Parameter.KEYWORD_ONLY,
            default=group._field_defaults.get(field, inspect.Parameter.empty),
            annotation=annotation,
        )


class Commands(typer.Typer):
    """A Typer whose help has paragraphs that fit the terminal, not the source's lines."""

    def __init__(self, add_completion: bool = False, **settings: Any) -> None:
        super().__init__(add_completion=add_completion, **settings)

    def command(self, *args: Any, **settings: Any) -> Callable[[Any], Any]:
        def register(function: Any) -> Any:
            text = settings.pop("help", None) or inspect.getdoc(function) or ""
            flowing = "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
            return super(Commands, self).command(*args, help=flowing, **settings)(function)

        return register

"""Commands on several machines: rank 0 runs them, the other ranks follow it."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dspine_mlx.cli.groups import Command, options_of
from dspine_mlx.cli.options import PAIR

if TYPE_CHECKING:
    from dspine_mlx.group.meet import Group

STARTED = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # what launchers tell their processes
# The group that this process leads while a command runs.
leads: "ContextVar[Group | None]" = ContextVar("leads", default=None)


class Ranks(NamedTuple):
    """How a target is split over machines."""

    pipeline: Annotated[
        bool,
        typer.Option(
            "--pipeline",
            help="With mlx.launch: split the target by layers, not by tensors.",
            rich_help_panel=PAIR,
        ),
    ] = False
    patience: Annotated[
        float,
        typer.Option(
            help="With mlx.launch: seconds to wait for another machine before all end.",
            rich_help_panel=PAIR,
            min=1.0,
        ),
    ] = 300.0


def on_every_rank(command: Command) -> Command:
    """A command that mlx.launch may start on several machines: only rank 0 runs its body."""
    options = inspect.signature(command)
    parameters = [*options.parameters.values(), *options_of(Ranks)]

    @wraps(command)
    def run(*, pipeline: bool, patience: float, **values: Any) -> None:
        with leading(pipeline, patience, values["model"], values.get("trust_remote_code", False)):
            command(**values)

    run.__signature__ = options.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in parameters}
    return run


@contextmanager
def leading(pipeline: bool, patience: float, model: str | None, trusted: bool) -> Iterator[None]:
    """Context of a command's body. The ranks that follow do so here, and end."""
    if not pipeline and not any(name in os.environ for name in STARTED):
        yield  # without large imports
        return
    from dspine_mlx.group.meet import meet
    from dspine_mlx.load import DEMO

    group = meet(pipeline, patience)
    if group is None:
        yield
        return
    if group.follows:
        group.follow(model or str(DEMO / "target"), {"trust_remote_code": trusted})
    with group.leading():
        token = leads.set(group)
        try:
            yield
        finally:
            leads.reset(token)


def of_another_rank() -> bool:
    """Whether this process only follows, so that rank 0 says what is wrong."""
    if not any(name in os.environ for name in STARTED):
        return False
    from dspine_mlx.group.meet import follows

    return follows()

"""Printing: consoles of any width that never cut a figure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from rich.progress import Progress

Step = TypeVar("Step")

DEFAULT, PIPED = 80, 200  # columns: of a terminal that does not tell its width, and of a file
NARROWEST = 20  # columns that a terminal may have
GAP = 2  # blanks between columns


def console(stderr: bool = False) -> Console:
    """A console on standard output or error; rich reads NO_COLOR, FORCE_COLOR and COLUMNS."""
    screen = Console(stderr=stderr, highlight=False)
    if not screen.is_terminal:
        screen.width = max(screen.width, PIPED)
    elif screen.width < NARROWEST:
        screen.width = DEFAULT
    return screen


@contextmanager
def working(what: str = "") -> Iterator[Callable[[str], None]]:
    """Say on standard error what is being done, until it is; silent where that is piped. The
    block is given a function that says what comes next."""
    screen = console(stderr=True)
    status = screen.status("") if screen.is_terminal else None

    def say(now: str) -> None:
        if status is not None:
            status.update(f"{now} ...")
            status.start()

    try:
        if what:
            say(what)
        yield say
    finally:
        if status is not None:
            status.stop()


def tracked(steps: Iterable[Step], what: str, total: int) -> Iterable[Step]:
    """The steps, counted by a bar on standard error; silent where that is piped."""
    from rich.progress import track

    screen = console(stderr=True)
    return track(steps, what, total, console=screen, transient=True, disable=not screen.is_terminal)


def print_table(screen: Console, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a column of labels and columns of figures. Figures that don't fit go into further
    tables below, with the labels repeated."""
    columns = [[str(row[i]) for row in rows] for i in range(len(names))]
    widths = [
        GAP + max(map(cell_len, (name, *cells))) for name, cells in zip(names, columns, strict=True)
    ]
    for shown in split(widths, screen.width):
        table = Table(box=None, padding=(0, GAP, 0, 0))
        for i in (0, *shown):
            table.add_column(names[i], justify="right" if i else "left", overflow="fold")
        for i in range(len(rows)):
            table.add_row(*(columns[j][i] for j in (0, *shown)))
        screen.print(table, markup=False)


def split(widths: Sequence[int], room: int) -> list[list[int]]:
    """Group the columns after the first so that each group fits beside it; none is empty."""
    groups: list[list[int]] = []
    used = 0
    for i, width in enumerate(widths[1:], 1):
        if not groups or used + width > room:
            groups.append([])
            used = widths[0]
        groups[-1].append(i)
        used += width
    return groups


def print_bars(screen: Console, names: Sequence[str], rows: Sequence[tuple[str, float]]) -> None:
    """Print a label, a bar and a figure per row; the longest bar fills the room left, up to 40."""
    label, value = names
    figures = [f"{figure:g}" if figure == int(figure) else f"{figure:.2f}" for _, figure in rows]
    taken = max(cell_len(name) for name in (label, *(row[0] for row in rows)))
    taken += max(map(cell_len, (value, *figures))) + 3 * GAP
    longest, most = max(1, min(40, screen.width - taken)), max(figure for _, figure in rows)
    table = Table(box=None, padding=(0, GAP, 0, 0), show_header=any(names))
    table.add_column(label, overflow="fold")
    table.add_column(value, justify="right")
    table.add_column("")
    for (name, figure), text in zip(rows, figures, strict=True):
        table.add_row(name, text, "█" * round(longest * figure / most) if most else "")
    screen.print(table, markup=False)


def progress_bar() -> "Progress":
    """A bar of things done and to do, on standard error; none unless that is a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    screen = console(stderr=True)
    what = TextColumn("{task.description}")
    columns = (what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=screen, disable=not screen.is_terminal)

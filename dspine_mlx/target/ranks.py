"""The other ranks of a target that is split, as generation sees them; one process has none."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Ranks(Protocol):
    """Who else has a part of the target.

    size: how many ranks there are. structure: the whole target's, as in `verify_length.store`; ""
    where this process has all of it. lost: one of them is gone, so nothing may be fed any more.
    key: identifies the split, for files of times.
    """

    size: int
    structure: str

    @property
    def lost(self) -> bool: ...

    @property
    def key(self) -> dict[str, str]: ...

    def share(self, **job: Any) -> None:
        """Tell the others what to do next."""

    def together(self, **job: Any) -> AbstractContextManager[None]:
        """Context of work that all ranks do by themselves. Whoever leaves it before its end has
        lost them."""

    def waiting(self) -> AbstractContextManager[None]:
        """Context of a wait for a person, after which there may be more for the others to do."""

    def agreed(self, holds: bool) -> bool:
        """Whether something holds on every rank; all ranks must ask."""

    def gathered(self, word: str) -> list[str]:
        """Every rank's word, in the order of ranks; all ranks must ask."""

    def arrived(self) -> None:
        """The newest forward's result has been read: nothing is waited for."""

    def note(self, error: RuntimeError) -> None:
        """Raise `LostRank` if the error says that another rank is gone."""


class Alone:
    """One process: nobody to tell."""

    size, structure, lost = 1, "", False
    key: dict[str, str] = {}

    def share(self, **job: Any) -> None: ...

    def together(self, **job: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def agreed(self, holds: bool) -> bool:
        return holds

    def gathered(self, word: str) -> list[str]:
        return [word]

    def arrived(self) -> None: ...

    def note(self, error: RuntimeError) -> None: ...

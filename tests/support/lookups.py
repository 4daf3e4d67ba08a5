"""Lookups that know the text, and policies that offer all they find."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module

import pytest

from dspine_mlx.round.lookup import COPIED, Copy, CopyChances, Lookup
from dspine_mlx.round.policy import Fixed
from dspine_mlx.round.select import Draft

generation = import_module("dspine_mlx.generate")  # the package's `generate` is its function


@dataclass
class Copying(Fixed):
    """Offers every copy, whole: after this many drafted tokens, or in place of a draft (None)."""

    tokens: int = COPIED
    copies: CopyChances | None = field(default_factory=CopyChances)
    after: int | None = None

    def copy_pays(self, copy: Copy, depth: int, running: int = 0) -> bool:
        return self.after is None

    def choose(
        self, draft: Draft, lookup: Lookup | None, limit: int, depth: int, seconds: float
    ) -> tuple[Copy | None, int]:
        copy = draft.copied
        if copy is None and lookup is not None:
            assert self.after is not None
            copy = lookup.draft(COPIED - self.after, draft.tokens.tolist()[: self.after])
        count = len(draft.tokens) if copy is None else copy.after + len(copy.tokens)
        return copy, min(self.tokens, limit, count)


class Told(Lookup):
    """A lookup that knows the text and spoils every nth token of its copies. It has none at every
    `none` th token."""

    def __init__(self, text: list[int], nth: int, none: int = 0):
        super().__init__()
        self.text, self.nth, self.none = text, nth, none

    def draft(self, count: int, after: Sequence[int] = ()) -> Copy | None:
        start = len(self.tokens)
        assert self.tokens.tolist() == self.text[:start]  # all tokens so far, and no other
        start += len(after)
        if count < 1 or (self.none and start % self.none < 4):
            return None
        right = self.text[start : start + count]
        right += [0] * (count - len(right))
        copied = [t if (start + i) % self.nth else 5 for i, t in enumerate(right)]
        return Copy(3, copied, len(after))


def use(lookup: Lookup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next texts be looked up in this one."""
    monkeypatch.setattr(generation, "Lookup", lambda stops, tokens: lookup)

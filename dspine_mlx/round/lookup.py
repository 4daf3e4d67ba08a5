"""Lookup drafts: what followed the newest tokens earlier in the text.

Text that repeats itself (edits of code, quotes, JSON) is copied from there without a forward. An
index holds the places of all n-grams of GRAM tokens. Each match is extended backwards. The longest
match is copied; among equals, the newest.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

GRAM = 3  # tokens that must match; shorter matches predict nothing
LONGEST = 32  # tokens that a match is extended to, backwards
PLACES = 8  # of one n-gram that are compared, newest first
LENGTHS = (3, 4, 6, 9, 12, 16, 24, 32)  # of matches; lengths in between share a chance
MEMORY = 64  # tokens over which a match length's chance fades
SLOTS = 1 << 17  # of the table, a power of 2: half a megabyte per text
COPIED = 15  # tokens that a round may offer, whatever the drafter's block


class Copy(NamedTuple):
    """A lookup draft. The match grows by each token that is accepted."""

    match: int  # tokens before it that agree with the newest
    tokens: list[int]  # up to the first that ends the text
    after: int = 0  # drafted tokens that it follows
    disputed: bool = False  # another place that matches goes on with another token


class Lookup:
    """The tokens of a text, and the places of its n-grams.

    A place is the number of tokens up to the end of an n-gram, where its continuation begins. The
    table has the newest place of each hash, and `earlier` the one before each place; 0 is none.

    stops: tokens that end a text. chances: what the text's own tokens teach about copies.
    """

    def __init__(
        self, stops: frozenset[int | None] = frozenset(), tokens: Iterable[int] = ()
    ) -> None:
        self.stops = stops
        self.chances: CopyChances | None = None
        self.watched: Copy | None = None  # the newest copy, as long as the text agrees with it
        self.seen = 0  # tokens of the watched copy that the text has
        # Of each watched token: how often the text went on with it, and with another.
        self.outcomes: dict[int, tuple[int, int]] = {}
        self.tokens = array("i")
        self.earlier = array("i", [0] * GRAM)
        self.newest = array("i", bytes(4 * SLOTS))
        self.add(tokens)

    def add(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text. From now on `find` sees the n-gram before each of them."""
        if self.watched is not None:
            tokens = list(tokens)
            self.compare(tokens)
        text, earlier, newest = self.tokens, self.earlier, self.newest
        a, b, c = ([-1] * GRAM + text[-GRAM:].tolist())[-GRAM:]
        for place, token in enumerate(tokens, len(text)):
            if place >= GRAM:
                slot = slot_of(a, b, c)
                earlier.append(newest[slot])
                newest[slot] = place
            a, b, c = b, c, token
            text.append(token)

    def find(self, after: Sequence[int] = ()) -> tuple[int, int]:
        """The length of the longest match of the text + `after`, and its place; (0, 0) is none."""
        return longest(self.matches(after))

    def matches(self, after: Sequence[int] = ()) -> list[tuple[int, int]]:
        """The lengths and places of the newest matches of the text + `after`, newest first."""
        tail = [*self.tokens[-LONGEST:], *after][-LONGEST:][::-1]
        if len(tail) < GRAM:
            return []
        found, place = [], self.newest[slot_of(tail[2], tail[1], tail[0])]
        for _ in range(PLACES):
            if not place:
                break
            length = self.matched(tail, place)
            if length >= GRAM:
                found.append((length, place))
            place = self.earlier[place]
        return found

    def matched(self, tail: list[int], place: int) -> int:
        """How many tokens before a place equal the tail's; the tail is given backwards."""
        text, n = self.tokens, 0
        for token in tail[:place]:
            if text[place - 1 - n] != token:
                break
            n += 1
        return n

    def draft(self, count: int, after: Sequence[int] = ()) -> Copy | None:
        """Copy the count tokens that followed the longest match of the text + `after`. A copy that
        reaches the end continues with itself. None: nothing matches."""
        found = self.matches(after)
        if not found or count < 1:
            return None
        length, place = longest(found)
        disputed = any(self.tokens[other] != self.tokens[place] for _, other in found)
        copied = [*self.tokens[place : place + count], *after][:count]
        period = len(copied)
        tokens = [copied[i % period] for i in range(count)]
        end = next((i for i, token in enumerate(tokens, 1) if token in self.stops), count)
        return Copy(length, tokens[:end], len(after), disputed)

    def watch(self) -> Copy | None:
        """Copy what followed the newest tokens, to be compared with what comes."""
        self.watched, self.seen = self.draft(COPIED), 0
        return self.watched

    def splices(self, drafted: Sequence[int]) -> Iterator[Copy]:
        """Copies that follow some of the drafted tokens and leave the draft there, in order."""
        for n in range(len(drafted) + 1):
            copy = self.draft(COPIED - n, drafted[:n])
            if copy is not None and copy.tokens[:1] != [*drafted[n : n + 1]]:
                yield copy

    def whole(self) -> list[Copy]:
        """The copy that follows the newest tokens, if there is one."""
        copy = self.draft(COPIED)
        return [] if copy is None else [copy]

    def compare(self, tokens: Iterable[int]) -> None:
        """Learn whether the watched copy's next tokens are the text's."""
        for token in tokens:
            if self.watched is None:
                return
            copied = self.watched.tokens[self.seen]
            right, outcomes = copied == token, self.outcomes.get(copied, (0, 0))
            self.outcomes[copied] = (outcomes[0] + right, outcomes[1] + (not right))
            if self.chances is not None:
                self.chances.learn(self.watched.match + self.seen, right)
            self.seen += 1
            if not right or self.seen == len(self.watched.tokens):
                self.watched = None


def longest(found: list[tuple[int, int]]) -> tuple[int, int]:
    """The longest of matches, the first of equals; (0, 0) of none."""
    return max(found, key=lambda match: match[0], default=(0, 0))


def slot_of(a: int, b: int, c: int) -> int:
    """A place in the table for the n-gram (multiplicative hashing; collisions are compared)."""
    return ((a * 0x9E3779B1 + b * 0x85EBCA77 + c * 0xC2B2AE3D) >> 11) & (SLOTS - 1)


class CopyChances:
    """How often a copied token is accepted, by the length of the match before it.

    Each length starts from 1 - 1/n, worth PRIOR tokens. Rounds that offered something else are
    learnt from too, and so are plain tokens: the text shows whether the copy would have been right.
    """

    PRIOR = 3.0

    def __init__(self) -> None:
        self.tried = [self.PRIOR] * len(LENGTHS)
        self.accepted = [self.PRIOR * (1 - 1 / n) for n in LENGTHS]

    def of(self, copy: Copy) -> list[float]:
        """Chance of each token, given that the ones before it are accepted."""
        bins = (bin_of(copy.match + i) for i in range(len(copy.tokens)))
        return [self.accepted[i] / self.tried[i] for i in bins]

    def learn(self, match: int, right: bool) -> None:
        """A token copied after a match of this length was right, or not."""
        b, kept = bin_of(match), 1 - 1 / MEMORY
        self.tried[b] = kept * self.tried[b] + 1
        self.accepted[b] = kept * self.accepted[b] + right


def bin_of(match: int) -> int:
    """Index of the last of LENGTHS that the match reaches."""
    return sum(n <= match for n in LENGTHS) - 1

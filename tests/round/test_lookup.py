"""The lookup index against a search by hand, and what copies' chances learn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine_mlx.round.lookup import (
    COPIED,
    GRAM,
    LENGTHS,
    LONGEST,
    PLACES,
    Copy,
    CopyChances,
    Lookup,
)

Tokens = list[int]
texts = st.lists(st.integers(0, 2), max_size=60)


def longest_match(text: Tokens, after: Tokens) -> tuple[int, int]:
    """The longest common suffix of text + after and of text[:place], among the newest PLACES that
    share GRAM tokens; the newest of equals."""
    whole, found = text + after, []
    for place in range(len(text) - 1, GRAM - 1, -1):
        n = 0
        while n < min(place, len(whole), LONGEST) and text[place - 1 - n] == whole[-1 - n]:
            n += 1
        if n >= GRAM:
            found.append((n, place))
    return max(found[:PLACES], default=(0, 0))


@given(first=texts, second=texts, after=st.lists(st.integers(0, 2), max_size=5))
def test_the_longest_match_is_found(first: Tokens, second: Tokens, after: Tokens) -> None:
    lookup = Lookup()
    lookup.add(first)
    lookup.add(second)
    assert lookup.find(after) == longest_match(first + second, after)


@given(text=texts, count=st.integers(1, 20), after=st.lists(st.integers(0, 2), max_size=5))
def test_a_copy_goes_on_as_if_it_had_been_written(text: Tokens, count: int, after: Tokens) -> None:
    """Each copied token is the one at its distance before it, also past the end of the text."""
    lookup = Lookup()
    lookup.add(text)
    copy, (length, place) = lookup.draft(count, after), longest_match(text, after)
    if not length:
        assert copy is None
        return
    assert copy is not None
    assert (copy.match, len(copy.tokens)) == (length, count)
    whole, distance = text + after, len(text + after) - place
    for token in copy.tokens:
        assert token == whole[-distance]
        whole.append(token)


def test_places_beyond_the_newest_are_not_compared() -> None:
    """A longer match before PLACES newer ones is not seen; with one newer match fewer it is."""
    old, new = [7, 8, 1, 2, 3, 9], [1, 2, 3, 4]
    for count, match in ((PLACES, 3), (PLACES - 1, 5)):
        lookup = Lookup()
        lookup.add(old + [t for i in range(count) for t in (*new, 100 + i)] + [7, 8, 1, 2, 3])
        assert lookup.find()[0] == match


def test_large_ids_and_collisions() -> None:
    """All n-grams of a text of distinct tokens are found; no other one is."""
    text = [37 * i % 200_003 for i in range(50_000)]
    lookup = Lookup()
    lookup.add(text)
    for place in range(GRAM, len(text), 997):
        assert lookup.find(text[place - GRAM : place]) == (GRAM, place)
        assert lookup.find([text[place - 1], text[place - 3], text[place - 2]]) == (0, 0)


def test_a_copy_ends_with_a_stop_token() -> None:
    lookup = Lookup(frozenset({7}))
    lookup.add([1, 2, 3, 5, 6, 7, 8, 1, 2, 3])
    assert lookup.draft(5) == Copy(3, [5, 6, 7])
    assert lookup.draft(2) == Copy(3, [5, 6])


@given(text=texts, drafted=st.lists(st.integers(0, 2), max_size=8))
def test_splices_leave_the_draft_where_they_begin(text: Tokens, drafted: Tokens) -> None:
    """Each is the copy after its drafted tokens, and none that the draft itself begins with is
    missing."""
    lookup = Lookup()
    lookup.add(text)
    found = {copy.after: copy for copy in lookup.splices(drafted)}
    for n in range(len(drafted) + 1):
        copy = lookup.draft(COPIED - n, drafted[:n])
        if copy is None or copy.tokens[0] == (drafted + [-1])[n]:
            assert n not in found
        else:
            assert found[n] == copy._replace(after=n)


def test_chances_start_from_the_match() -> None:
    assert CopyChances().of(Copy(3, [5, 6, 7])) == pytest.approx([2 / 3, 3 / 4, 3 / 4])
    assert CopyChances().of(Copy(LONGEST, [5] * 3)) == pytest.approx([1 - 1 / LENGTHS[-1]] * 3)


def test_a_text_teaches_the_chances_of_its_copies() -> None:
    """After 1 2 3 came 5 6 7. Where it comes again, 5 is right, 6 is not; 7 is not compared."""
    lookup, chances = Lookup(), CopyChances()
    lookup.chances = chances
    lookup.add([1, 2, 3, 5, 6, 7, 9, 1, 2, 3])
    assert lookup.watch() is not None
    lookup.add([5])
    lookup.add([8, 7, 7])
    prior = CopyChances()
    assert chances.of(Copy(3, [5])) > prior.of(Copy(3, [5]))
    assert chances.of(Copy(4, [5])) < prior.of(Copy(4, [5]))
    assert chances.tried[2:] == prior.tried[2:]


def test_chances_follow_what_came() -> None:
    chances = CopyChances()
    for _ in range(200):
        for match, right in ((3, True), (4, True), (5, False)):
            chances.learn(match, right)
    learnt = chances.of(Copy(3, [5, 6, 7]))
    assert learnt[0] > 0.99
    assert 0.4 < learnt[1] < 0.6  # after matches of 4 and of 5, one accepted and one not
    assert learnt[2] == learnt[1]
    assert chances.of(Copy(9, [5])) == CopyChances().of(Copy(9, [5]))
    for _ in range(20):
        chances.learn(3, False)
    assert chances.of(Copy(3, [5]))[0] < 0.8


def test_lookups_of_text_without_repeats_lose_their_chances() -> None:
    """A few dozen rounds in which a short match was followed by something else."""
    chances = CopyChances()
    for _ in range(36):
        chances.learn(3, False)
    assert chances.of(Copy(3, [5]))[0] < 0.06

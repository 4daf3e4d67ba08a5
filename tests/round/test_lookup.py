"""The lookup index against a search by hand, and what copies' chances learn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine_mlx.round.lookup import GRAM, LENGTHS, LONGEST, PLACES, Copy, CopyChances, Lookup

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
    """A longer match before PLACES newer ones is out of sight, and one fewer brings it back."""
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


def test_chances_start_from_the_match_and_end_with_a_stop_token() -> None:
    chances = CopyChances().of(Copy(3, [5, 6, 7, 8]), frozenset({7}))
    assert chances == pytest.approx([2 / 3, 3 / 4, 3 / 4, 0])
    assert CopyChances().of(Copy(LONGEST, [5] * 3)) == pytest.approx([1 - 1 / LENGTHS[-1]] * 3)


def test_chances_follow_what_came() -> None:
    chances = CopyChances()
    copy = Copy(3, [5, 6, 7])
    for _ in range(200):
        chances.learn(copy, [5, 6, 1])
    learnt = chances.of(copy)
    assert learnt[0] > 0.99
    assert 0.4 < learnt[1] < 0.6  # after matches of 4 and of 5, one accepted and one not
    assert learnt[2] == learnt[1]
    assert chances.of(Copy(9, [5])) == CopyChances().of(Copy(9, [5]))
    for _ in range(20):
        chances.learn(copy, [1])
    assert chances.of(copy)[0] < 0.8


def test_a_text_that_ends_teaches_no_more_than_it_has() -> None:
    chances = CopyChances()
    chances.learn(Copy(3, [5, 6, 7]), [5])
    assert chances.of(Copy(3, [5, 6]))[1] == CopyChances().of(Copy(3, [5, 6]))[1]


def test_lookups_of_text_without_repeats_lose_their_chances() -> None:
    """A few dozen rounds in which a short match was followed by something else."""
    chances = CopyChances()
    for _ in range(36):
        chances.learn(Copy(3, [5, 6]), [1, 2])
    assert chances.of(Copy(3, [5]))[0] < 0.06

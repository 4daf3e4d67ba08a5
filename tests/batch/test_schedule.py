"""The schedule of rows against exhaustive search."""

from collections.abc import Callable
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.batch.schedule import best, padded, planned

chance = st.floats(0.0, 1.0)


def survival(chances: list[list[float]]) -> list[list[float]]:
    rows = []
    for own in chances:
        row, product_ = [], 1.0
        for c in own:
            product_ *= c
            row.append(product_)
        rows.append(row)
    return rows


texts = st.lists(st.lists(chance, max_size=4), min_size=1, max_size=3).map(survival)
# Seconds of 1, 2, ... rows; a forward may even be cheaper with a row more.
curves = st.lists(st.floats(0.1, 3.0), min_size=15, max_size=15)


def tokens(rows: list[list[float]], lengths: list[int]) -> float:
    return len(rows) + sum(sum(row[:n]) for row, n in zip(rows, lengths, strict=True))


def exhaustive(
    rows: list[list[float]],
    curve: list[float],
    per_token: float,
    fed: Callable[[list[int]], int],
) -> float:
    choices = [list(c) for c in product(*(range(len(row) + 1) for row in rows))]
    return max(per_token * tokens(rows, c) - curve[fed(c) - 1] for c in choices)


@settings(max_examples=150, deadline=None)
@given(texts, curves, st.floats(0.0, 4.0))
def test_padded_rows_are_the_best_of_all_lengths(
    rows: list[list[float]], curve: list[float], per_token: float
) -> None:
    def fed(lengths: list[int]) -> int:
        return len(lengths) * (1 + max(lengths))

    lengths, count, expected = best(padded(rows), lambda n: curve[n - 1], per_token)
    assert all(0 <= n <= len(row) for n, row in zip(lengths, rows, strict=True))
    assert count >= fed(lengths)
    assert abs(expected - tokens(rows, lengths)) < 1e-9
    value = per_token * expected - curve[count - 1]
    assert value >= exhaustive(rows, curve, per_token, fed) - 1e-9


def test_steps_in_the_costs_are_looked_across() -> None:
    """The second row costs as much as the first four together: stopping there would be myopic."""
    seconds = {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0}
    assert best(padded([[0.9, 0.8, 0.7]]), lambda n: seconds[n], 1.0)[0] == [3]
    assert best(padded([[0.9, 0.05, 0.01]]), lambda n: seconds[n], 1.0)[0] == [0]


def test_a_text_near_its_end_offers_what_it_may() -> None:
    lengths, rows, _ = best(padded([[0.9, 0.9, 0.9], [0.9], []]), lambda n: 0.0, 1.0)
    assert (lengths, rows) == ([3, 1, 0], 12)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.floats(0.0, 4.0))
def test_the_block_is_the_best_of_all_widths(
    data: st.DataObject, B: int, R: int, M: int, per_token: float
) -> None:
    """Against every width, and every length of every one of the rounds that may come."""
    chances = data.draw(st.lists(chance, min_size=B * R * M, max_size=B * R * M))
    seconds = data.draw(
        st.lists(st.floats(0.1, 3.0), min_size=2 * M + 1, max_size=2 * M + 1), "seconds"
    )
    rounds = np.array(chances).reshape(B, R, M).cumprod(axis=-1)
    draft, verify = np.array(seconds[:M]), np.array(seconds[M:])
    plan = planned(
        rounds, np.tile(draft, (B, 1)), verify, per_token
    )  # texts are free: all are drafted

    def value(width: int, lengths: tuple[int, ...]) -> float:
        each = [per_token * (B + rounds[:, r, :n].sum()) - verify[n] for r, n in enumerate(lengths)]
        return sum(each) / R - draft[width - 1]

    values = {
        width: max(value(width, lengths) for lengths in product(range(width + 1), repeat=R))
        for width in range(1, M + 1)
    }
    expected = per_token * plan.tokens.sum() - plan.seconds
    assert abs(expected - values[plan.slots]) < 1e-9
    assert values[plan.slots] >= max(values.values()) - 1e-9
    assert (plan.tokens >= 1).all()


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.floats(0.0, 4.0))
def test_the_texts_drafted_for_are_the_best_of_all_sets(
    data: st.DataObject, B: int, M: int, per_token: float
) -> None:
    """Against every set of texts, every width and every length."""
    chances = data.draw(st.lists(chance, min_size=B * M, max_size=B * M))
    rows = np.array(chances).reshape(B, 1, M).cumprod(axis=-1)
    cost = st.floats(0.1, 3.0)
    draft = np.array(data.draw(st.lists(cost, min_size=B * M, max_size=B * M))).reshape(B, M)
    verify = np.array(data.draw(st.lists(cost, min_size=M + 1, max_size=M + 1)))
    plan = planned(rows, draft, verify, per_token)

    def value(chosen: tuple[bool, ...], width: int, n: int) -> float:
        gained = sum(rows[i, 0, :n].sum() for i in range(B) if chosen[i])
        return float(per_token * (B + gained) - verify[n] - draft[sum(chosen) - 1, width - 1])

    sets = [chosen for chosen in product((False, True), repeat=B) if any(chosen)]
    wanted = max(
        value(chosen, width, n)
        for chosen in sets
        for width in range(1, M + 1)
        for n in range(width + 1)
    )
    chosen = tuple(map(bool, plan.drafted))
    reached = max(value(chosen, plan.slots, n) for n in range(plan.slots + 1))
    assert reached >= wanted - 1e-9
    assert abs(per_token * plan.tokens.sum() - plan.seconds - reached) < 1e-9
    assert (plan.tokens[~plan.drafted] == 1).all()


def test_a_text_without_chances_is_left_out() -> None:
    rounds = np.full((4, 8, 7), 0.8).cumprod(axis=-1)
    rounds[2] *= 0.02
    draft = np.arange(1, 5)[:, None] * np.full(7, 0.1)
    plan = planned(rounds, draft, 1 + 0.05 * np.arange(8), 0.25)
    assert plan.drafted.tolist() == [True, True, False, True]
    assert plan.tokens[2] == 1
    free = planned(rounds, np.full((4, 7), 0.1), 1 + 0.05 * np.arange(8), 0.25)
    assert free.drafted.all()


def test_dear_slots_make_narrow_blocks() -> None:
    """Half of the texts' tokens are right: free slots are drafted as far as rows pay, dear ones
    only where the next token is worth one."""
    rounds = np.full((4, 8, 7), 0.5).cumprod(axis=-1)
    verify = 1 + 0.08 * np.arange(8)

    def same(draft: np.ndarray) -> np.ndarray:
        return np.tile(draft, (4, 1))

    assert planned(rounds, same(np.full(7, 0.5)), verify, 0.25).slots == 3
    assert planned(rounds, same(0.5 + 0.1 * np.arange(7)), verify, 0.25).slots == 2
    assert planned(rounds, same(0.5 + 0.3 * np.arange(7)), verify, 0.25).slots == 1
    assert planned(rounds, same(0.5 + 0.3 * np.arange(7)), verify, 0.25, least=7).slots == 7

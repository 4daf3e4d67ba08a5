"""The rules for the verify length, against brute force."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.verify_length.rules import (
    contested,
    sampled_verify_length,
    token_values,
    verify_length,
)

chance = st.floats(0.01, 0.99)
chances = st.lists(chance, min_size=6, max_size=6)
token_seconds = st.lists(st.floats(0.1, 4.0), min_size=6, max_size=6)
rows = st.lists(st.floats(0.0, 2.0), min_size=7, max_size=7).map(
    lambda x: (1 + np.cumsum(x)).tolist()
)


@given(st.lists(chance, max_size=6), rows, token_seconds)
def test_verify_length_is_the_best_of_all(
    c: list[float], seconds: list[float], w: list[float]
) -> None:
    def value(length: int) -> float:
        saved = sum(np.prod(c[:j]) * w[j - 1] for j in range(1, length + 1))
        return float(saved - seconds[length])

    best = verify_length(c, seconds, w[: len(c)])
    assert value(best) == pytest.approx(max(value(n) for n in range(len(c) + 1)))


def test_a_step_in_the_costs_is_looked_across() -> None:
    """No second token pays for the step to three rows alone, all that follow do."""
    seconds = [1.0, 1.0, 1.9, 1.9, 1.9, 1.9]
    assert verify_length([0.8] * 5, seconds, [1.0] * 5) == 5
    assert verify_length([0.8] * 2, seconds, [1.0] * 2) == 1
    assert sampled_verify_length([0.8] * 5, [0.8] * 5, seconds, [1.0] * 5) == 5


@given(st.lists(chance, min_size=1, max_size=6), rows, token_seconds)
def test_the_sampled_length_is_the_best_where_later_chances_are_average(
    c: list[float], seconds: list[float], w: list[float]
) -> None:
    w = w[: len(c)]
    gains = np.concatenate([[0.0], np.cumsum(np.cumprod(c) * w)]) - seconds[: len(c) + 1]
    assert gains[sampled_verify_length(c, c, seconds, w)] == pytest.approx(gains.max())


@given(chances, chances, chances, rows, token_seconds, st.integers(1, 6))
def test_the_sampled_length_does_not_look_ahead_of_the_row(
    chances: list[float],
    others: list[float],
    means: list[float],
    seconds: list[float],
    w: list[float],
    k: int,
) -> None:
    """Whether row k is fed depends on the chances of slots 1 .. k + 1, known from x_1 .. x_k."""
    changed = chances[: k + 1] + others[k + 1 :]
    fed = [sampled_verify_length(c, means, seconds, w) >= k for c in (chances, changed)]
    assert fed[0] == fed[1]


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 9999), st.floats(0.0, 1.0), st.floats(0.1, 3.0))
def test_values_are_the_time_that_the_best_rounds_save(
    M: int, seed: int, draft: float, rate: float
) -> None:
    """Against the expected time of the best rounds, by recursion over how many tokens are accepted,
    where every token's time is half of that and half of the average."""
    rng = np.random.default_rng(seed)
    c = rng.uniform(0.05, 0.99, M)
    seconds = (1 + np.cumsum(rng.exponential(0.3, M + 1))).tolist()

    @cache
    def time(j: int) -> float:
        """To token M from token j on; beyond it, less."""
        if j >= M:
            return (M - j) / rate
        best = np.inf
        for length in range(M - j + 1):
            accepted = np.append(1.0, np.cumprod(c[j : j + length]))
            ends = np.append(-np.diff(accepted), accepted[-1])
            after = sum(p * time(j + n + 1) for n, p in enumerate(ends))
            best = min(best, draft + seconds[length] + after)
        return float((best + time(j + 1) + 1 / rate) / 2)

    saved = [time(j) - time(j + 1) for j in range(1, M + 1)]
    values = token_values(c.tolist(), seconds, draft, np.inf, rate)
    np.testing.assert_allclose(values, saved, atol=1e-9)
    if M > 1:
        capped = token_values(c.tolist(), seconds, draft, 0.5, rate)
        assert max(capped[:-1]) <= (0.5 + 1 / rate) / 2 + 1e-9


def test_tokens_of_an_easy_text_save_less() -> None:
    """The next round would bring them anyway; where none is accepted, each takes a round: 1 in
    place of 0.5 on average."""
    seconds = [1.0] * 5
    easy, hard = [1.0] * 4, [1e-9] * 4
    assert token_values(easy, seconds, 0.0, 1.0, rate=2.0)[0] < 0.4
    assert token_values(hard, seconds, 0.0, 1.0, rate=2.0)[0] == pytest.approx(0.75)


@given(
    copied=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4),
    drafted=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4),
    agreed=st.integers(0, 4),
)
def test_where_two_chains_differ_at_most_one_is_right(
    copied: list[float], drafted: list[float], agreed: int
) -> None:
    ours, others = contested(copied, drafted, agreed)
    assert (len(ours), len(others)) == (len(copied), len(drafted))
    common = min(agreed, len(copied), len(drafted))
    assert ours[:common] == others[:common] == list(map(max, copied, drafted))[:common]
    if agreed < min(len(copied), len(drafted)):
        p, c = copied[agreed], drafted[agreed]
        cases = {(a, b): (p if a else 1 - p) * (c if b else 1 - c) for a in (0, 1) for b in (0, 1)}
        del cases[1, 1]
        total = sum(cases.values())
        assert ours[agreed] == pytest.approx(cases[1, 0] / total)
        assert others[agreed] == pytest.approx(cases[0, 1] / total)
        assert ours[agreed + 1 :] == copied[agreed + 1 :]
        assert others[agreed + 1 :] == drafted[agreed + 1 :]

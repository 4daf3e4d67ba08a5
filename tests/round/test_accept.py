"""The distribution of what a round emits, computed exactly from the rules' own probabilities."""

import math
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import greedy_sampler, make_sampler
from scipy import stats

from dspine_mlx.round.accept import (
    TargetLogits,
    accept,
    acceptance,
    match,
    match_greedy,
    normalised,
    residual,
)
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class Toy:
    """A target and a drafter over V tokens: the distribution depends on the token before."""

    def __init__(self, V: int, K: int, M: int, seed: int):
        rng = np.random.default_rng(seed)
        self.V, self.K, self.M = V, K, M
        self.target = softmax(rng.normal(size=(V + 1, V)) * 1.5).astype(np.float32)  # row V: start
        self.candidates = np.stack([rng.permutation(V)[:K] for _ in range(M)])
        self.q = softmax(rng.normal(size=(M, V + 1, K)) * 1.5).astype(np.float32)

    def draft(self, picks: tuple[int, ...]) -> tuple[Draft, float, np.ndarray]:
        """The draft with these picks, its probability, and the target's rows along it."""
        previous, q, chance, tokens = self.V, [], 1.0, []
        for t, pick in enumerate(picks):
            q.append(self.q[t, previous])
            chance *= float(self.q[t, previous, pick])
            previous = int(self.candidates[t, pick])
            tokens.append(previous)
        rows = self.target[[self.V, *tokens]]
        draft = Draft(mx.array(tokens), mx.array(self.candidates), mx.array(np.stack(q)))
        return draft, chance, rows

    def probs_of_round(self, q_used: str = "right") -> np.ndarray:
        """P(x_1 ... x_{M+1}) where tokens after a round's end are drawn from the target."""
        total = np.zeros((self.V,) * (self.M + 1))
        for picks in product(range(self.K), repeat=self.M):
            draft, chance, rows = self.draft(picks)
            if q_used == "full vocabulary":
                # as if a fifth of the mass lay outside the candidates
                draft = draft._replace(q=mx.array(draft.q) * 0.8)
            keep = np.array(acceptance(draft, mx.array(rows)), np.float64)
            tokens = draft.tokens.tolist()
            for n in range(self.M + 1):
                ends = chance * np.prod(keep[:n]) * (1 - keep[n] if n < self.M else 1)
                left = np.array(residual(draft, mx.array(rows), mx.array(n)), np.float64)
                for x, p in enumerate(left / left.sum()):
                    self.extend(total, (*tokens[:n], x), ends * p)
        return total

    def extend(self, total: np.ndarray, prefix: tuple[int, ...], chance: float) -> None:
        if len(prefix) == self.M + 1:
            total[prefix] += chance
            return
        for x in range(self.V):
            self.extend(total, (*prefix, x), chance * float(self.target[prefix[-1], x]))

    def wanted(self) -> np.ndarray:
        total = np.zeros((self.V,) * (self.M + 1))
        for x in range(self.V):
            self.extend(total, (x,), float(self.target[self.V, x]))
        return total


@settings(deadline=None, max_examples=25)
@given(V=st.integers(2, 4), M=st.integers(1, 2), seed=st.integers(0, 10_000), data=st.data())
def test_ratio_test_keeps_the_targets_distribution(
    V: int, M: int, seed: int, data: st.DataObject
) -> None:
    toy = Toy(V, data.draw(st.integers(1, V)), M, seed)
    assert np.abs(toy.probs_of_round() - toy.wanted()).sum() / 2 < 2e-6


def test_the_enumeration_catches_a_wrong_draft_distribution() -> None:
    """The test sees when another q than the sampled one is used."""
    toy = Toy(3, 2, 2, 1)
    assert np.abs(toy.probs_of_round("full vocabulary") - toy.wanted()).sum() / 2 > 0.01


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.slow
def test_accept_draws_what_the_rules_say(biased: bool) -> None:
    """First token of 3,000 real calls against the target's distribution (chi-square at 1 %, power
    > 0.99 against the bias planted in the control: q taken as uniform)."""
    toy, rng = Toy(5, 3, 2, 4), np.random.default_rng(0)
    counts = np.zeros(5)
    for _ in range(3000):
        first = rng.choice(3, p=toy.q[0, 5] / toy.q[0, 5].sum(dtype=np.float64))
        probs = toy.q[1, toy.candidates[0, first]]
        second = rng.choice(3, p=probs / probs.sum(dtype=np.float64))
        draft, _, rows = toy.draft((first, second))
        if biased:
            draft = draft._replace(q=mx.full((2, 3), 1 / 3))
        n, following = accept(draft, TargetLogits(mx.log(mx.array(rows))), Sampler(temp=1))
        counts[draft.tokens[0].item() if n else following] += 1
    probs = toy.target[5].astype(np.float64)
    p_value = stats.chisquare(counts, probs / probs.sum() * 3000).pvalue
    assert (p_value > 0.01) != biased


def test_residual_falls_back_to_p_where_nothing_is_left() -> None:
    p = mx.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    draft = Draft(mx.array([0]), mx.array([[0, 1]]), mx.array([[0.5, 0.5]]))
    assert residual(draft, p, mx.array(0)).tolist() == p[0].tolist()
    assert residual(draft, p, mx.array(1)).tolist() == p[1].tolist()


def test_a_token_the_target_excludes_is_never_kept() -> None:
    """top-k 1 leaves one token: whatever else is drafted is replaced by it."""
    logprobs = mx.log(mx.array([[0.1, 0.6, 0.3], [0.2, 0.3, 0.5]]))
    draft = Draft(mx.array([0]), mx.array([[0, 2]]), mx.array([[0.9, 0.1]]))
    for _ in range(20):
        assert accept(draft, TargetLogits(logprobs), Sampler(temp=1, top_k=1)) == (0, 1)


def test_greedy_match_counts_the_leading_agreement() -> None:
    logprobs = mx.log(mx.eye(5)[mx.array([3, 1, 4, 0])] + 0.1)
    for tokens, expected in (([3, 1, 4], (3, 0)), ([3, 1, 2], (2, 4)), ([0, 1, 4], (0, 3))):
        assert match(mx.array(tokens), logprobs, greedy_sampler) == expected
    assert match(mx.array([], mx.uint32), logprobs[:1], greedy_sampler) == (0, 3)


@settings(deadline=None, max_examples=150)
@given(
    dtype=st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
    V=st.sampled_from([2, 50, 4000]),
    level=st.floats(-40, 40),
    steps=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_logits_decide_as_logprobs_do(
    dtype: mx.Dtype, V: int, level: float, steps: int, seed: int
) -> None:
    """Logits a few rounding steps apart, at all levels; drafts that agree for a while."""
    rng = np.random.default_rng(seed)
    coarser = {mx.float32: 1, mx.float16: 2**13, mx.bfloat16: 2**16}[dtype]
    gap = coarser * float(np.spacing(np.float32(max(abs(level), 1e-3))))
    logits = mx.array(level + gap * rng.integers(0, steps, (5, V))).astype(dtype)
    wanted = mx.argmax(normalised(logits), axis=-1).tolist()
    for n in range(5):
        tokens = mx.array([*wanted[:n], *[(x + 1) % V for x in wanted[n:4]]])
        assert match_greedy(tokens, TargetLogits(logits)) == (n, wanted[n])


def test_rounding_makes_logits_equal_that_differ() -> None:
    """Why logprobs have to be asked: of two logits the second is the larger, by less than the
    difference of numbers near their logprobs of about -8."""
    logits = mx.full((2, 4000), 0.5)
    logits[:, 7], logits[:, 9] = 0.5 + 2**-22, 0.5 + 2**-21
    assert mx.argmax(logits, axis=-1).tolist() == [9, 9]
    wanted = mx.argmax(normalised(logits), axis=-1).tolist()
    assert wanted[0] != 9
    assert match_greedy(mx.array(wanted[:1]), TargetLogits(logits)) == (1, wanted[1])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_every_difference_that_rounding_can_hide_is_seen(dtype: mx.Dtype) -> None:
    """The larger of two logits comes second, by 1 to 16 eps, at every place between two numbers
    near their logprobs of about -8.5: differences of up to 8 eps can vanish, and no others."""
    eps, hidden = mx.finfo(dtype).eps, set()
    for gap in range(1, 17):
        for place in range(8):
            logits = mx.full((1, 8000), 0.25, dtype)
            logits[0, 7], logits[0, 9] = 0.5 + place * eps, 0.5 + (place + gap) * eps
            wanted = mx.argmax(normalised(logits), axis=-1).item()
            assert match_greedy(mx.array([], mx.uint32), TargetLogits(logits)) == (0, wanted)
            hidden |= {gap} if wanted == 7 else set()
    assert {1, 5} <= hidden <= set(range(1, 9))


def test_rows_that_are_not_finite_are_decided_by_logprobs() -> None:
    for value in (math.inf, math.nan, -math.inf):
        logits = mx.zeros((1, 6))
        logits[0, 3] = value
        wanted = mx.argmax(normalised(logits), axis=-1).item()
        assert match_greedy(mx.array([], mx.uint32), TargetLogits(logits)) == (0, wanted)
    nothing = mx.full((1, 6), -math.inf)
    assert match_greedy(mx.array([], mx.uint32), TargetLogits(nothing)) == (0, 0)


def test_clear_rows_need_no_logprobs_and_one_unclear_row_behind_the_end_does_not_matter() -> None:
    logits = 4 * mx.eye(5)[mx.array([3, 1, 4, 0])]
    logits[3] = 0.0
    rows = TargetLogits(logits)
    assert match_greedy(mx.array([3, 2, 4]), rows) == (1, 1)
    assert rows.known is None
    assert match_greedy(mx.array([3, 1, 4]), rows) == (3, 0)
    assert rows.known is not None


def test_logprobs_of_some_rows_are_those_of_all() -> None:
    logits = mx.random.normal((4, 30), key=mx.random.key(0))
    rows = TargetLogits(logits)
    for count in (2, 1, 4, 3):
        assert mx.array_equal(rows.logprobs(count), normalised(logits)[:count])


SAMPLERS: dict[str, dict[str, Any]] = {
    "temperature": {"temp": 0.8},
    "top-p": {"temp": 0.9, "top_p": 0.7},
    "top-k": {"temp": 1.2, "top_k": 5},
    "min-p": {"temp": 1.0, "min_p": 0.1},
    "xtc": {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "all": {"temp": 0.7, "top_p": 0.9, "min_p": 0.02, "top_k": 9, "xtc_probability": 0.3},
}


@pytest.mark.parametrize("settings_", SAMPLERS.values(), ids=SAMPLERS)
def test_match_leaves_the_random_state_of_plain_decoding(settings_: dict[str, Any]) -> None:
    sampler = make_sampler(**settings_)
    logprobs = normalised(mx.random.normal((6, 40)))
    mx.random.seed(11)
    plain = [sampler(row[None]).item() for row in logprobs]
    for n in range(6):
        mx.random.seed(11)
        tokens = mx.array([*plain[:n], *[(x + 1) % 40 for x in plain[n:5]]])
        assert match(tokens, logprobs, sampler) == (n, plain[n])
        after = mx.random.uniform().item()
        mx.random.seed(11)
        for row in logprobs[: n + 1]:
            sampler(row[None])
        assert mx.random.uniform().item() == after


@pytest.mark.parametrize("settings_", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.slow
def test_probs_are_what_the_sampler_draws_from(settings_: dict[str, Any]) -> None:
    """2,000 draws of mlx-lm's sampler against `Sampler.probs` (with XTC: the mean of its coin)."""
    sampler = Sampler(**settings_)
    logits = mx.random.normal((1, 12)) * 2
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    rows = mx.broadcast_to(logprobs, (400, 12))
    probs = np.array(sampler.probs(rows), np.float64).mean(axis=0)
    draw = make_sampler(**settings_)
    draws = mx.concatenate([draw(logprobs) for _ in range(2000)]).tolist()
    counts = np.bincount(draws, minlength=12)
    possible = probs > 0
    assert counts[~possible].sum() == 0
    expected = probs[possible] / probs[possible].sum() * 2000
    assert stats.chisquare(counts[possible], expected).pvalue > 0.001

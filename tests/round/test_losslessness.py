"""The real policy and the real acceptance, by exact enumeration in float64.

All drafts, all outcomes of the tests and all following tokens of one round are summed, each with
its probability; the text must have the target's distribution. Toy targets know the whole prefix.
"""

from collections.abc import Callable, Sequence
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.drafters.proposal import Proposal
from dspine_mlx.round.accept import (
    acceptance,
    accepted,
    block_chances,
    longest_accepted,
    match,
    residual,
)
from dspine_mlx.round.lookup import LENGTHS, Copy, Lookup
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft, evidence
from dspine_mlx.round.speculate import copied
from dspine_mlx.round.statistics import Statistics
from dspine_mlx.verify_length.auto import Auto
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.costs import Costs, Curve
from dspine_mlx.verify_length.records import Evidence
from dspine_mlx.verify_length.rules import verify_length

Path = tuple[int, ...]
Probs = np.ndarray


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def float64(x: np.ndarray) -> mx.array:
    return mx.array(x, mx.float64)


class Toy:
    """A target over V tokens that looks at the whole prefix, and a drafter of M slots with K
    candidates that looks one token back, with a confidence of its own."""

    def __init__(self, V: int, K: int, M: int, seed: int):
        self.V, self.K, self.M, rng = V, K, M, np.random.default_rng(seed)
        prefixes = [p for n in range(M + 1) for p in product(range(V), repeat=n)]
        self.p = {prefix: softmax(1.5 * rng.standard_normal(V)) for prefix in prefixes}
        self.candidates = np.stack([rng.permutation(V)[:K] for _ in range(M)])
        self.q = softmax(1.5 * rng.standard_normal((M, K, K)))  # [slot, predecessor, candidate]
        self.q[0] = self.q[0, 0]
        self.confidence = rng.uniform(0.05, 0.95, (M, K))

    def draft(self, picks: Path) -> tuple[Draft, float]:
        """The draft with these candidates, and its probability."""
        before = [0, *picks[:-1]]
        rows = np.stack([self.q[t, i] for t, i in enumerate(before)])
        tokens = self.candidates[np.arange(self.M), list(picks)]
        confidence = mx.array(self.confidence.astype(np.float32))
        proposal = Proposal(mx.array(self.candidates), rows[0], rows, confidence)
        known = evidence(proposal, mx.array(picks), mx.array(rows), frozenset())
        greedy = [int(self.q[0, 0].argmax())]
        for probs in self.q[1:]:
            greedy.append(int(probs[greedy[-1]].argmax()))
        greedy_path = evidence(proposal, mx.array(greedy), mx.array(rows), frozenset())
        draft = Draft(
            mx.array(tokens), mx.array(self.candidates), float64(rows), known, greedy_path
        )
        return draft, float(np.prod(rows[np.arange(self.M), list(picks)]))

    def rows(self, tokens: list[int]) -> mx.array:
        """The target's distributions after each prefix of the tokens."""
        return float64(np.stack([self.p[tuple(tokens[:i])] for i in range(len(tokens) + 1)]))

    def wanted(self) -> Probs:
        probs = np.zeros((self.V,) * (self.M + 1))
        self.go_on(probs, (), 1.0)
        return probs

    def go_on(self, probs: Probs, text: Path, chance: float) -> None:
        """The target decodes the rest of the text."""
        if len(text) == self.M + 1:
            probs[text] += chance
            return
        for x in range(self.V):
            self.go_on(probs, (*text, x), chance * self.p[text][x])


def outcomes(chances: mx.array) -> list[tuple[float, mx.array]]:
    """Every outcome of independent tests u < chance: its probability, and uniforms that give it."""
    kept = np.array(chances)
    cases = []
    for passed in product([True, False], repeat=len(kept)):
        weight = np.prod(np.where(passed, kept, 1 - kept))
        if weight > 0:
            cases.append((float(weight), float64(np.where(passed, kept / 2, (1 + kept) / 2))))
    return cases


def probs_of_copy(toy: Toy, tokens: list[int]) -> Probs:
    """The distribution of M + 1 tokens, the first ones from a round that offers these copies."""
    probs = np.zeros((toy.V,) * (toy.M + 1))
    for picks in product(range(toy.V), repeat=len(tokens) + 1):
        chance = np.prod([toy.p[tuple(tokens[:i])][x] for i, x in enumerate(picks)])
        left = list(picks)
        n, following = match(
            mx.array(tokens),
            mx.zeros((len(tokens) + 1, toy.V)),
            lambda _: mx.array([left.pop(0)]),  # noqa: B023
        )
        toy.go_on(probs, (*tokens[:n], following), float(chance))
    return probs


def probs_with_copies(toy: Toy, copied: Callable[[Draft], list[int]], auto: Auto) -> Probs:
    """The distribution of a round that draws a draft, then offers it or a copy."""
    probs = np.zeros((toy.V,) * (toy.M + 1))
    for picks in product(range(toy.K), repeat=toy.M):
        full, drawn = toy.draft(picks)
        tokens = copied(full)
        if tokens:
            probs += drawn * probs_of_copy(toy, tokens)
        else:
            probs += probs_of_round(toy, chosen(auto, toy.M), block=True, tested=True, only=picks)
    return probs


def probs_of_round(
    toy: Toy,
    choose: Callable[[Draft], int],
    *,
    block: bool,
    tested: bool,
    only: Path | None = None,
) -> Probs:
    """The distribution of M + 1 tokens, the first ones from a round that chooses its length after
    drawing; only: the part of it where these candidates are drawn."""
    probs = np.zeros((toy.V,) * (toy.M + 1))
    for picks in [only] if only else product(range(toy.K), repeat=toy.M):
        full, drawn = toy.draft(picks)
        length = choose(full)
        draft = full.first(length + 1 if tested else length)
        tokens = draft.tokens.tolist()
        p = toy.rows(tokens[:length])
        if not tokens:
            toy.go_on(probs, (), drawn)
            continue
        reach, keep = block_chances(draft, p) if block else (None, acceptance(draft, p))
        for chance, uniform in outcomes(keep):
            n = longest_accepted(keep, uniform) if block else accepted(keep, uniform)
            if n.item() == len(p):  # the last row tested the last token and accepted it
                toy.go_on(probs, tuple(tokens), drawn * chance)
                continue
            left = np.array(residual(draft, p, n, 1.0 if reach is None else reach[n]))
            for x, share in enumerate(left / left.sum()):
                text = (*tokens[: n.item()], x)
                toy.go_on(probs, text, drawn * chance * float(share))
    return probs


def distance(a: Probs, b: Probs) -> float:
    return float(np.abs(a - b).sum() / 2)


def policy(toy: Toy, seed: int, sampled: bool = True) -> Auto:
    """The real policy, over a random cost curve with cliffs, in the middle of a text."""
    rng = np.random.default_rng(seed)
    rows = tuple(1 + np.cumsum(rng.exponential(0.6, toy.M + 1) * rng.integers(0, 2, toy.M + 1)))
    auto = Auto(Costs(Curve((1, 2), (1, 1), (0.2, 0.2), (rows, rows))), uncalibrated(toy.M))
    auto.start_text(Statistics(), Sampler(temp=1.0 if sampled else 0.0), 1)
    auto.forecast.count(rng.uniform(0.5, 3), rng.uniform(0.5, 3), fading=0)
    return auto


def lengths(toy: Toy, choose: Callable[[Draft], int]) -> set[int]:
    return {choose(toy.draft(p)[0]) for p in product(range(toy.K), repeat=toy.M)}


def chosen(auto: Auto, M: int) -> Callable[[Draft], int]:
    return lambda draft: auto.choose(draft, None, M, 1, 0.0)[1]


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> None:
    mx.set_default_device(mx.cpu)  # float64 exists there only


@pytest.mark.parametrize("block", [True, False])
@settings(deadline=None, max_examples=15)
@given(V=st.integers(2, 3), M=st.integers(2, 3), seed=st.integers(0, 9999), data=st.data())
def test_the_policy_keeps_the_distribution_of_sampled_text(
    block: bool, V: int, M: int, seed: int, data: st.DataObject
) -> None:
    toy = Toy(V, data.draw(st.integers(2, V)), M, seed)
    choose = chosen(policy(toy, seed + 1), M)
    assert distance(probs_of_round(toy, choose, block=block, tested=True), toy.wanted()) < 1e-12


def test_the_policy_varies_its_length_with_the_draft() -> None:
    """Else the test above would prove little: some of its drafts are cut shorter than others."""
    varied = [
        len(lengths(toy := Toy(3, 3, 3, s), chosen(policy(toy, s + 1), 3))) for s in range(40)
    ]
    assert sum(n > 1 for n in varied) >= 10


@pytest.mark.parametrize("block", [True, False])
def test_a_retrospective_rule_is_caught(block: bool) -> None:
    """The best length in the light of all drawn confidences looks at tokens that it drops."""
    toy = Toy(3, 3, 3, 1)
    auto = policy(toy, 1)

    def choose(draft: Draft) -> int:
        chances = auto.chances.of(Evidence.of(draft, auto.chances.calibration).odds)
        return verify_length(chances, [1.0, 1.7, 1.7, 1.7], [1.0] * 3)

    assert lengths(toy, choose) == {0, 3}
    probs = probs_of_round(toy, choose, block=block, tested=True)
    assert distance(probs, toy.wanted()) > 1e-3


def probs_of_whole_drafts(toy: Toy, offer: Callable[[Draft], Draft]) -> Probs:
    """The distribution where a draft made from the drawn one is offered whole."""
    probs = np.zeros((toy.V,) * (toy.M + 1))
    for picks in product(range(toy.K), repeat=toy.M):
        full, drawn = toy.draft(picks)
        draft = offer(full)
        offered = draft.tokens.tolist()
        p = toy.rows(offered)
        reach, keep = block_chances(draft, p)
        for chance, uniform in outcomes(keep):
            n = longest_accepted(keep, uniform)
            left = np.array(residual(draft, p, n, reach[n]))
            for x, share in enumerate(left / left.sum()):
                toy.go_on(probs, (*offered[: n.item()], x), drawn * chance * float(share))
    return probs


@settings(deadline=None, max_examples=15)
@given(V=st.integers(2, 3), M=st.integers(2, 3), seed=st.integers(0, 9999))
def test_a_copy_after_drawn_tokens_keeps_the_distribution(V: int, M: int, seed: int) -> None:
    """Which one, and whether there is any, depends on the drawn tokens before it."""
    toy, rng = Toy(V, V, M, seed), np.random.default_rng(seed)
    follows = {path: int(rng.integers(-1, V)) for path in product(range(V), repeat=M - 1)}

    def offer(draft: Draft) -> Draft:
        before = draft.first(M - 1)
        token = follows[tuple(before.tokens.tolist())]
        return before if token < 0 else copied(Copy(3, [token], after=M - 1), before)

    assert distance(probs_of_whole_drafts(toy, offer), toy.wanted()) < 1e-12


def test_a_copy_that_replaces_some_drawn_tokens_is_caught() -> None:
    """A drawn token is tested where it is the candidate that the rule likes, else dropped."""
    toy = Toy(3, 3, 3, 1)

    def offer(draft: Draft) -> Draft:
        if draft.tokens[2].item() == toy.candidates[2, 1]:
            return draft
        return copied(Copy(3, [int(toy.candidates[2, 0])], after=2), draft.first(2))

    assert distance(probs_of_whole_drafts(toy, offer), toy.wanted()) > 1e-3


def copying(toy: Toy, auto: Auto, seed: int) -> Callable[[Draft], list[int]]:
    """The real choice between a draft and a copy, which shares the greedy path's beginning."""
    rng = np.random.default_rng(seed)
    path = toy.draft((0,) * toy.M)[0].greedy_path
    assert path is not None
    shared = int(rng.integers(0, toy.M))
    tokens = [*path.tokens.tolist()[:shared], *rng.integers(0, toy.V, toy.M - shared).tolist()]
    auto.copying.chances.accepted = [3 * c for c in rng.uniform(0.2, 1.0, len(LENGTHS)).tolist()]
    lookup = Looked(Copy(int(rng.integers(3, 33)), tokens))

    def offered(draft: Draft) -> list[int]:
        copy, length = auto.choose(draft, lookup, toy.M, 1, 0.0)
        return [] if copy is None else tokens[:length]

    return offered


class Looked(Lookup):
    """A lookup that finds one copy."""

    def __init__(self, copy: Copy):
        super().__init__()
        self.copy = copy

    def draft(self, count: int, after: Sequence[int] = ()) -> Copy | None:
        return None if after else self.copy


@settings(deadline=None, max_examples=15)
@given(V=st.integers(2, 3), M=st.integers(2, 3), seed=st.integers(0, 9999))
def test_the_choice_of_a_copy_keeps_the_distribution(V: int, M: int, seed: int) -> None:
    toy, auto = Toy(V, V, M, seed), policy(Toy(V, V, M, seed), seed + 1)
    probs = probs_with_copies(toy, copying(toy, auto, seed), auto)
    assert distance(probs, toy.wanted()) < 1e-12


def test_the_policy_offers_copies_and_drafts() -> None:
    """Else the test above would prove little: both occur, whatever was drawn."""
    offered = []
    for seed in range(40):
        toy = Toy(3, 3, 3, seed)
        choose = copying(toy, policy(toy, seed + 1), seed)
        drafts = [toy.draft(picks)[0] for picks in product(range(3), repeat=3)]
        lengths = {len(choose(draft)) for draft in drafts}
        assert len(lengths) == 1
        offered.append(lengths.pop())
    assert 10 <= sum(n > 0 for n in offered) <= 30


def test_a_copy_chosen_for_the_drawn_token_is_caught() -> None:
    """Drafts that a copy disagrees with are dropped: what was drawn decides what is offered."""
    toy = Toy(3, 3, 3, 1)
    auto = policy(toy, 1)
    tokens = [int(toy.candidates[0, 1]), 0, 1]
    probs = probs_with_copies(
        toy, lambda draft: tokens if draft.tokens[0].item() != tokens[0] else [], auto
    )
    assert distance(probs, toy.wanted()) > 1e-3


def test_dropping_a_token_for_its_own_draw_needs_the_tested_ending() -> None:
    toy = Toy(3, 3, 2, 5)

    def choose(draft: Draft) -> int:
        return 2 if draft.tokens[0].item() == toy.candidates[0, 0] else 0

    for block in (True, False):
        tested = probs_of_round(toy, choose, block=block, tested=True)
        fresh = probs_of_round(toy, choose, block=block, tested=False)
        assert distance(tested, toy.wanted()) < 1e-12
        assert distance(fresh, toy.wanted()) > 1e-2


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 9999), length=st.integers(0, 3), tested=st.booleans())
def test_blocks_keep_at_least_as_many_tokens(seed: int, length: int, tested: bool) -> None:
    toy = Toy(3, 2, 3, seed)
    kept = {True: 0.0, False: 0.0}
    for block in kept:
        probs = probs_of_round(toy, lambda _: length, block=block, tested=tested)
        assert distance(probs, toy.wanted()) < 1e-12
    for picks in product(range(toy.K), repeat=toy.M):
        full, drawn = toy.draft(picks)
        draft = full.first(length + tested)
        if not draft.tokens.size:
            continue
        p = toy.rows(draft.tokens.tolist()[:length])
        for block in kept:
            keep = block_chances(draft, p)[1] if block else acceptance(draft, p)
            count = longest_accepted if block else accepted
            kept[block] += drawn * sum(c * count(keep, u).item() for c, u in outcomes(keep))
    assert kept[True] >= kept[False] - 1e-12


def test_blocks_keep_more_tokens_in_the_published_toy() -> None:
    """Two tokens, p = (1/3, 2/3), q = (2/3, 1/3) at every step, two drafted: 10/9 tokens are
    accepted token by token and 11/9 as a block (Sun et al., section 1)."""
    toy = Toy(2, 2, 2, 0)
    toy.p = {prefix: np.array([1 / 3, 2 / 3]) for prefix in toy.p}
    toy.candidates = np.array([[0, 1], [0, 1]])
    toy.q = np.broadcast_to(np.array([2 / 3, 1 / 3]), (2, 2, 2))
    counts = {True: 0.0, False: 0.0}
    for picks in product(range(2), repeat=2):
        draft, drawn = toy.draft(picks)
        p = toy.rows(draft.tokens.tolist())
        for block in counts:
            keep = block_chances(draft, p)[1] if block else acceptance(draft, p)
            count = longest_accepted if block else accepted
            counts[block] += drawn * sum(c * count(keep, u).item() for c, u in outcomes(keep))
    assert counts[False] == pytest.approx(10 / 9)
    assert counts[True] == pytest.approx(11 / 9)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 9999))
def test_one_hot_drafts_allow_any_length(seed: int) -> None:
    """Whatever the length, the text is what the sampler picks row by row; the policy may look at
    everything."""
    toy = Toy(3, 3, 3, seed)
    auto = policy(toy, seed, sampled=False)
    draft = toy.draft((0, 1, 0))[0]._replace(q=None)
    _, length = auto.choose(draft, None, 3, 1, 0.0)
    tokens = draft.tokens.tolist()[:length]
    probs = np.zeros((3,) * 4)
    for picks in product(range(3), repeat=length + 1):
        chance = np.prod([toy.p[tuple(tokens[:i])][x] for i, x in enumerate(picks)])
        left = list(picks)
        n, following = match(
            draft.first(length).tokens,
            mx.zeros((length + 1, 3)),
            lambda _: mx.array([left.pop(0)]),  # noqa: B023
        )
        toy.go_on(probs, (*tokens[:n], following), float(chance))
    assert distance(probs, toy.wanted()) < 1e-12

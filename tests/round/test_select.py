from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dspine_mlx.drafters.proposal import Proposal, SlotwiseProposal
from dspine_mlx.drafters.top_k import top_k
from dspine_mlx.metal.walk import walk
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Evidence, log_odds, select
from tests.support.tiny import tiny_dflash, tiny_target


def serial_walk(first: np.ndarray, transitions: np.ndarray, noise: np.ndarray) -> list[int]:
    path = [int(np.argmax(first + noise[0]))]
    for t, row in enumerate(transitions, 1):
        path.append(int(np.argmax(row[path[-1]] + noise[t])))
    return path


@settings(deadline=None, max_examples=60)
@given(M=st.integers(1, 31), K=st.integers(1, 32), seed=st.integers(0, 999), ties=st.booleans())
def test_walk_is_the_serial_walk(M: int, K: int, seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        values = rng.integers(0, 3, shape) if ties else rng.normal(size=shape)
        return values.astype(np.float32)

    first, transitions, noise = draw(K), draw(M - 1, K, K), draw(M, K)
    path, _ = walk(mx.array(first), mx.array(transitions), mx.array(noise))
    assert path.tolist() == serial_walk(first, transitions, noise)


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 4),
    V=st.integers(1, 9000),
    k=st.integers(1, 20),
    seed=st.integers(0, 999),
    coarse=st.booleans(),
)
def test_top_k_is_a_full_sort(n: int, V: int, k: int, seed: int, coarse: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.integers(0, 50, (n, V)) if coarse else rng.normal(size=(n, V))).astype(np.float32)
    indices, values = map(np.array, top_k(mx.array(logits), k))
    assert np.array_equal(values, -np.sort(-logits, axis=-1)[:, : min(k, V)])
    assert np.array_equal(np.take_along_axis(logits, indices, -1), values)
    for row, found in zip(indices, values, strict=True):
        assert len(set(row)) == len(row)
        same = found[1:] == found[:-1]
        assert (np.diff(row.astype(int))[same] > 0).all()  # equal values in index order


def random_proposal(M: int, K: int, V: int) -> Proposal:
    rng = np.random.default_rng(1)
    candidates = np.stack([rng.permutation(V)[:K] for _ in range(M)])
    first, transitions = rng.normal(size=K) * 2, rng.normal(size=(M - 1, K, K)) * 2
    return Proposal(
        mx.array(candidates),
        mx.array(first.astype(np.float32)),
        mx.array(transitions.astype(np.float32)),
    )


def test_greedy_selection_takes_the_best_of_each_row() -> None:
    proposal = random_proposal(5, 4, 50)
    draft = select(proposal)
    path = serial_walk(np.array(proposal.first), np.array(proposal.transitions), np.zeros((5, 4)))
    assert draft.tokens.tolist() == [
        row[i] for row, i in zip(proposal.candidates.tolist(), path, strict=True)
    ]
    assert draft.q is None


@pytest.mark.parametrize(("cap", "top_k"), [(None, 16), (1e-3, 16), (None, 1)])
def test_slots_on_their_own_need_no_walk(cap: float | None, top_k: int) -> None:
    """Their best tokens and the evidence are what the walk finds, also where a cap makes scores
    equal."""
    drafter = tiny_dflash(tiny_target(), final_logit_softcapping=cap, top_k=top_k)
    own = drafter.propose(3, drafter.no_features(), drafter.make_cache())
    assert isinstance(own, SlotwiseProposal)
    stops = frozenset(own.greedy_tokens().tolist()[3:4])
    for confidence in (None, mx.linspace(0.2, 0.8, 7)):
        own = replace(own, confidence=confidence)
        short, walked = select(own, stops=stops), select(own.ranked(), stops=stops)
        assert short.tokens.tolist() == walked.tokens.tolist()
        assert short.evidence is not None
        assert walked.evidence is not None
        np.testing.assert_allclose(short.evidence.log_odds(), walked.evidence.log_odds(), rtol=1e-5)
        assert select(own, with_evidence=False).evidence is None


@pytest.mark.parametrize(("V", "K"), [(5, 16), (40, 16), (9000, 16), (9000, 1), (16, 16)])
def test_slots_on_their_own_have_the_distribution_of_their_candidates(V: int, K: int) -> None:
    """Softmax over the K best of all, in any order: small and large vocabularies are searched
    differently."""
    drafter = tiny_dflash(tiny_target(), top_k=K)
    logits = mx.random.normal((3, V), key=mx.random.key(2))
    best = -np.sort(-np.array(logits, np.float64), axis=-1)[:, :K]
    wanted = np.exp(best) / np.exp(best).sum(axis=-1, keepdims=True)
    found = -np.sort(-np.array(SlotwiseProposal(drafter.config, logits).probs()), axis=-1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("sampler", [None, Sampler(temp=0.7)])
def test_evidence_is_there_if_asked_for(sampler: Sampler | None) -> None:
    """It has no part in what is picked."""
    drafts = []
    for with_evidence in (True, False):
        mx.random.seed(5)
        drafts.append(select(random_proposal(4, 6, 30), sampler, with_evidence=with_evidence))
    assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
    assert drafts[0].evidence is not None
    assert drafts[1].evidence is None
    assert drafts[1].greedy_path is None


@given(
    st.lists(st.lists(st.floats(-8, 8), min_size=4, max_size=4), min_size=1, max_size=5),
    st.integers(0, 5),
)
def test_log_odds_of_probs_and_confidences(scores: list[list[float]], end: int) -> None:
    """Against float64: log p/(1 - p) of the top entry, and of the confidence; -inf after an end."""
    probs = np.exp(np.array(scores))
    probs = (probs / probs.sum(axis=1, keepdims=True)).astype(np.float32)
    top, tokens = probs.argmax(axis=1), mx.arange(len(probs))
    p = probs.astype(float)
    others = np.array([np.delete(row, i).sum() for row, i in zip(p, top, strict=True)])
    wanted = np.log(p.max(axis=1) / others)
    wanted[end + 1 :] = -np.inf
    found = Evidence(tokens, mx.array(probs), frozenset([end])).log_odds()
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
    sure = np.clip(p[:, 0], 1e-6, 1 - 1e-6).astype(np.float32)
    found = Evidence(tokens, mx.array(sure)).log_odds()
    np.testing.assert_allclose(found, np.log(sure / (1 - sure.astype(float))), rtol=1e-6)


def test_log_odds_of_certainty() -> None:
    assert [log_odds(c) for c in (0.0, 1.0, [0.0, 1.0])] == [-np.inf, np.inf, np.inf]
    assert all(np.isnan(log_odds(c)) for c in (np.nan, [np.nan, np.nan]))


def path_probs(proposal: Proposal, temperature: float) -> np.ndarray:
    """P(path) of two slots, by the definition."""
    first = np.array(proposal.first, np.float64) / temperature
    second = np.array(proposal.transitions[0], np.float64) / temperature
    p = np.exp(first) / np.exp(first).sum()
    q = np.exp(second) / np.exp(second).sum(axis=1, keepdims=True)
    return p[:, None] * q


@pytest.mark.parametrize(("temperature", "fits"), [(0.7, True), (1.0, False)])
@pytest.mark.slow
def test_sampled_paths_follow_the_rows(temperature: float, fits: bool) -> None:
    """4,000 paths drawn at temperature 0.7; a test against temperature 1 must fail."""
    proposal = random_proposal(2, 3, 20)
    counts = np.zeros((3, 3))
    index = [{token: i for i, token in enumerate(row)} for row in proposal.candidates.tolist()]
    drafts = [select(proposal, Sampler(temp=0.7)) for _ in range(4000)]
    mx.eval([d.tokens for d in drafts])
    for draft in drafts:
        a, b = draft.tokens.tolist()
        counts[index[0][a], index[1][b]] += 1
    expected = path_probs(proposal, temperature) * counts.sum()
    p_value = stats.chisquare(counts.ravel(), expected.ravel()).pvalue
    assert (p_value > 0.01) == fits


def test_q_is_the_distribution_of_the_row_that_was_walked() -> None:
    proposal = random_proposal(4, 5, 30)
    sampler = Sampler(temp=0.8)
    draft = select(proposal, sampler)
    chosen = zip(proposal.candidates.tolist(), draft.tokens.tolist(), strict=True)
    path = [row.index(x) for row, x in chosen]
    rows = [proposal.first] + [proposal.transitions[t, path[t]] for t in range(3)]
    for q, row in zip(np.array(draft.q), rows, strict=True):
        scores = np.array(row, np.float64) / 0.8
        np.testing.assert_allclose(q, np.exp(scores) / np.exp(scores).sum(), rtol=1e-5)


def test_a_single_slot_is_drawn_from_its_first_scores() -> None:
    proposal = random_proposal(1, 5, 30)
    assert select(proposal).tokens.tolist() == [
        proposal.candidates[0, mx.argmax(proposal.first)].item()
    ]
    scores = np.array(proposal.first, np.float64)
    q = np.array(select(proposal, Sampler(temp=1)).q)
    np.testing.assert_allclose(q, [np.exp(scores) / np.exp(scores).sum()], rtol=1e-5)
    assert (np.array(select(proposal, Sampler(temp=1, top_k=2)).q) > 0).sum() == 2


def test_truncation_applies_to_drafts() -> None:
    proposal = random_proposal(6, 8, 30)
    for sampler in (
        Sampler(temp=1, top_k=2),
        Sampler(temp=1, top_p=0.3),
        Sampler(temp=1, min_p=0.5),
    ):
        q = np.array(select(proposal, sampler).q)
        assert (q == 0).any()
        np.testing.assert_allclose(q.sum(axis=-1), 1, rtol=1e-6)


@pytest.mark.parametrize("sampler", [None, Sampler(temp=1.0)])
def test_no_slot_counts_after_a_stop_token(sampler: Sampler | None) -> None:
    """Tokens and probs stay as they are; the evidence of all later slots is -inf."""
    proposal = random_proposal(6, 4, 50)
    plain = select(proposal)
    stop = [999, None, plain.tokens[2].item()]
    key = mx.array(mx.random.state[0])
    free = select(proposal, sampler)
    mx.random.state[0][:] = key
    bound = select(proposal, sampler, stops=frozenset(stop))
    assert mx.array_equal(bound.tokens, free.tokens)
    ends = [t in stop for t in free.tokens.tolist()]
    after = [any(ends[:i]) for i in range(6)]
    assert free.evidence is not None
    assert bound.evidence is not None
    wanted = np.where(after, -np.inf, free.evidence.log_odds())
    np.testing.assert_array_equal(bound.evidence.log_odds(), wanted)
    if sampler is None:
        assert after == [False] * 3 + [True] * 3
    else:
        assert bound.greedy_path is not None
        greedy_path = bound.greedy_path.log_odds()  # of the greedy path, whatever was drawn
        assert np.isneginf(greedy_path).tolist() == [False] * 3 + [True] * 3

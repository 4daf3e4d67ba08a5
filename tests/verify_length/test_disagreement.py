"""Which of a copy and a draft is right: facts by hand, planted weights, and what a choice uses."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine_mlx.round.lookup import Copy, CopyChances, Lookup
from dspine_mlx.round.select import Draft, Evidence
from dspine_mlx.verify_length.calibration import Calibration, sigmoid
from dspine_mlx.verify_length.copying import Copying, Values
from dspine_mlx.verify_length.costs import Costs, Curve
from dspine_mlx.verify_length.disagreement import INDEPENDENT, LEAST, Disagreement, logit
from dspine_mlx.verify_length.fit import Recorder, fit_copy_weights
from dspine_mlx.verify_length.forecast import Forecast
from dspine_mlx.verify_length.rules import contested

chance = st.floats(0.01, 0.99)
PLANTED = np.array([0.5, 0.7, -0.6, 0.3, -1.0, 0.9])


def draft_of(tokens: list[int], probs: list[list[float]], others: int = 100) -> Draft:
    """A greedy draft; each slot's second candidate is the token `others`."""
    path = mx.array(tokens, mx.uint32)
    candidates = mx.array([[token, others] for token in tokens], mx.uint32)
    return Draft(path, candidates, None, Evidence(path, mx.array(probs)))


def test_facts_by_hand() -> None:
    """After 1 2 3 came 7, then 8, which was copied rightly once and wrongly twice."""
    lookup = Lookup(tokens=[1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3])
    lookup.outcomes[8] = (1, 2)
    known = Disagreement.of(draft_of([5, 6], [[0.6, 0.3], [0.5, 0.2]], others=8), lookup)
    copy = lookup.draft(4)
    assert known is not None
    assert copy is not None
    assert (copy.tokens[0], copy.disputed) == (8, True)  # the newest of equal matches
    assert known.facts(copy, 0.8, 0.6) == pytest.approx(
        [1, math.log(4), math.log(1.5), math.log(0.3), 1, math.log(2 / 3)]
    )
    unknown = Copy(3, [99], after=1)  # not among the candidates, never copied, not disputed
    facts = known.facts(unknown, 1.0, 0.0)
    assert facts == pytest.approx([1, logit(1 - LEAST), logit(LEAST), math.log(LEAST), 0, 0])


def test_only_greedy_drafts_with_their_candidates_probs_have_them() -> None:
    """A sampled draft's choice must not depend on what was drawn."""
    draft, lookup = draft_of([5, 6], [[0.6, 0.3], [0.5, 0.2]]), Lookup()
    assert Disagreement.of(draft, lookup) is not None
    assert Disagreement.of(draft._replace(q=mx.ones((2, 2)) / 2), lookup) is None
    confidence = Evidence(draft.tokens, mx.array([0.6, 0.5]))
    assert Disagreement.of(draft._replace(evidence=confidence), lookup) is None
    assert Disagreement.of(draft._replace(evidence=None), lookup) is None


@given(chance, chance, chance)
def test_what_is_known_divides_the_chance_that_one_is_right(
    p: float, c: float, share: float
) -> None:
    (ours,), (others,) = contested([p], [c], 0, share)
    (alone,), (beside,) = contested([p], [c], 0)
    assert ours + others == pytest.approx(alone + beside)
    assert ours / (ours + others) == pytest.approx(share)
    known = [1, logit(p), logit(c), -3.0, 1.0, 2.0]
    independent = float(sigmoid(np.array(np.dot(INDEPENDENT, known))))
    assert contested([p], [c], 0, independent)[0] == pytest.approx([alone])


def test_texts_count_how_often_each_token_was_copied_rightly() -> None:
    lookup = Lookup(tokens=[1, 2, 3, 4, 5, 6, 1, 2, 3])
    lookup.watch()
    lookup.add([4, 5, 9, 1])  # 6 was wrong, and nothing is compared after it
    assert lookup.outcomes == {4: (1, 0), 5: (1, 0), 6: (0, 1)}


def test_planted_weights_are_found() -> None:
    rng = np.random.default_rng(0)
    calibration = Calibration((2.0, 0.5), (0.3, -0.2), slopes=(0.5, 2.0))
    n = 20_000
    slots, evidence = rng.integers(0, 2, n), rng.normal(0, 1, n)
    odds = calibration.log_odds(np.stack([evidence, evidence], axis=1))[np.arange(n), slots]
    facts = np.stack([np.ones(n), rng.normal(0, 1, n), odds, *rng.normal(0, 1, (3, n))], axis=1)
    won = rng.uniform(size=n) < sigmoid(facts @ PLANTED)
    facts[:, 2] = evidence
    rows = np.concatenate([slots[:, None], facts, won[:, None]], axis=1)
    np.testing.assert_allclose(fit_copy_weights(calibration, rows), PLANTED, atol=0.06)
    assert fit_copy_weights(calibration, rows[:59]) == ()


def test_recorded_rounds_hold_their_disagreements() -> None:
    """The draft 4 7 8 leaves the copied 4 5 6 after one token, which the target decides."""
    for following, won in ((5, [1.0]), (9, [])):
        lookup, recorder = Lookup(tokens=[1, 2, 3, 4, 5, 6, 1, 2, 3]), Recorder(3)
        lookup.chances = recorder.copies
        draft = draft_of([4, 7, 8], [[0.9, 0.1], [0.6, 0.4], [0.5, 0.4]], others=5)
        assert recorder.choose(draft, lookup, 3, 0, 0.0) == (None, 3)
        lookup.add([4, following])
        recorder.learn(1, 3)
        assert [row[-1] for row in recorder.disagreements] == won
        if won:
            prior = CopyChances().of(Copy(4, [5]))[0]
            facts = [1, logit(prior), math.log(1.5), math.log(0.4), 0, 0]
            assert recorder.disagreements[0][:-1] == pytest.approx([1, *facts])


def test_weights_decide_between_a_copy_and_a_draft() -> None:
    """The same copy against the same draft: offered or not as the weights say."""
    rows = (1e-3,) * 4
    costs = Costs(Curve((64, 2048), (1e-3, 1e-3), (1e-5, 1e-5), (rows, rows)))
    lookup = Lookup(tokens=[1, 2, 3, 4, 5, 6, 1, 2, 3])
    draft = draft_of([7, 8, 9], [[0.5, 0.4]] * 3, others=4)
    chances = [0.5, 0.5, 0.5]
    for sign, offered in ((3.0, True), (-3.0, False)):
        calibration = Calibration((1.0,) * 3, (0.0,) * 3, copy_weights=(sign, 0, 0, 0, 0, 0))
        copying = Copying(Forecast(costs, calibration))
        values = Values(costs.verify(64), [1e-3] * 3, Disagreement.of(draft, lookup))
        offer = copying.instead_of_path(chances, [7, 8, 9], lookup.whole(), values)
        assert (offer is not None) is offered
        if offer is not None:
            p = CopyChances().of(Copy(3, [4]))[0]
            one = (p * 0.5 + 0.5 * (1 - p)) / (1 - p * 0.5)
            assert offer.chances[0] == pytest.approx(one * float(sigmoid(np.array(sign))))

"""A drafter's proposal against the float64 round of its checkpoint."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from dspine_mlx.convert.reference import Chain, Head
from dspine_mlx.drafters.chain import ChainProposal
from dspine_mlx.drafters.drafter import Drafter
from tests.support.checkpoints import (
    Checkpoint,
    Shape,
    random_features,
)


def assert_same_round(
    drafter: Drafter, score: Callable[..., Any], checkpoint: Checkpoint, head: Head, shape: Shape
) -> None:
    """Candidates are the best base logits, and all scores agree within 1e-5; of a chain, those of
    all tokens along its greedy path, which is the published one."""
    config, weights = checkpoint
    features, anchor = random_features(shape), 5
    cache = drafter.make_cache()
    proposal = drafter.propose(anchor, mx.array(features)[None], cache)
    if isinstance(proposal, ChainProposal):
        assert_same_path(proposal, partial(score, weights, config, head, features, anchor))
        return
    proposal = proposal.ranked()
    ids = np.array(proposal.candidates).astype(int)
    wanted = score(weights, config, head, features, anchor, candidates=ids)
    best = -np.sort(-wanted.base, axis=1)[:, : ids.shape[1]]
    tolerance = 1e-5 * max(1, np.abs(wanted.transitions).max(initial=0))
    np.testing.assert_allclose(np.take_along_axis(wanted.base, ids, 1), best, atol=tolerance)
    np.testing.assert_allclose(np.array(proposal.first), wanted.first, atol=tolerance)
    np.testing.assert_allclose(np.array(proposal.transitions), wanted.transitions, atol=tolerance)
    if wanted.confidence is not None:
        assert proposal.confidence is not None
        np.testing.assert_allclose(np.array(proposal.confidence), wanted.confidence, atol=1e-5)


def assert_same_path(proposal: ChainProposal, score: Callable[..., Chain]) -> None:
    ((path, _),) = proposal.paths([mx.zeros(proposal.candidates.shape)], 1.0)
    tokens = proposal.tokens[path].tolist()
    wanted = score(path=tokens)
    scores = np.full(wanted.scores.shape, -np.inf)
    scores[:, np.array(proposal.tokens)] = np.array(proposal.scores_on(path))
    tolerance = 2e-5 * max(1, np.abs(wanted.scores[np.isfinite(wanted.scores)]).max())
    np.testing.assert_allclose(scores, wanted.scores, atol=tolerance)
    best = wanted.scores.max(axis=1) - np.take_along_axis(wanted.scores, np.array([tokens]).T, 1).T
    assert best.max() <= tolerance
    confidence = proposal.confidence_on(path)
    assert (confidence is None) == (wanted.confidence is None)
    if confidence is not None and wanted.confidence is not None:
        np.testing.assert_allclose(np.array(confidence), wanted.confidence, atol=1e-5)

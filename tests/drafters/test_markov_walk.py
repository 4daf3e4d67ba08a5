"""DSpark's walk against the published definition, p_k = softmax(U_k + B_k) over all tokens."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen3
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.markov_walk import MarkovProposal
from dspine_mlx.load import load_drafter
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import select
from tests.drafters.test_dspark import (
    FEATURES,
    B,
    D,
    V,
    as_float64,
    model,
    reference_bias,
    reference_confidence,
    reference_states,
    tensors,
    write,
)
from tests.support.bigrams import bigram_target, knowing_dspark
from tests.support.checkpoints import offsets

__all__ = ["model"]  # the fixture
WALK = {"candidate_pool": 1 << 14}
ANCHOR = 11


def proposed(drafter: Drafter) -> MarkovProposal:
    rows = mx.array(FEATURES.astype(np.float32))[None]
    proposal = drafter.propose(ANCHOR, rows, drafter.make_cache())
    assert isinstance(proposal, MarkovProposal)
    return proposal


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_walk_is_as_published(
    kind: str, with_markov: bool, model: qwen3.Model, tmp_path: Path
) -> None:
    """The greedy path over the whole vocabulary; the distribution of a sampled draft along its own
    path, which for the recurrent head counts as a whole; and the confidence along both."""
    weights = tensors(kind, with_markov)
    changes = {"markov_head_type": kind, "confidence_head_with_markov": with_markov}
    drafter = load_drafter(write(tmp_path / "d", weights, **changes | WALK), model)
    w = as_float64(weights)
    embed = np.array(model.model.embed_tokens.weight).astype(np.float64)
    h = reference_states(w, embed, ANCHOR, FEATURES)
    base = h @ embed.T

    def check(tokens: list[int], log_odds: list[float]) -> np.ndarray:
        path = [ANCHOR, *tokens]
        rows = [base[t] + reference_bias(w, kind, h, path[: t + 1]) for t in range(B)]
        wanted = [reference_confidence(w, h[t], path[t], with_markov) for t in range(B)]
        odds = np.log(wanted) - np.log1p(-np.array(wanted))
        np.testing.assert_allclose(log_odds, odds, rtol=1e-3, atol=1e-4)
        return np.stack(rows)

    greedy = select(proposed(drafter))
    assert greedy.evidence is not None
    rows = check(greedy.tokens.tolist(), greedy.evidence.log_odds())
    assert greedy.tokens.tolist() == rows.argmax(axis=1).tolist()
    assert greedy.tokens.tolist() != base.argmax(axis=1).tolist()  # the head matters here
    for _ in range(5):
        sampled = select(proposed(drafter), Sampler(temp=0.8))
        assert sampled.evidence is not None
        rows = check(sampled.tokens.tolist(), sampled.evidence.log_odds()) / 0.8
        q = np.exp(rows - rows.max(axis=1, keepdims=True))
        q /= q.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(np.array(sampled.q), q, atol=1e-5)


def test_a_reduced_vocabulary(model: qwen3.Model, tmp_path: Path) -> None:
    ids = np.sort(np.random.default_rng(4).permutation(V)[:20])
    weights = tensors(draft=20)
    weights["lm_head.weight"] = model.model.embed_tokens.weight[mx.array(ids)]
    weights["d2t"] = mx.array(offsets(ids))
    drafter = load_drafter(write(tmp_path / "d", weights, draft_vocab_size=20, **WALK), model)
    w = as_float64(weights)
    embed = np.array(model.model.embed_tokens.weight).astype(np.float64)
    h = reference_states(w, embed, ANCHOR, FEATURES)
    base, path = h @ w["lm_head.weight"].T, [ANCHOR]
    for t in range(B):
        scores = base[t] + reference_bias(w, "vanilla", h, path)
        path.append(int(ids[scores.argmax()]))
    assert select(proposed(drafter)).tokens.tolist() == path[1:]


@pytest.mark.parametrize("size", [1, 9, 30])
def test_a_pool_holds_what_the_backbone_thinks_possible(
    size: int, model: qwen3.Model, tmp_path: Path
) -> None:
    """Every slot's best base token; their scores are those of the whole vocabulary."""
    drafter = load_drafter(write(tmp_path / "d", tensors(), candidate_pool=size), model)
    whole = proposed(load_drafter(write(tmp_path / "w", tensors(), **WALK), model))
    proposal = proposed(drafter)
    pool = proposal.tokens.tolist()
    assert len(set(pool)) == size
    below = np.array(whole.base) - np.array(whole.base).max(axis=1, keepdims=True)
    assert set(pool) == set(np.argsort(-below.max(axis=0), kind="stable")[:size].tolist())
    tokens = select(proposal).tokens
    picks = mx.array([pool.index(token) for token in tokens.tolist()])
    wanted = whole.scores_on(tokens)[:, proposal.tokens]
    assert mx.allclose(proposal.scores_on(picks), wanted, atol=1e-4)


def test_packed_heads_are_walked(model: qwen3.Model, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    weights = tensors() | {
        f"markov_head.markov_w{i}.weight": mx.array(rng.standard_normal((V, 32)).astype(np.float32))
        for i in (1, 2)
    }
    weights["confidence_head.proj.weight"] = mx.zeros((1, D + 32))
    drafter = load_drafter(write(tmp_path / "d", weights, markov_rank=32, **WALK), model)
    exact = proposed(drafter)
    nn.quantize(drafter.network, 32, 8, class_predicate=lambda path, _: "markov_w" in path)
    packed = proposed(drafter)
    path = select(exact).tokens
    error = mx.abs(packed.scores_on(path) - exact.scores_on(path)).max()
    assert 0 < error.item() < 0.3


def tokens_per_round(
    target: nn.Module, tokenizer: TokenizerWrapper, drafter: Drafter, temp: float
) -> float:
    options: dict[str, Any] = {"verify_length": drafter.config.num_proposals}
    if temp:
        options["sampler"] = Sampler(temp=temp)
    tokens = rounds = 0
    for n in range(24 if temp == 0 else 8):
        mx.random.seed(n)
        last = list(
            dspine_mlx.stream_generate(
                target,
                tokenizer,
                [5, 6 + 17 * n],
                drafter,
                max_tokens=24 + 40 * (temp > 0),
                **options,
            )
        )[-1]
        tokens, rounds = tokens + last.generation_tokens - 1, rounds + last.rounds
    return tokens / rounds


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_a_head_overrules_its_backbone(temp: float, tokenizer: TokenizerWrapper) -> None:
    """The backbone knows how frequent tokens are; the head knows what follows what."""
    target = bigram_target(4096, spread=4.0, frequency=2.0)
    lengths = {
        name: tokens_per_round(target, tokenizer, knowing_dspark(target, 0.2, **changes), temp)
        for name, changes in {
            "pool": {"candidate_pool": 2048},
            "whole": {},
            "table": {"candidate_pool": 0, "top_k": 16},
        }.items()
    }
    assert lengths["pool"] >= 0.98 * lengths["whole"]
    assert lengths["table"] < 0.8 * lengths["whole"]

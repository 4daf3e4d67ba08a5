"""Drafts that foresee seeded draws: the text stays the seed's, and the state is the right one."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.proposal import Proposal
from dspine_mlx.metal.walk import walk
from dspine_mlx.round import select as selection
from dspine_mlx.round.foresee import draws_by_inverse_cdf, foresee
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import select
from dspine_mlx.target.model import Target
from tests.support.samplers import PROCESSORS, SAMPLERS
from tests.support.tiny import (
    VOCABULARY,
    Step,
    drafter_config,
    plain_steps,
    random_prompt,
    randomise,
    same_steps,
    scripted,
    tiny_dflash,
    tiny_dspine,
    tiny_target,
)

EXACT = 1e-4  # error of a drafter whose rows are the target's
SMALL = 64  # tokens of a vocabulary that is all candidates


def shuffled(rows: mx.array, seed: int) -> Proposal:
    """A proposal of the rows' distributions [M, V], whatever token came before, with all tokens as
    candidates in an order of its own."""
    M, V = rows.shape
    order = np.random.default_rng(seed).permuted(np.tile(np.arange(V), (M, 1)), axis=1)
    ids = mx.array(order.astype(np.uint32))
    scores = mx.take_along_axis(rows.astype(mx.float32), ids, axis=-1)
    return Proposal(ids, scores[0], mx.broadcast_to(scores[1:, None], (M - 1, V, V)))


def path(proposal: Proposal, sampler: Sampler, state: mx.array, error: float) -> list[int]:
    first, transitions = foresee(proposal, sampler, state, error)
    picks = walk(first, transitions, mx.zeros(proposal.candidates.shape))[0]
    return mx.take_along_axis(proposal.candidates, picks[:, None], axis=1)[:, 0].tolist()


@pytest.mark.parametrize("name", SAMPLERS)
@settings(deadline=None, max_examples=20, derandomize=True)
@given(seed=st.integers(0, 10_000), M=st.integers(1, 6))
def test_the_right_row_foresees_the_draw(name: str, seed: int, M: int) -> None:
    """Seeded draws from known rows are what a drafter with these very rows proposes."""
    sampler = Sampler(**SAMPLERS[name], xtc_special_tokens=(1, 5), seeded=True)
    logits = mx.random.normal((M, SMALL), key=mx.random.key(seed)) * 2
    rows = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.random.seed(seed)
    state = mx.array(mx.random.state[0])
    drawn = [sampler(row[None]).item() for row in rows]
    assert path(shuffled(rows, seed), sampler, state, EXACT) == drawn
    mx.random.seed(seed + 1)
    other = mx.array(mx.random.state[0])
    assert M < 3 or path(shuffled(rows, seed), sampler, other, EXACT) != drawn


@settings(deadline=None, max_examples=20, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_chances_are_those_of_intervals_with_normal_errors(seed: int) -> None:
    """Against a simulation of the rule's own words: boundaries c + s(c) z with one z for all."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(5))
    sampler = Sampler(temp=1.0, seeded=True)
    proposal = shuffled(mx.log(mx.array(p[None].astype(np.float32))), seed)
    state = mx.random.key(seed)
    chances = np.exp(np.array(foresee(proposal, sampler, state)[0]))
    u = mx.random.uniform(key=mx.random.split(state)[1]).item()
    c = np.cumsum(p)[:-1]
    z = rng.standard_normal(100_000)
    boundaries = c + 0.25 * np.sqrt(c * (1 - c)) * z[:, None]
    drawn = np.bincount((boundaries < u).sum(axis=1), minlength=5) / len(z)
    assert np.abs(chances - drawn[np.array(proposal.candidates[0])]).max() < 0.01


@dataclass(eq=False)
class Knowing(Drafter):
    """A drafter that knows the target's rows after a known text."""

    text: list[int] = field(default_factory=list)
    rows: list[mx.array] = field(default_factory=list)  # logprobs after the prompt's tokens
    prompt: int = 0

    def propose(self, anchor: int | mx.array, features: mx.array, cache: list[Any]) -> Proposal:
        if features.shape[1]:
            self.extend(features, cache)
        start = cache[0].offset + 1 - self.prompt  # tokens of the text before slot 1
        M = self.config.num_proposals
        rows = self.rows[start : start + M]
        rows += [mx.zeros(SMALL)] * (M - len(rows))
        return shuffled(mx.stack(rows), start)


def knowing(model: nn.Module, prompt: list[int], plain: list[Step]) -> Knowing:
    settings = drafter_config(num_hidden_layers=1, vocab_size=SMALL)
    network = randomise(DFlash(DrafterConfig.from_dict(settings)), 5)
    target, text = Target(model), prompt + [token for token, _ in plain]
    rows = [logprobs for _, logprobs in plain]
    return Knowing(network, target, target, text=text, rows=rows, prompt=len(prompt))


def responses(
    model: nn.Module, tokenizer: TokenizerWrapper, prompt: list[int], drafter: Drafter, **given: Any
) -> list[dspine_mlx.GenerationResponse]:
    mx.random.seed(5)
    return list(dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, **given))


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("processors", ["none", "all"])
def test_a_drafter_with_the_targets_rows_is_always_accepted(
    tokenizer: TokenizerWrapper, name: str, processors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "foresee", partial(foresee, error=EXACT))
    model = tiny_target(vocab_size=SMALL, scale=0.25)
    prompt = [token % SMALL for token in random_prompt(12)]
    sampler = Sampler(**SAMPLERS[name], seeded=True)

    def options() -> dict[str, Any]:
        known = PROCESSORS[processors] | {"logit_bias": {2: -100.0}}  # 2 ends texts
        return {"max_tokens": 40, "logits_processors": make_logits_processors(**known)}

    mx.random.seed(5)
    plain = plain_steps(model, tokenizer, prompt, sampler=sampler.function, **options())
    assert len({token for token, _ in plain}) > 10
    drafter = knowing(model, prompt, plain)
    ours = responses(
        model, tokenizer, prompt, drafter, sampler=sampler, verify_length=7, **options()
    )
    assert same_steps([(r.token, r.logprobs) for r in ours], plain)
    assert ours[-1].accepted == ours[-1].drafted == 35  # in five rounds


def reduced(model: nn.Module) -> Drafter:
    """A drafter that knows every third token of the target's."""
    config = DrafterConfig.from_dict(drafter_config(draft_vocab_size=VOCABULARY // 3))
    network = randomise(DFlash(config), 1)
    network.d2t = mx.arange(0, 3 * (VOCABULARY // 3), 3, dtype=mx.uint32)
    return network.bind(Target(model))


RANDOM = {"dspine": tiny_dspine, "dflash": tiny_dflash, "reduced": reduced}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("processors", ["none", "all"])
def test_seeded_text_is_the_targets(
    model: nn.Module, tokenizer: TokenizerWrapper, name: str, processors: str
) -> None:
    """Of a drafter with random weights, each kind in its turn, and of one that is right now and
    then."""
    prompt = random_prompt(17)
    sampler = Sampler(**SAMPLERS[name], seeded=True)

    def options() -> dict[str, Any]:
        return {
            "max_tokens": 20,
            "logits_processors": make_logits_processors(**PROCESSORS[processors]),
        }

    mx.random.seed(5)
    plain = plain_steps(model, tokenizer, prompt, sampler=sampler.function, **options())
    text = prompt + [token for token, _ in plain]
    turn = 2 * list(SAMPLERS).index(name) + (processors == "all")
    random = list(RANDOM.values())[turn % len(RANDOM)](model)
    length = "auto" if name == "temperature" else 7
    for drafter in (random, scripted(model, text, "now and then")):
        ours = responses(
            model, tokenizer, prompt, drafter, sampler=sampler, verify_length=length, **options()
        )
        assert same_steps([(r.token, r.logprobs) for r in ours], plain), drafter


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_filter_may_cut_foreseen_drafts(
    model: nn.Module, tokenizer: TokenizerWrapper, kept: int
) -> None:
    prompt, sampler = random_prompt(17), Sampler(temp=0.8, seeded=True)
    mx.random.seed(5)
    plain = plain_steps(model, tokenizer, prompt, sampler=sampler.function, max_tokens=24)
    drafter = tiny_dspine(model)
    ours = responses(
        model,
        tokenizer,
        prompt,
        drafter,
        sampler=sampler,
        max_tokens=24,
        draft_filter=lambda tokens, draft: min(kept, len(draft)),
        verify_length=7,
    )
    assert same_steps([(r.token, r.logprobs) for r in ours], plain)
    assert set(ours[-1].verify_lengths) <= set(range(kept + 1))


def test_foreseeing_draws_nothing(model: nn.Module) -> None:
    drafter = tiny_dspine(model)
    features = mx.random.normal((1, 5, drafter.network.feature_size))
    proposal = drafter.propose(9, features, drafter.make_cache())
    state = mx.array(mx.random.state[0])
    for xtc in (0.0, 0.5):
        draft = select(proposal, Sampler(temp=1.0, xtc_probability=xtc, seeded=True))
        mx.eval(draft.tokens)
        assert draft.q is None
        assert mx.array_equal(mx.random.state[0], state).item()


def test_where_mlx_draws_otherwise_the_best_tokens_are_drafted(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, sampler = tiny_dspine(model), Sampler(temp=2.0, seeded=True)
    features = mx.random.normal((1, 5, drafter.network.feature_size))
    proposal = drafter.propose(9, features, drafter.make_cache())
    greedy = select(proposal).tokens.tolist()
    assert draws_by_inverse_cdf()
    assert select(proposal, sampler).tokens.tolist() != greedy
    monkeypatch.setattr(selection, "draws_by_inverse_cdf", lambda: False)
    assert select(proposal, sampler).tokens.tolist() == greedy

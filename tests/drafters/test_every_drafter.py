"""What holds for every kind of drafter, whatever it knows."""

from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.drafters.chain import ChainProposal
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft, evidence, select
from dspine_mlx.verify_length.fit import calibrate, record
from dspine_mlx.verify_length.store import load_calibrations, save_calibrations
from tests.round.test_losslessness import Toy, chosen, distance, policy, probs_of_round
from tests.server.test_grammar import PROMPT, constrained
from tests.support.bigrams import KNOWING, bigram_target
from tests.support.drafters import EVERY
from tests.support.families import build
from tests.support.tiny import Step, plain_steps, random_prompt, same_steps, tiny_target

VARIETY = [*EVERY, *(f"knowing {name}" for name in KNOWING)]


@pytest.fixture(scope="module")
def bigram() -> nn.Module:
    return bigram_target(64, seed=2)


@pytest.fixture
def pair(
    request: pytest.FixtureRequest, model: nn.Module, bigram: nn.Module
) -> tuple[nn.Module, Drafter]:
    """A target and a drafter for it: a random one, nearly all of whose tokens are rejected, or
    one that is often right."""
    name = request.param
    if name in EVERY:
        return model, EVERY[name](model)
    return bigram, KNOWING[name.removeprefix("knowing ")](bigram)


every_pair = pytest.mark.parametrize("pair", VARIETY, indirect=True)
Pair = tuple[nn.Module, Drafter]


def prompt_for(model: nn.Module, length: int) -> list[int]:
    V = model.model.embed_tokens.weight.shape[0]
    return [4 + token % (V - 4) for token in random_prompt(length)]


def steps(pair: Pair, tokenizer: TokenizerWrapper, prompt: list[int], **options: Any) -> list[Step]:
    responses = dspine_mlx.stream_generate(pair[0], tokenizer, prompt, pair[1], **options)
    return [(r.token, r.logprobs) for r in responses]


@every_pair
@pytest.mark.parametrize("verify_length", ["auto", 3])
def test_greedy_text_is_the_targets(
    pair: Pair, tokenizer: TokenizerWrapper, verify_length: Any
) -> None:
    prompt = prompt_for(pair[0], 21)
    plain = plain_steps(pair[0], tokenizer, prompt, max_tokens=24)
    ours = steps(pair, tokenizer, prompt, max_tokens=24, verify_length=verify_length)
    assert same_steps(ours, plain)


@every_pair
def test_seeded_text_is_the_targets(pair: Pair, tokenizer: TokenizerWrapper) -> None:
    """Of a sampler that is a mere function, and with penalties and a filter of drafts."""
    prompt = prompt_for(pair[0], 17)

    def options() -> dict[str, Any]:
        mx.random.seed(5)
        return {
            "max_tokens": 24,
            "sampler": make_sampler(temp=0.9, top_p=0.9),
            "logits_processors": make_logits_processors({20: 3.0}, 1.2),
        }

    plain = plain_steps(pair[0], tokenizer, prompt, **options())
    ours = steps(pair, tokenizer, prompt, **options())
    assert same_steps(ours, plain)
    filtered = steps(
        pair, tokenizer, prompt, draft_filter=lambda _, draft: len(draft) // 2, **options()
    )
    assert same_steps(filtered, plain)


@every_pair
@pytest.mark.parametrize("taken", [1, pytest.param(6, marks=pytest.mark.slow), 19])
def test_caches_hold_the_text(pair: Pair, tokenizer: TokenizerWrapper, taken: int) -> None:
    """Wherever a text is left: the drafter's caches are those of the text's features, and the next
    turn goes on from them as plain decoding does."""
    model, drafter = pair
    prompt, cache = prompt_for(model, 15), make_prompt_cache(model)
    generator = dspine_mlx.stream_generate(
        model, tokenizer, prompt, drafter, max_tokens=40, prompt_cache=cache
    )
    said = [next(generator).token for _ in range(taken)]
    generator.close()
    text = mx.array(prompt + said)
    assert {c.offset for c in cache} == {text.size}
    taps = drafter.config.target_layer_ids
    fresh = drafter.make_cache()
    drafter.extend(drafter.target.forward(text, make_prompt_cache(model), taps)[1], fresh)
    for ours, wanted in zip(cache[-len(fresh) :], fresh, strict=True):
        for a, b in ((ours.keys, wanted.keys), (ours.values, wanted.values)):
            assert mx.allclose(a[:, :, : text.size], b[:, :, : text.size], atol=1e-4)
    turn = prompt_for(model, 5)
    ours = steps(pair, tokenizer, turn, max_tokens=12, prompt_cache=cache)
    plain = plain_steps(model, tokenizer, prompt + said + turn, max_tokens=12)
    assert [token for token, _ in ours] == [token for token, _ in plain]


class Drawn(Toy):
    """A drafter's own proposal, with the distribution that it states for the path drawn, before a
    target that looks at the whole prefix."""

    def __init__(self, drafter: Drafter, sampler: Sampler, V: int, seed: int):
        features = mx.random.normal(
            (1, 5, drafter.no_features().shape[-1]), key=mx.random.key(seed)
        )
        proposal = drafter.propose(1, features, drafter.make_cache())
        self.proposal = proposal if isinstance(proposal, ChainProposal) else proposal.ranked()
        M, K = self.proposal.candidates.shape
        super().__init__(V, K, M, seed)
        self.candidates, self.sampler = np.array(self.proposal.candidates), sampler

    def draft(self, picks: tuple[int, ...]) -> tuple[Draft, float]:
        forced = mx.where(mx.arange(self.K) == mx.array(picks)[:, None], 1e30, 0.0)
        (path, q), (greedy, greedy_q) = self.proposal.paths(
            [forced, mx.zeros((self.M, self.K))], 1 / self.sampler.temp
        )
        assert path.tolist() == list(picks)
        rows = np.array(q, np.float64)
        rows /= rows.sum(axis=-1, keepdims=True)
        drawn = evidence(self.proposal, path, q, frozenset())
        ahead = evidence(self.proposal, greedy, greedy_q, frozenset())
        draft = Draft(
            mx.array(self.candidates[np.arange(self.M), list(picks)]),
            mx.array(self.candidates),
            mx.array(rows, mx.float64),
            drawn,
            ahead,
        )
        return draft, float(np.prod(rows[np.arange(self.M), list(picks)]))


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_sampled_text_has_the_targets_distribution(kind: str, seed: int) -> None:
    """By enumeration of all drafts and outcomes of a round, at lengths that the policy chooses."""
    V, model = 5, tiny_target(vocab_size=5)
    drafter = EVERY[kind](
        model,
        vocab_size=V,
        block_size=2 if "dspark" in kind else 3,
        top_k=3,
        **{"selector_top_k": 3} if kind == "dflash2" else {},
    )
    toy = Drawn(drafter, Sampler(temp=1.3), V, seed)
    probs = probs_of_round(toy, chosen(policy(toy, seed + 3), toy.M), block=True, tested=True)
    assert distance(probs, toy.wanted()) < 1e-12
    drawn = [toy.draft(p)[1] for p in product(range(toy.K), repeat=toy.M)]
    assert sum(drawn) == pytest.approx(1)
    assert max(drawn) < 0.9  # it is no one-hot draft


@every_pair
def test_texts_can_be_calibrated_on(
    pair: Pair, tokenizer: TokenizerWrapper, tmp_path: Path
) -> None:
    """Rounds with evidence for every slot, a fit, and its file."""
    model, drafter = pair
    sampler = Sampler(temp=1.0)
    texts = [
        record(model, tokenizer, drafter, prompt_for(model, n), sampler, 60) for n in (9, 10, 11)
    ]
    M = drafter.config.num_proposals
    assert {rounds.evidence.shape[1] for rounds in texts} == {M}
    evidence = np.concatenate([rounds.evidence for rounds in texts])
    assert not np.isnan(evidence).any()
    assert len(evidence) >= 12
    fitted = calibrate(texts)
    save_calibrations(tmp_path / "fitted.json", drafter, {"greedy": fitted.calibration})
    loaded = load_calibrations(drafter, tmp_path / "fitted.json")
    assert loaded == {"greedy": fitted.calibration}


@pytest.mark.parametrize("name", KNOWING)
@pytest.mark.parametrize("sampler", [None, Sampler(temp=1.0)], ids=["greedy", "sampled"])
def test_a_drafter_that_knows_is_believed(
    name: str, sampler: Sampler | None, bigram: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """The control of the tests above: a good part of the tokens comes from drafts."""
    drafter = KNOWING[name](bigram)
    tokens = rounds = 0
    for n in range(6):
        prompt = prompt_for(bigram, 4 + n)
        options: dict[str, Any] = {} if sampler is None else {"sampler": sampler}
        last = list(
            dspine_mlx.stream_generate(
                bigram, tokenizer, prompt, drafter, max_tokens=40, verify_length=5, **options
            )
        )[-1]
        tokens, rounds = tokens + last.generation_tokens, rounds + last.rounds
    assert tokens > 1.8 * rounds


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("family", ["qwen3_5", "gemma3_text"])
def test_other_targets(kind: str, family: str, tokenizer: TokenizerWrapper) -> None:
    """A hybrid one, whose recurrent states roll back, and one with windows."""
    model = build(family)
    drafter = EVERY[kind](model, hidden_size=64, head_dim=16)
    prompt = random_prompt(9)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=24)
    ours = steps((model, drafter), tokenizer, prompt, max_tokens=24, verify_length=4)
    assert [token for token, _ in ours] == [token for token, _ in plain]


@pytest.mark.parametrize("pair", EVERY, indirect=True)
def test_structured_text_is_the_targets(pair: Pair, tokenizer: TokenizerWrapper) -> None:
    """Under a grammar that masks logits and cuts drafts."""
    model = pair[0]
    plain = plain_steps(
        model, tokenizer, PROMPT, logits_processors=[constrained(tokenizer)], max_tokens=24
    )
    grammar = constrained(tokenizer)
    ours = steps(
        pair,
        tokenizer,
        PROMPT,
        logits_processors=[grammar],
        draft_filter=grammar.permitted,
        max_tokens=24,
    )
    assert same_steps(ours, plain)


SEEDED = {
    "temperature": Sampler(temp=1.0, seeded=True),
    "xtc": Sampler(
        temp=1.0,
        xtc_probability=0.5,
        xtc_threshold=0.05,
        xtc_special_tokens=(9, 31),
        seeded=True,
    ),
}


@pytest.mark.parametrize("name", ["dspark", "domino"])
@pytest.mark.parametrize("sampler", SEEDED.values(), ids=SEEDED)
def test_chains_foresee_seeded_draws(
    name: str, sampler: Sampler, bigram: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """The seed's own text, and more of it from drafts than the greedy path would give."""
    drafter, prompt = KNOWING[name](bigram, 0.1), prompt_for(bigram, 9)
    mx.random.seed(3)
    plain = plain_steps(bigram, tokenizer, prompt, sampler=sampler.function, max_tokens=120)
    rounds = {}
    for how, own in (("foreseen", sampler), ("greedy path", sampler.function)):
        mx.random.seed(3)
        options: dict[str, Any] = {"sampler": own, "max_tokens": 120, "verify_length": 5}
        responses = list(
            dspine_mlx.stream_generate(bigram, tokenizer, prompt, drafter, lookup=False, **options)
        )
        assert same_steps([(r.token, r.logprobs) for r in responses], plain)
        rounds[how] = responses[-1].rounds
    assert rounds["foreseen"] < 0.8 * rounds["greedy path"]


def test_a_chain_and_a_table_foresee_the_same() -> None:
    """Over all tokens of a small vocabulary they are the same proposal."""
    small = tiny_target(vocab_size=40)
    features = mx.random.normal((1, 5, 64), key=mx.random.key(1))
    for seed in range(6):
        sampler, paths = Sampler(temp=1.5, top_p=0.9, seeded=True), []
        for pool in (40, 0):
            drafter = EVERY["dspark"](small, vocab_size=40, top_k=40, candidate_pool=pool)
            mx.random.seed(seed)
            proposal = drafter.propose(1, features, drafter.make_cache())
            paths.append(select(proposal, sampler).tokens.tolist())
        assert paths[0] == paths[1]

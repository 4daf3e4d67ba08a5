"""Text stays the target's whatever a policy does: parks, probes and resumes in the real loop."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import Sampler as SamplerFunction
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.round.policy import Fixed
from dspine_mlx.round.select import Draft
from dspine_mlx.round.statistics import Statistics
from tests.support.tiny import plain_steps, random_prompt, same_steps, scripted, tiny_dflash


class Restless(Fixed):
    """Parks after every other round, drafts beside every other plain token, and resumes soon."""

    def __init__(self) -> None:
        super().__init__(7, needs_evidence=True)
        self.rounds = self.waited = 0

    def start_text(self, statistics: Statistics, sampler: SamplerFunction, depth: int) -> None:
        self.statistics = statistics

    def learn(self, accepted: int, offered: int) -> None:
        self.rounds += 1
        self.parked, self.waited = self.rounds % 2 == 0, 0

    def probe_due(self, depth: int) -> bool:
        return self.waited % 2 == 1

    def start_probe(self, draft: Draft) -> None:
        self.statistics.probes += 1

    def plain_token(self, token: int, logprobs: mx.array, waiting: float, depth: int) -> None:
        self.waited += 1
        self.parked = self.waited < 5


@pytest.mark.parametrize("sampler", [None, {"temp": 0.8}, {"temp": 1.0, "top_p": 0.8}])
@pytest.mark.parametrize("kind", ["right", "now and then", "wrong", "random"])
def test_text_is_the_targets_while_parking_and_resuming(
    model: nn.Module, tokenizer: TokenizerWrapper, kind: str, sampler: dict[str, float] | None
) -> None:
    """Seeded text, token for token and logprob for logprob, with and without parking."""
    prompt = random_prompt(17)

    def options() -> dict[str, Any]:
        mx.random.seed(5)
        return {"max_tokens": 60, "sampler": make_sampler(**sampler) if sampler else None}

    plain = plain_steps(model, tokenizer, prompt, **options())
    text = prompt + [token for token, _ in plain]
    drafter = tiny_dflash(model) if kind == "random" else scripted(model, text, kind)
    responses = list(
        dspine_mlx.stream_generate(
            model, tokenizer, prompt, drafter, verify_length=Restless(), **options()
        )
    )
    assert same_steps([(r.token, r.logprobs) for r in responses], plain)
    done = responses[-1].statistics
    assert done.plain > 3  # it was parked
    assert done.rounds > 3  # and resumed
    assert done.probes > 3


@pytest.mark.parametrize("stop_at", [1, 2, 3, 9, 20, 33])
def test_caches_hold_the_text_wherever_it_ends(
    model: nn.Module, tokenizer: TokenizerWrapper, stop_at: int
) -> None:
    prompt = random_prompt(17)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=40)
    drafter = scripted(model, prompt + [t for t, _ in plain], "now and then")
    cache = make_prompt_cache(model)
    generator = dspine_mlx.stream_generate(
        model,
        tokenizer,
        prompt,
        drafter,
        max_tokens=40,
        prompt_cache=cache,
        verify_length=Restless(),
    )
    for _ in range(stop_at):
        next(generator)
    generator.close()
    assert {c.offset for c in cache} == {len(prompt) + stop_at}


def test_probes_leave_the_drafters_context_whole(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """After parking, probes and rounds its cache holds the features of the text, row by row."""
    prompt, drafter = random_prompt(17), tiny_dflash(model)
    cache = make_prompt_cache(model)
    responses = list(
        dspine_mlx.stream_generate(
            model,
            tokenizer,
            prompt,
            drafter,
            max_tokens=40,
            prompt_cache=cache,
            verify_length=Restless(),
        )
    )
    assert responses[-1].statistics.probes > 3
    text = mx.array([*prompt, *(r.token for r in responses)])
    taps = drafter.config.target_layer_ids
    _, features = drafter.target.forward(text, make_prompt_cache(model), taps)
    fresh = drafter.make_cache()
    drafter.extend(features, fresh)
    for ours, wanted in zip(cache[-len(fresh) :], fresh, strict=True):
        assert ours.offset == wanted.offset == text.size
        for a, b in ((ours.keys, wanted.keys), (ours.values, wanted.values)):
            rows = np.array(a)[:, :, : text.size], np.array(b)[:, :, : text.size]
            np.testing.assert_allclose(*rows, atol=1e-4)


class Late(Fixed):
    """Parked for 100 tokens, then rounds of 7."""

    def __init__(self, keeps: bool) -> None:
        super().__init__(7, parked=True)
        self.keeps, self.waited = keeps, 0

    def start_text(self, statistics: Statistics, sampler: SamplerFunction, depth: int) -> None: ...

    def plain_token(self, token: int, logprobs: mx.array, waiting: float, depth: int) -> None:
        self.waited += 1
        self.parked = self.waited < 100

    def keeps_context(self, depth: int) -> bool:
        return self.keeps


@pytest.mark.parametrize("keeps", [True, False])
def test_the_drafters_context_after_a_long_time_parked(
    model: nn.Module, tokenizer: TokenizerWrapper, keeps: bool
) -> None:
    """A drafter that does not keep up has the prompt and the newest 64 rows when it drafts again,
    and everything from there on. The target's text is the same."""
    prompt, drafter = random_prompt(17), tiny_dflash(model)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=120)
    cache = make_prompt_cache(model)
    responses = list(
        dspine_mlx.stream_generate(
            model,
            tokenizer,
            prompt,
            drafter,
            max_tokens=120,
            prompt_cache=cache,
            verify_length=Late(keeps),
            lookup=False,
        )
    )
    assert same_steps([(r.token, r.logprobs) for r in responses], plain)
    text = mx.array([*prompt, *(r.token for r in responses)])
    taps = drafter.config.target_layer_ids
    _, features = drafter.target.forward(text, make_prompt_cache(model), taps)
    # The prompt's last token and the 100 after it are fed one by one.
    missing = 0 if keeps else 101 - 64
    seen = mx.concatenate([features[:, :16], features[:, 16 + missing :]], axis=1)
    fresh = drafter.make_cache()
    drafter.extend(seen, fresh)
    for ours, wanted in zip(cache[-len(fresh) :], fresh, strict=True):
        assert ours.offset == wanted.offset == text.size - missing
        for a, b in ((ours.keys, wanted.keys), (ours.values, wanted.values)):
            rows = np.array(a)[:, :, : wanted.offset], np.array(b)[:, :, : wanted.offset]
            np.testing.assert_allclose(*rows, atol=1e-4)

"""Rounds that offer copies: the text stays the target's, and the policy tells when they pay."""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.round.lookup import Lookup
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.verify_length.auto import Auto
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.costs import Costs, Curve
from tests.support.each_family import EVERY_FAMILY
from tests.support.families import WINDOW, build, random_drafter
from tests.support.lookups import Copying, Told, use
from tests.support.samplers import SAMPLERS, seeded_options
from tests.support.tiny import (
    plain_steps,
    random_prompt,
    same_steps,
    scripted,
    tiny_dspine,
    tiny_target,
)

model_of = cache(build)
NEVER = 10_000  # tokens between two wrong ones


def copied_run(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    lookup: Lookup,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> list[dspine_mlx.GenerationResponse]:
    """A run whose rounds all offer the lookup's copies."""
    use(lookup, monkeypatch)
    drafter = options.pop("drafter", None) or random_drafter(model)
    policy = Copying()
    responses = list(
        dspine_mlx.stream_generate(
            model, tokenizer, prompt, drafter, verify_length=policy, **options
        )
    )
    done = responses[-1].statistics
    assert done.lookups == done.rounds - done.verify_lengths[0] > 0
    return responses


@pytest.mark.parametrize("nth", [pytest.param(NEVER, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_greedy_text_with_copies_is_mlx_lms(
    tokenizer: TokenizerWrapper, family: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = model_of(family), random_prompt(WINDOW - 7)
    plain = [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=20)]
    lookup = Told(prompt + plain, nth)
    ours = copied_run(model, tokenizer, prompt, lookup, monkeypatch, max_tokens=20)
    assert [r.token for r in ours] == plain
    wrong = sum((len(prompt) + i) % nth == 0 for i in range(20))
    assert ours[-1].rounds <= 3 + wrong


@pytest.mark.parametrize(
    ("sampler", "processors", "known"),
    [
        (sampler, ("none", "all")[(i + known) % 2], known)
        for i, sampler in enumerate([None, *SAMPLERS])
        for known in (False, True)
    ],
)
def test_seeded_text_with_copies_is_mlx_lms(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    sampler: str | None,
    processors: str,
    known: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = random_prompt(17)

    plainly = make_sampler(**SAMPLERS[sampler]) if sampler else None
    plain = plain_steps(model, tokenizer, prompt, sampler=plainly, **seeded_options(processors, 24))
    ours = Sampler(**SAMPLERS[sampler], seeded=True) if sampler and known else plainly
    lookup = Told(prompt + [token for token, _ in plain], 4)
    drafter = tiny_dspine(model)
    steps = copied_run(
        model,
        tokenizer,
        prompt,
        lookup,
        monkeypatch,
        drafter=drafter,
        sampler=ours,
        **seeded_options(processors, 24),
    )
    assert same_steps([(r.token, r.logprobs) for r in steps], plain)


@pytest.mark.parametrize("caches", [{"kv_bits": 8, "kv_group_size": 32}, {"max_kv_size": 16}])
def test_copies_with_quantised_and_limited_caches(
    tokenizer: TokenizerWrapper, caches: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny_target(head_dim=32), random_prompt(12)
    options = {"max_tokens": 24, "quantized_kv_start": 20} | caches
    plain = plain_steps(model, tokenizer, prompt, **options)
    lookup = Told(prompt + [token for token, _ in plain], 5)
    drafter = tiny_dspine(model)
    ours = copied_run(model, tokenizer, prompt, lookup, monkeypatch, drafter=drafter, **options)
    assert [r.token for r in ours] == [token for token, _ in plain]


@pytest.mark.parametrize("taken", [1, 4, 9])
def test_caches_after_an_early_close(
    model: nn.Module, tokenizer: TokenizerWrapper, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, cache_ = random_prompt(19), make_prompt_cache(model)
    plain = [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=20)]
    use(Told(prompt + plain, 3), monkeypatch)
    drafter = tiny_dspine(model)
    options: dict[str, Any] = {"prompt_cache": cache_, "verify_length": Copying()}
    generator = dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, **options)
    assert [next(generator).token for _ in range(taken)] == plain[:taken]
    generator.close()
    assert {c.offset for c in cache_} == {len(prompt) + taken}


@pytest.mark.parametrize(
    ("after", "kind", "temp"),
    [
        (after, kind, float((i + j) % 2))
        for i, after in enumerate((0, 2, 7))
        for j, kind in enumerate(("right", "now and then", "random"))
    ],
)
def test_seeded_text_with_copies_after_drafted_tokens(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    after: int,
    kind: str,
    temp: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = random_prompt(17)

    def options() -> dict[str, Any]:
        mx.random.seed(5)
        return {"max_tokens": 40, "sampler": make_sampler(temp=temp)}

    plain = plain_steps(model, tokenizer, prompt, **options())
    text = prompt + [token for token, _ in plain]
    drafter = tiny_dspine(model) if kind == "random" else scripted(model, text, kind)
    use(Told(text, 9), monkeypatch)
    policy = Copying(after=after)
    responses = list(
        dspine_mlx.stream_generate(
            model, tokenizer, prompt, drafter, verify_length=policy, **options()
        )
    )
    assert same_steps([(r.token, r.logprobs) for r in responses], plain)
    done = responses[-1].statistics
    assert done.lookups == done.rounds > 0
    if kind == "right":  # only the copies are spoilt
        assert done.rounds <= 2 + 40 // 9


def free_rows(drafter: Any, lines: list[str]) -> Auto:
    """The policy where rows cost nothing: it offers what promises most tokens."""
    M = drafter.config.num_proposals
    rows = (1e-3,) * (M + 1)
    costs = Costs(Curve((64, 2048), (1e-3, 1e-3), (1e-5, 1e-5), (rows, rows)))
    costs.observe = lambda *_: None  # type: ignore[method-assign]
    costs.seen |= {"plain": 1, "verify": 1, "draft": 1}
    return Auto(costs, uncalibrated(M), lines.append)


def test_a_text_that_repeats_itself_is_looked_up(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """A bias makes the model repeat ten tokens, and the drafter is always wrong: nearly all rounds
    after the first ten tokens are copies."""
    prompt = random_prompt(12)

    def options(drafter: Any, lines: list[str]) -> dict[str, Any]:
        processors = [circling]
        policy = free_rows(drafter, lines)
        return {"max_tokens": 80, "logits_processors": processors, "verify_length": policy}

    plain = plain_steps(model, tokenizer, prompt, max_tokens=80, logits_processors=[circling])
    drafter = scripted(model, prompt + [token for token, _ in plain], "wrong")
    done = {}
    for lookup in (True, False):
        lines: list[str] = []
        responses = list(
            dspine_mlx.stream_generate(
                model, tokenizer, prompt, drafter, lookup=lookup, **options(drafter, lines)
            )
        )
        assert same_steps([(r.token, r.logprobs) for r in responses], plain)
        done[lookup] = responses[-1].statistics
        assert sum("looked up" in line for line in lines) == done[lookup].lookups
    assert done[False].lookups == 0
    assert done[False].accepted == 0
    assert done[True].lookups >= done[True].rounds - 13  # the first circle, and 3 tokens to match
    assert done[True].accepted >= 80 - 13 - done[True].lookups - done[True].plain


def circling(tokens: mx.array, logits: mx.array) -> mx.array:
    """Ten tokens over and over, by the number of tokens so far."""
    return logits.at[:, 100 + tokens.size % 10].add(100.0)

"""Drafted output against mlx-lm's own, token for token and logprob for logprob."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from tests.support.samplers import PROCESSORS, SAMPLERS
from tests.support.tiny import (
    SCRIPTS,
    Step,
    plain_steps,
    random_prompt,
    same_steps,
    scripted,
    tiny_dflash,
    tiny_dspine,
    tiny_target,
)


def steps(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    drafter: Drafter,
    **options: Any,
) -> list[Step]:
    responses = dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, **options)
    return [(r.token, r.logprobs) for r in responses]


def text_of(prompt: list[int], plain: list[Step]) -> list[int]:
    return prompt + [token for token, _ in plain]


def slow(value: int) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize("block_size", [2, slow(3), 8, slow(16)])
@pytest.mark.parametrize("kind", [*SCRIPTS, "dflash", "dspine"])
def test_greedy_text_is_the_targets(
    model: nn.Module, tokenizer: TokenizerWrapper, block_size: int, kind: str
) -> None:
    prompt = random_prompt(21)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=40)
    random = {"dflash": tiny_dflash, "dspine": tiny_dspine}
    if kind in random:
        drafter = random[kind](model, block_size=block_size)
    else:
        drafter = scripted(model, text_of(prompt, plain), kind, block_size=block_size)
    assert same_steps(steps(model, tokenizer, prompt, drafter, max_tokens=40), plain)


@pytest.mark.parametrize("block_size", range(2, 17))
def test_every_block_size(model: nn.Module, tokenizer: TokenizerWrapper, block_size: int) -> None:
    """1 to 15 proposals, some of which are accepted, after a prompt of one token."""
    plain = plain_steps(model, tokenizer, [9], max_tokens=33)
    drafter = scripted(model, text_of([9], plain), "now and then", block_size=block_size)
    ours = steps(model, tokenizer, [9], drafter, max_tokens=33, verify_length=block_size - 1)
    assert same_steps(ours, plain)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 65, 300])
def test_prompts_across_chunk_borders(
    model: nn.Module, tokenizer: TokenizerWrapper, length: int
) -> None:
    prompt = random_prompt(length)
    options: dict[str, Any] = {"max_tokens": 12, "prefill_step_size": 32}
    plain = plain_steps(model, tokenizer, prompt, **options)
    calls: dict[str, list[tuple[int, int]]] = {"plain": [], "ours": []}
    plain_steps(
        model,
        tokenizer,
        prompt,
        prompt_progress_callback=lambda *x: calls["plain"].append(x),
        **options,
    )
    drafter = scripted(model, text_of(prompt, plain), "now and then")
    ours = steps(
        model,
        tokenizer,
        prompt,
        drafter,
        prompt_progress_callback=lambda *x: calls["ours"].append(x),
        **options,
    )
    assert same_steps(ours, plain)
    assert calls["ours"] == calls["plain"]


@pytest.mark.parametrize(
    ("sampler", "processors", "kind"),
    [
        pytest.param(
            sampler,
            processors,
            ("right", "now and then")[(i + j) % 2],
            marks=pytest.mark.slow if (i + j) % 3 else (),
        )
        for i, sampler in enumerate([None, *SAMPLERS])
        for j, processors in enumerate(PROCESSORS)
    ],
)
def test_seeded_text_is_the_targets(
    model: nn.Module, tokenizer: TokenizerWrapper, sampler: str | None, processors: str, kind: str
) -> None:
    prompt = random_prompt(17)

    def options() -> dict[str, Any]:
        mx.random.seed(5)
        return {
            "max_tokens": 24,
            "sampler": make_sampler(**SAMPLERS[sampler]) if sampler else None,
            "logits_processors": make_logits_processors(**PROCESSORS[processors]),
        }

    plain = plain_steps(model, tokenizer, prompt, **options())
    drafter = scripted(model, text_of(prompt, plain), kind)
    assert same_steps(steps(model, tokenizer, prompt, drafter, **options()), plain)


def test_a_known_sampler_needs_no_other_results_than_its_probs(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """top_k = 1 has one possible text, whichever way drafts are drawn and tested."""
    prompt = random_prompt(9)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=30)
    for drafter in (tiny_dspine(model), scripted(model, text_of(prompt, plain), "now and then")):
        sampler = dspine_mlx.Sampler(temp=1.0, top_k=1)
        ours = steps(model, tokenizer, prompt, drafter, max_tokens=30, sampler=sampler)
        assert same_steps(ours, plain)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_never_a_token_too_many(
    model: nn.Module, tokenizer: TokenizerWrapper, max_tokens: int, kind: str
) -> None:
    prompt = random_prompt(11)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=30)
    cache = make_prompt_cache(model)
    drafter = scripted(model, text_of(prompt, plain), kind)
    responses = list(
        dspine_mlx.stream_generate(
            model, tokenizer, prompt, drafter, max_tokens=max_tokens, prompt_cache=cache
        )
    )
    assert [r.token for r in responses] == [token for token, _ in plain[:max_tokens]]
    assert [r.finish_reason for r in responses] == [None] * (max_tokens - 1) + ["length"]
    assert {c.offset for c in cache} == {len(prompt) + max_tokens}


class Ending:
    """A tokenizer that ends texts with a chosen token."""

    def __init__(self, tokenizer: TokenizerWrapper, end: int):
        self.wrapper = TokenizerWrapper(tokenizer._tokenizer, eos_token_ids={end})


@pytest.mark.parametrize("verify_length", [0, 1, 4, 7])
@pytest.mark.parametrize("place", range(8))
def test_a_stop_token_inside_a_block(
    model: nn.Module, tokenizer: TokenizerWrapper, place: int, verify_length: int
) -> None:
    prompt = random_prompt(13, seed=8)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=20)
    end = plain[place][0]
    place = next(i for i, (token, _) in enumerate(plain) if token == end)
    ending = Ending(tokenizer, end).wrapper
    plain = plain_steps(model, ending, prompt, max_tokens=20)
    cache = make_prompt_cache(model)
    drafter = scripted(model, text_of(prompt, plain) + random_prompt(9), "right")
    responses = list(
        dspine_mlx.stream_generate(
            model,
            ending,
            prompt,
            drafter,
            max_tokens=20,
            prompt_cache=cache,
            verify_length=verify_length,
        )
    )
    assert [r.token for r in responses] == [token for token, _ in plain]
    assert len(responses) == place + 1
    assert responses[-1].finish_reason == "stop"
    assert responses[-1].text == "" or len(responses) > 1
    assert {c.offset for c in cache} == {len(prompt) + place + 1}


@pytest.mark.parametrize(
    ("kind", "taken", "verify_length"),
    [
        ("right", 1, 0),
        ("right", 5, 0),
        *((kind, (1, 5)[i % 2], 3) for i, kind in enumerate(SCRIPTS)),
        *((kind, (5, 1)[i % 2], 7) for i, kind in enumerate(SCRIPTS)),
    ],
)
def test_second_turn_from_the_cache(
    model: nn.Module, tokenizer: TokenizerWrapper, kind: str, taken: int, verify_length: int | str
) -> None:
    """A generator closed after some tokens leaves a cache of exactly these; a second turn from it
    equals one forward over the whole conversation."""
    prompt, more = random_prompt(19), random_prompt(6, seed=9)
    first = plain_steps(model, tokenizer, prompt, max_tokens=20)
    conversation = text_of(prompt, first[:taken]) + more
    second = plain_steps(model, tokenizer, conversation, max_tokens=15)
    cache = make_prompt_cache(model)
    drafter = scripted(model, text_of(prompt, first), kind)
    options = {"prompt_cache": cache, "max_tokens": 20, "verify_length": verify_length}
    generator = dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, **options)
    tokens = [next(generator).token for _ in range(taken)]
    generator.close()
    assert tokens == [token for token, _ in first[:taken]]
    assert {c.offset for c in cache} == {len(prompt) + taken}
    drafter.text = text_of(conversation, second)
    ours = steps(model, tokenizer, more, drafter, **options | {"max_tokens": 15})
    assert same_steps(ours, second)
    assert {c.offset for c in cache} == {len(conversation) + 15}


def drain(responses: Iterator[Any], seen: list[int]) -> None:
    for response in responses:
        seen.append(response.token)


class Broken:
    """A processor that fails at its nth call."""

    def __init__(self, n: int):
        self.left = n

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("broken processor")
        return logits


@pytest.mark.parametrize("n", [1, 2, 5, 9, 14])
@pytest.mark.parametrize("verify_length", [0, 4])
def test_an_exception_leaves_the_cache_at_the_yielded_text(
    model: nn.Module, tokenizer: TokenizerWrapper, n: int, verify_length: int
) -> None:
    prompt = random_prompt(15)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=30)
    drafter = scripted(model, text_of(prompt, plain), "now and then")
    cache = make_prompt_cache(model)
    seen: list[int] = []
    responses = dspine_mlx.stream_generate(
        model,
        tokenizer,
        prompt,
        drafter,
        max_tokens=30,
        prompt_cache=cache,
        logits_processors=[Broken(n)],
        verify_length=verify_length,
    )
    with pytest.raises(RuntimeError, match="broken processor"):
        drain(responses, seen)
    assert seen == [token for token, _ in plain[: len(seen)]]
    assert {c.offset for c in cache} == {len(prompt) + len(seen)}


@pytest.mark.parametrize("start", [0, 5, 18, 20, 24, 33])
def test_quantised_cache_starts_where_mlx_lms_does(
    model: nn.Module, tokenizer: TokenizerWrapper, start: int
) -> None:
    prompt = random_prompt(18)
    options: dict[str, Any] = {"max_tokens": 24, "kv_bits": 8, "quantized_kv_start": start}
    options["kv_group_size"] = 32
    target = tiny_target(head_dim=32)  # the smallest group of a quantised cache
    plain_cache, cache = make_prompt_cache(target), make_prompt_cache(target)
    plain = plain_steps(target, tokenizer, prompt, prompt_cache=plain_cache, **options)
    drafter = scripted(target, text_of(prompt, plain), "now and then")
    ours = steps(target, tokenizer, prompt, drafter, prompt_cache=cache, **options)
    assert same_steps(ours, plain)
    assert [type(c) for c in cache[:4]] == [type(c) for c in plain_cache]
    assert type(cache[0]) is QuantizedKVCache
    assert type(cache[-1]) is KVCache
    assert {c.offset for c in cache} == {len(prompt) + 24}


def test_mlx_lms_names_for_a_drafter_and_its_length(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    prompt, drafter = random_prompt(9), tiny_dspine(model)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=12)
    options: dict[str, Any] = {"draft_model": drafter, "num_draft_tokens": 3, "max_tokens": 12}
    responses = list(dspine_mlx.stream_generate(model, tokenizer, prompt, **options))
    assert same_steps([(r.token, r.logprobs) for r in responses], plain)
    assert set(responses[-1].verify_lengths) <= {1, 2, 3}
    for wrong, words in (
        ({"drafter": drafter}, "two names for one thing"),
        ({"verify_length": 2}, "num_draft_tokens is 3 and verify_length 2"),
        ({"draft_model": model}, "the drafter is a Model; it must come from load"),
        ({"num_draft_tokens": 2.0}, "verify_length is 2.0"),
    ):
        with pytest.raises(InputError, match=words):
            dspine_mlx.stream_generate(model, tokenizer, prompt, **(options | wrong))

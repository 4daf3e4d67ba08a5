"""Generation where callers do unusual things: threads, other models, interruptions, kept rows."""

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from scipy import stats

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter
from dspine_mlx.round.draft_context import DraftContext
from dspine_mlx.round.text import OWNERS
from dspine_mlx.target.model import Target
from tests.support.tiny import (
    plain_steps,
    random_prompt,
    same_steps,
    scripted,
    tiny_dflash,
    tiny_dspine,
    tiny_target,
)
from tests.test_load import folder  # noqa: F401  # a fixture


def test_a_thread_of_its_own(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    """Load here, run in another thread, read the logprobs here."""
    prompt = random_prompt(7)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=12)
    drafter = tiny_dspine(model)
    mx.eval(drafter.network.parameters())
    steps: list[Any] = []

    def work() -> None:
        options: dict[str, Any] = {"max_tokens": 12, "verify_length": 4}
        for r in dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, **options):
            steps.append((r.token, r.logprobs))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert same_steps(steps, plain)


def test_the_callers_stream_is_left_alone(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    before = mx.default_stream(mx.default_device())
    drafter = tiny_dspine(model)
    texts = [
        dspine_mlx.stream_generate(model, tokenizer, random_prompt(4, seed), drafter, max_tokens=9)
        for seed in (1, 2)
    ]
    for _ in range(3):
        for text in texts:
            next(text)
            assert mx.default_stream(mx.default_device()) == before
    for text in texts:
        text.close()
    assert mx.default_stream(mx.default_device()) == before


def test_a_drafter_of_another_model_is_refused(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    drafter = tiny_dspine(tiny_target(seed=5))
    with pytest.raises(InputError, match="bound to another model"):
        dspine_mlx.stream_generate(model, tokenizer, [5], drafter)


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4", "mxfp8"])
def test_targets_in_every_packing(
    mode: str,
    tokenizer: TokenizerWrapper,
    folder: Any,  # noqa: F811
) -> None:
    target = tiny_target()
    nn.quantize(target, mode=mode, **({"group_size": 32, "bits": 4} if mode == "affine" else {}))
    drafter = load_drafter(folder, target)
    assert drafter.network.norm.weight.dtype == target.model.embed_tokens(mx.array([0])).dtype
    prompt = random_prompt(6)
    plain = plain_steps(target, tokenizer, prompt, max_tokens=8)
    responses = dspine_mlx.stream_generate(
        target, tokenizer, prompt, drafter, max_tokens=8, verify_length=3
    )
    assert [r.token for r in responses] == [token for token, _ in plain]


def test_a_second_text_ends_an_unfinished_one(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    prompt, more = random_prompt(19), random_prompt(6, seed=9)
    first = [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=20)]
    conversation = prompt + first[:3] + more
    second = plain_steps(model, tokenizer, conversation, max_tokens=10)
    cache = make_prompt_cache(model)
    drafter = scripted(model, prompt + first, "right")
    options: dict[str, Any] = {"prompt_cache": cache, "max_tokens": 20, "verify_length": 7}
    suspended = dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, **options)
    assert [next(suspended).token for _ in range(3)] == first[:3]
    drafter.text = conversation + [token for token, _ in second]
    options["max_tokens"] = 10
    ours = dspine_mlx.stream_generate(model, tokenizer, more, drafter, **options)
    assert same_steps([(r.token, r.logprobs) for r in ours], second)
    with pytest.raises(RuntimeError, match="taken over"):
        next(suspended)
    del suspended
    gc.collect()
    assert {c.offset for c in cache} == {len(conversation) + 10}


class Failing(Drafter):
    """A drafter whose nth proposal is interrupted half-way through its layers."""

    left = 3

    def propose(self, anchor: Any, features: mx.array, cache: list[Any]) -> Any:
        self.left -= 1
        if self.left == 0:
            super().propose(anchor, features, cache[:1] + self.make_cache()[1:])
            raise KeyboardInterrupt
        return super().propose(anchor, features, cache)


def test_an_interrupted_proposal_leaves_all_caches_equal(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    bound, cache, prompt = tiny_dspine(model), make_prompt_cache(model), random_prompt(12)
    drafter = Failing(bound.network, bound.target, bound.verifier)
    seen: list[int] = []
    responses = dspine_mlx.stream_generate(
        model, tokenizer, prompt, drafter, max_tokens=30, prompt_cache=cache, verify_length=5
    )
    with pytest.raises(KeyboardInterrupt):
        collect(responses, seen)
    assert {c.offset for c in cache} == {len(prompt) + len(seen)}


def collect(responses: Iterator[Any], seen: list[int]) -> None:
    for response in responses:
        seen.append(response.token)


def test_a_text_whose_end_failed_does_not_go_on(
    model: nn.Module, tokenizer: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caches have moved on."""
    prompt, cache = random_prompt(9), make_prompt_cache(model)
    text = [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=20)]
    drafter = scripted(model, prompt + text, "right")
    options: dict[str, Any] = {"prompt_cache": cache, "max_tokens": 20, "verify_length": 7}
    suspended = dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, **options)
    assert [next(suspended).token for _ in range(3)] == text[:3]

    def interrupt(context: DraftContext) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DraftContext, "catch_up", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(dspine_mlx.stream_generate(model, tokenizer, [5], drafter, **options))
    with pytest.raises(RuntimeError, match="taken over"):
        next(suspended)


def test_quantised_drafter_caches_are_replaced(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """A plain turn of our own leaves the drafter's entries alone; one of mlx-lm's may pack them."""
    target = tiny_target(head_dim=32)
    drafter, prompt = tiny_dspine(target, head_dim=32), random_prompt(9)
    kv: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    for plain_turn in (dspine_mlx.generate, plain_steps):
        cache = make_prompt_cache(target)
        options: dict[str, Any] = {"prompt_cache": cache, "max_tokens": 6} | kv
        dspine_mlx.generate(target, tokenizer, prompt, drafter, **options)
        plain_turn(target, tokenizer, prompt, **options)
        assert cache[0].offset == 2 * (len(prompt) + 6)
        dspine_mlx.generate(target, tokenizer, prompt, drafter, **options)
        assert {c.offset for c in cache[:4]} == {3 * (len(prompt) + 6)}


def test_kept_responses_keep_their_own_row_only(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    prompt = random_prompt(5)
    text = prompt + [t for t, _ in plain_steps(model, tokenizer, prompt, max_tokens=120)]
    drafter = scripted(model, text, "wrong", block_size=16)
    mx.clear_cache()
    before = mx.get_active_memory()
    options: dict[str, Any] = {"max_tokens": 100, "verify_length": 15}
    kept = list(dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, **options))
    gc.collect()
    held = mx.get_active_memory() - before
    assert held < 3 * len(kept) * 2048 * 4  # a block's rows would be 16 times as much


@pytest.mark.parametrize("verify_length", [0, 4, "auto"])
def test_caches_go_with_their_text(
    verify_length: int | str, model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """At once, finished or not: no reference cycle keeps them until a collection."""
    drafter = tiny_dflash(model)
    options: dict[str, Any] = {"max_tokens": 30, "verify_length": verify_length}
    gc.collect()
    gc.disable()
    try:
        for stop in (30, 5):
            responses = dspine_mlx.stream_generate(model, tokenizer, [5, 6], drafter, **options)
            for _ in range(stop):
                next(responses)
            responses.close()
            assert not OWNERS
    finally:
        gc.enable()


@pytest.mark.slow
def test_plain_decoding_does_not_pile_up_features(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    drafter = tiny_dflash(model)
    options: dict[str, Any] = {"max_tokens": 450, "verify_length": 0}
    memory = []
    for r in dspine_mlx.stream_generate(model, tokenizer, [5, 6], drafter, **options):
        if r.generation_tokens in (150, 450):
            gc.collect()
            memory.append(mx.get_active_memory())
    rows = 4 * 2 * 2 * 8 * 4 + 2 * 2 * 2 * 8 * 4  # bytes of keys and values per token, both models
    assert memory[1] - memory[0] < 300 * rows * 1.5 + 256 * rows  # buffers grow in steps of 256


def test_a_drafted_stop_token_counts_as_what_it_is(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    prompt = random_prompt(13, seed=8)
    plain = [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=20)]
    ending = TokenizerWrapper(tokenizer._tokenizer, eos_token_ids={plain[1]})
    drafter = scripted(model, prompt + plain, "right")
    *_, last = dspine_mlx.stream_generate(model, ending, prompt, drafter, verify_length=7)
    assert (last.rounds, last.accepted, last.acceptance_length) == (1, 2, 2.0)
    assert last.statistics.accepted_histogram == {2: 1}


@pytest.mark.parametrize("ends", [{-1}, {None}])
def test_a_tokenizer_without_an_end(
    ends: set, model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    prompt = random_prompt(13, seed=8)
    endless = TokenizerWrapper(tokenizer._tokenizer)
    endless.eos_token_ids = ends
    plain = plain_steps(model, endless, prompt, max_tokens=20)
    drafter = scripted(model, prompt + [token for token, _ in plain], "right")
    options: dict[str, Any] = {"max_tokens": 20, "verify_length": 7}
    ours = dspine_mlx.stream_generate(model, endless, prompt, drafter, **options)
    assert [r.token for r in ours] == [token for token, _ in plain]


@pytest.mark.parametrize("settings", [{"temp": 1.3}, {"top_p": 0.85}])
@pytest.mark.slow
def test_distribution_of_sampled_text(
    settings: dict[str, Any], tokenizer: TokenizerWrapper
) -> None:
    """400 texts of two tokens, sampled drafts and all, against the target's distribution
    (chi-square at 0.1 %); the control is that of another temperature."""
    settings = {"temp": 1.0} | settings
    target = tiny_target(vocab_size=6, scale=0.35, layers=2)
    sizes: dict[str, Any] = {"top_k": 3, "block_size": 4, "target_layer_ids": (0, 1)}
    sizes["vocab_size"] = 6
    drafter = tiny_dspine(target, mask_token_id=5, **sizes)
    sampler = dspine_mlx.Sampler(**settings)
    wrapper = TokenizerWrapper(tokenizer._tokenizer)
    wrapper.eos_token_ids = {99}
    prompt = [1, 4, 2]
    probs = text_probs(target, prompt, sampler)
    counts = np.zeros((6, 6))
    for seed in range(400):
        mx.random.seed(seed)
        responses = dspine_mlx.stream_generate(
            target, wrapper, prompt, drafter, sampler=sampler, max_tokens=2, verify_length=3
        )
        counts[tuple(r.token for r in responses)] += 1
    assert counts[probs == 0].sum() == 0
    assert p_value(counts, probs) > 0.001
    control = text_probs(target, prompt, dspine_mlx.Sampler(**settings | {"temp": 0.4}))
    assert p_value(counts, np.where(probs > 0, control + 1e-9, 0)) < 1e-5


def text_probs(target: nn.Module, prompt: list[int], sampler: dspine_mlx.Sampler) -> np.ndarray:
    """P(x_1, x_2) by forwards of the target alone."""

    def next_probs(tokens: list[int]) -> np.ndarray:
        logits = target(mx.array([tokens]))[0, -1:]
        return np.array(sampler.probs(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0])

    first = next_probs(prompt).astype(np.float64)
    probs = np.zeros((6, 6))
    for x, y in product(range(6), repeat=2):
        probs[x, y] = first[x] * next_probs([*prompt, x])[y] if first[x] else 0
    return probs


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    possible = probs > 0
    expected = probs[possible] / probs[possible].sum() * counts.sum()
    return stats.chisquare(counts[possible], expected).pvalue


@pytest.mark.parametrize(("kept", "after"), [(True, 1), (False, 0)])
def test_the_last_token_is_fed_for_caches_that_are_kept(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    monkeypatch: pytest.MonkeyPatch,
    kept: bool,
    after: int,
) -> None:
    drafter, fed = tiny_dspine(model), [0]
    forward = Target.forward

    def counted(*args: Any) -> tuple[mx.array, mx.array]:
        fed[0] += 1
        return forward(*args)

    monkeypatch.setattr(Target, "forward", counted)
    cache = make_prompt_cache(model) if kept else None
    responses = dspine_mlx.stream_generate(
        model, tokenizer, random_prompt(5), drafter, max_tokens=8, prompt_cache=cache
    )
    for _ in range(8):
        next(responses)
    before = fed[0]
    assert next(responses, None) is None
    assert fed[0] - before == after


def test_threads_take_turns(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    """With one drafter, another one, and none: layers' classes are swapped while a text steps."""
    one, other = tiny_dflash(model), tiny_dflash(model, seed=4)
    mx.eval(model.parameters(), one.network.parameters(), other.network.parameters())
    prompts = [random_prompt(n) for n in (4, 5, 6, 7)]
    plain = [
        [t for t, _ in plain_steps(model, tokenizer, prompt, max_tokens=30)] for prompt in prompts
    ]

    def tokens(prompt: list[int], drafter: Drafter | None, length: int | str) -> list[int]:
        responses = dspine_mlx.stream_generate(
            model, tokenizer, prompt, drafter, max_tokens=30, verify_length=length
        )
        return [r.token for r in responses]

    with ThreadPoolExecutor(4) as threads:
        found = threads.map(tokens, prompts, (one, one, other, None), (4, "auto", 4, "auto"))
    assert list(found) == plain

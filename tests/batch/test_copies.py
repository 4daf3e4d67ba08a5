"""Copies of earlier text in batches: the texts of each alone, with fewer forwards."""

from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.batch.copies import Copies
from dspine_mlx.batch.costs import Steps
from dspine_mlx.batch.text import BatchText
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.load import load_drafter
from dspine_mlx.round.lookup import COPIED, Copy, Lookup
from dspine_mlx.round.text import Text
from dspine_mlx.verify_length.schedule import prepare
from tests.support.texts import Counting, scripted_texts
from tests.support.tiny import plain_steps, same_steps

CYCLES = [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25, 26, 27], [31, 32, 33, 34]]
LIMIT = 40


def repeating(cycle: list[int], noise: float = 0.0) -> Any:
    """A processor under which a text goes on in a cycle."""

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        wanted = mx.arange(logits.shape[-1]) == cycle[tokens.size % len(cycle)]
        return mx.where(wanted, logits + 50.0 * (1 - noise), logits)

    return processor


def lookup_alone(model: nn.Module) -> Drafter:
    return load_drafter("lookup", model, kernels="off")


def useless(model: nn.Module) -> Drafter:
    """A drafter whose every token is wrong."""
    return scripted_texts(model, [], "wrong")


def run(model: nn.Module, tokenizer: TokenizerWrapper, drafter: Drafter, **options: Any) -> Any:
    """Steps and statistics of three texts that repeat themselves."""
    prompts = [cycle * 3 for cycle in CYCLES]
    steps: list[list[Any]] = [[] for _ in prompts]
    told: dict[int, Any] = {}
    for i, response in dspine_mlx.batch_stream_generate(
        model, tokenizer, prompts, drafter, max_tokens=LIMIT,
        logits_processors=[[repeating(cycle)] for cycle in CYCLES], **options,
    ):  # fmt: skip
        steps[i].append((response.token, response.logprobs))
        told[i] = response.statistics
    return steps, told


def alone(model: nn.Module, tokenizer: TokenizerWrapper) -> list[Any]:
    return [
        plain_steps(
            model, tokenizer, cycle * 3, max_tokens=LIMIT, logits_processors=[repeating(cycle)]
        )
        for cycle in CYCLES
    ]


def test_lookup_alone_drafts_for_several_texts(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    counting = Counting.like(model)
    drafter = lookup_alone(counting)
    prepare(drafter, profile=False)
    ours, told = run(counting, tokenizer, drafter)
    for mine, plain in zip(ours, alone(model, tokenizer), strict=True):
        assert same_steps(mine, plain)
    assert all(statistics.lookups > 0 for statistics in told.values())
    together = [shape for shape in counting.shapes if shape[0] == 3]
    assert len(together) < LIMIT / 2
    assert max(width for _, width in together) > 8


def test_a_copy_takes_the_place_of_a_worse_draft(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    plain = alone(model, tokenizer)
    texts = [c * 3 + [t for t, _ in text] for c, text in zip(CYCLES, plain, strict=True)]
    drafter = scripted_texts(model, texts, "wrong")
    prepare(drafter, profile=False)
    ours, told = run(model, tokenizer, drafter)
    assert all(same_steps(a, b) for a, b in zip(ours, plain, strict=True))
    assert all(statistics.lookups > 0 for statistics in told.values())
    assert all(statistics.accepted > LIMIT / 2 for statistics in told.values())


@pytest.mark.parametrize("options", [{"lookup": False}, {"verify_length": 3}])
def test_copies_can_be_turned_off(
    model: nn.Module, tokenizer: TokenizerWrapper, options: dict[str, Any]
) -> None:
    plain = alone(model, tokenizer)
    texts = [c * 3 + [t for t, _ in text] for c, text in zip(CYCLES, plain, strict=True)]
    drafter = scripted_texts(model, texts, "wrong")
    prepare(drafter, profile=False)
    ours, told = run(model, tokenizer, drafter, **options)
    assert all(same_steps(a, b) for a, b in zip(ours, plain, strict=True))
    assert all(statistics.lookups == 0 for statistics in told.values())


def test_seeded_texts_with_copies_are_those_of_each_alone(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    sampler = dspine_mlx.Sampler(temp=0.9)
    plain, prompts = [], [cycle * 3 for cycle in CYCLES]
    for seed, cycle in enumerate(CYCLES):
        mx.random.seed(seed)
        processors = [repeating(cycle, noise=0.82)]
        plain.append(
            plain_steps(
                model, tokenizer, cycle * 3, max_tokens=LIMIT, sampler=sampler,
                logits_processors=processors,
            )
        )  # fmt: skip
    drafter = lookup_alone(model)
    prepare(drafter, profile=False)
    ours: list[list[Any]] = [[] for _ in prompts]
    lookups = 0
    for i, response in dspine_mlx.batch_stream_generate(
        model, tokenizer, prompts, drafter, max_tokens=LIMIT, sampler=sampler, seeds=[0, 1, 2],
        logits_processors=[[repeating(cycle, noise=0.82)] for cycle in CYCLES],
    ):  # fmt: skip
        ours[i].append((response.token, response.logprobs))
        lookups = max(lookups, response.statistics.lookups)
    assert [[t for t, _ in text] for text in ours] == [[t for t, _ in text] for text in plain]
    assert all(same_steps(a, b) for a, b in zip(ours, plain, strict=True))
    assert lookups > 0


# ---- the choice, against all that could be offered


def a_text(model: nn.Module, tokens: list[int]) -> BatchText:
    drafter = lookup_alone(model)
    text = Text(drafter, make_prompt_cache(model))
    text.lookup = Lookup(frozenset(), tokens)
    return BatchText(text, 100.0, newest=tokens[-1])


chances = st.lists(st.floats(0.01, 0.99), max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(chances, chances), min_size=1, max_size=3), st.integers(0, 5))
def test_a_text_offers_what_brings_most_in_the_rows_it_has(
    pairs: list[tuple[list[float], list[float]]], n: int
) -> None:
    survivals: dict[Any, list[float]] = {}
    copies = Copies(COPIED)

    def survival(text: Any, running: int = 0) -> list[float]:
        return survivals[text]

    copies.survival = survival  # type: ignore[method-assign]
    for i, (draft, copy) in enumerate(pairs):
        own = np.cumprod(draft).tolist()
        survivals[i] = np.cumprod(copy).tolist()
        brought = copies.beside(i, own)  # type: ignore[arg-type]
        best = max(sum(own[:n]), sum(survivals[i][:n]))
        assert sum(brought[:n]) == pytest.approx(best)
        assert all(more >= -1e-12 for more in brought)


def test_copies_pay_only_where_no_text_falls_behind(model: nn.Module) -> None:
    """Eight texts, one of which has a copy that is surely right."""
    texts = [a_text(model, list(range(i, 40 + i))) for i in range(8)]
    copies = Copies(COPIED)
    copies.found = {texts[0]: Copy(32, list(range(15)))}
    copies.copying.of = lambda copy: [1.0] * len(copy.tokens)  # type: ignore[method-assign]
    free = Steps(1.0, np.ones(15), np.full(16, 1.01))
    dear = Steps(1.0, np.ones(15), np.linspace(1.0, 2.5, 16))
    assert copies.pay(texts, free, 1 / 8, [0.0] * 8)
    assert not copies.pay(texts, dear, 1 / 8, [0.0] * 8)  # 15 more tokens, but 7 texts lose
    assert copies.pay(texts, dear, 1 / 8, [2.0] * 8)
    for text in texts:
        copies.found[text] = Copy(32, list(range(15)))
    assert copies.pay(texts, dear, 1 / 8, [0.0] * 8)


def test_what_a_step_makes_already_is_no_gain(model: nn.Module) -> None:
    text, copies = a_text(model, [1, 2, 3, 4] * 4), Copies(COPIED)
    copies.look_up([text])
    assert copies.found[text].tokens[:4] == [1, 2, 3, 4]
    whole, ahead = copies.survival(text), copies.survival(text, running=1)
    assert whole[1:] == ahead
    assert all(a >= b for a, b in pairwise(whole))

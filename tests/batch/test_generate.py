"""Texts of a batch against each text alone, joining and leaving as they come."""

from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.verify_length.schedule import prepare
from tests.support.drafters import EVERY
from tests.support.texts import scripted_texts
from tests.support.tiny import SCRIPTS, Step, plain_steps, random_prompt, same_steps

PROMPTS = [random_prompt(n, seed=n) for n in (21, 1, 9, 34, 2, 15, 5)]
LIMITS = [18, 9, 1, 25, 12, 2, 7]


def plain_texts(
    model: nn.Module, tokenizer: TokenizerWrapper, prompts: list[list[int]], limits: list[int]
) -> list[list[Step]]:
    pairs = zip(prompts, limits, strict=True)
    return [plain_steps(model, tokenizer, prompt, max_tokens=n) for prompt, n in pairs]


def together(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    drafter: Drafter,
    prompts: list[list[int]] = PROMPTS,
    **options: Any,
) -> list[list[Step]]:
    """The texts as a batch streams them, at most three at once unless stated."""
    options = {"max_tokens": LIMITS, "completion_batch_size": 3} | options
    steps: list[list[Step]] = [[] for _ in prompts]
    for index, response in dspine_mlx.batch_stream_generate(
        model, tokenizer, prompts, drafter, **options
    ):
        steps[index].append((response.token, response.logprobs))
    return steps


def whole(prompts: list[list[int]], texts: list[list[Step]]) -> list[list[int]]:
    return [p + [token for token, _ in text] for p, text in zip(prompts, texts, strict=True)]


def same(ours: list[list[Step]], plain: list[list[Step]]) -> list[bool]:
    return [same_steps(a, b) for a, b in zip(ours, plain, strict=True)]


@pytest.mark.parametrize("length", [0, 1, 4, "auto"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_greedy_texts_are_those_of_each_alone(
    model: nn.Module, tokenizer: TokenizerWrapper, script: str, length: int | str
) -> None:
    plain = plain_texts(model, tokenizer, PROMPTS, LIMITS)
    drafter = scripted_texts(model, whole(PROMPTS, plain), script)
    prepare(drafter, profile=False)
    ours = together(model, tokenizer, drafter, verify_length=length)
    assert same(ours, plain) == [True] * len(PROMPTS)


@pytest.mark.parametrize("kind", EVERY)
def test_every_drafter(model: nn.Module, tokenizer: TokenizerWrapper, kind: str) -> None:
    plain = plain_texts(model, tokenizer, PROMPTS, LIMITS)
    ours = together(model, tokenizer, EVERY[kind](model), verify_length=3)
    assert same(ours, plain) == [True] * len(PROMPTS)

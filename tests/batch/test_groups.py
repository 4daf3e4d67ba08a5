"""Texts of very different lengths: a long one does not make the others' keys long."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.batch import batch as batches
from dspine_mlx.batch.batch import Batch
from dspine_mlx.batch.text import BatchText
from dspine_mlx.generate import make_caches
from dspine_mlx.round.text import Text
from tests.support.families import build, drafter_config
from tests.support.texts import scripted_texts
from tests.support.tiny import plain_steps, random_prompt

LENGTHS = [90, 6, 8, 5, 200, 7, 70]


def joined(model: nn.Module, drafter: Any, length: int) -> BatchText:
    text = Text(drafter, make_caches(model, drafter, None, None))
    for _ in text.prefill(mx.array(random_prompt(length, seed=length)), 2048):
        pass
    return BatchText(text, 1e9)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "SHORT", 10)


def test_padding_stays_in_bounds(model: nn.Module, short: None) -> None:
    drafter = scripted_texts(model, [])
    batch = Batch(drafter)
    for length in LENGTHS:
        batch.join(joined(model, drafter, length))
    lengths = [group.lengths for group in batch.groups]
    assert lengths == [[89, 199], [5, 7, 4, 6], [69]]
    assert [text.text.drafter is drafter for text in batch.texts] == [True] * len(LENGTHS)
    assert batch.depth == (2 * 199 + 4 * 7 + 69) // 7
    for text in list(batch.texts)[:2]:
        batch.leave(text)
    assert [group.lengths for group in batch.groups] == [[5, 7, 4, 6], [69]]


def test_slots_go_with_the_text_that_needed_them(model: nn.Module) -> None:
    drafter = scripted_texts(model, [])
    batch = Batch(drafter)
    texts = [joined(model, drafter, length) for length in (300, 5, 7)]
    for text in texts:
        batch.join(text)
    (group,) = batch.groups
    assert {cache.keys.shape[2] for cache in group.target.keyed if cache.keys is not None} == {512}
    batch.leave(texts[0])
    assert {cache.keys.shape[2] for cache in group.target.keyed if cache.keys is not None} == {256}


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3_text"])
def test_texts_of_several_groups_are_those_of_each_alone(
    family: str, length: int, tokenizer: TokenizerWrapper, short: None
) -> None:
    model = build(family)
    prompts, limits = [random_prompt(n, seed=n) for n in LENGTHS], [9, 14, 5, 8, 11, 3, 12]
    plain = [
        [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=limit)]
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    whole = [prompt + text for prompt, text in zip(prompts, plain, strict=True)]
    drafter = scripted_texts(model, whole, config=drafter_config(model, block_size=5))
    ours = dspine_mlx.batch_generate(
        model, tokenizer, prompts, drafter, max_tokens=limits, completion_batch_size=5,
        verify_length=length, return_token_ids=True, return_prompt_caches=True,
    )  # fmt: skip
    stops = tokenizer.eos_token_ids
    assert ours.token_ids == [[token for token in text if token not in stops] for text in plain]
    assert [own[-1].offset for own in ours.caches] == [len(text) for text in whole]

"""Texts that a round does not draft for: they go along with a row each, and stay the target's."""

import random
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.batch import generation
from dspine_mlx.batch.policy import FixedLength
from dspine_mlx.batch.text import BatchText
from dspine_mlx.round.draft_context import BACKLOG
from tests.support.families import build, drafter_config
from tests.support.texts import Counting, ScriptedTexts, scripted_texts
from tests.support.tiny import plain_steps, random_prompt, tiny_target

PROMPTS = [random_prompt(n, seed=n) for n in (9, 1, 5, 12, 3)]
LIMITS = [14, 20, 5, 9, 11]


@dataclass
class AtRandom(FixedLength):
    """It drafts for some of the texts, or for none, and decodes plainly now and then."""

    draw: random.Random = field(default_factory=lambda: random.Random(1))
    drafted_for: list[list[bool]] = field(default_factory=list)

    def plainly(self, texts: list[BatchText], depth: int) -> bool:
        return self.draw.random() < 0.3

    def stays_plain(self, texts: list[BatchText], depth: int) -> bool:
        return self.draw.random() < 0.5

    def keeps_context(self, texts: list[BatchText], depth: int) -> bool:
        return self.draw.random() < 0.5

    def drafted(self, texts: list[BatchText], depth: int) -> list[bool]:
        self.drafted_for.append([self.draw.random() < 0.6 for _ in texts])
        return self.drafted_for[-1]

    def lengths(self, texts: list[BatchText], drafts: list[Any], depth: int) -> list[int]:
        most = super().lengths(texts, drafts, depth)
        return [self.draw.randrange(n + 1) for n in most]


def plain_texts(
    model: nn.Module, tokenizer: TokenizerWrapper, limits: list[int], **rule: Any
) -> list[list[int]]:
    texts = []
    for seed, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True)):
        mx.random.seed(seed)
        steps = plain_steps(model, tokenizer, prompt, max_tokens=limit, **rule)
        texts.append([token for token, _ in steps])
    return texts


def check(
    model: nn.Module,
    drafter: ScriptedTexts,
    tokenizer: TokenizerWrapper,
    policy: FixedLength,
    plain: list[list[int]],
    **options: Any,
) -> None:
    """The batch's texts are those of each alone, and so are the caches that it returns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "batch_policy", lambda *_: policy)
        ours = dspine_mlx.batch_generate(
            model, tokenizer, PROMPTS, drafter, seeds=list(range(len(PROMPTS))),
            return_token_ids=True, return_prompt_caches=True, **options,
        )  # fmt: skip
    stops = tokenizer.eos_token_ids
    assert ours.token_ids == [[token for token in text if token not in stops] for text in plain]
    layers = len(drafter.layers)
    for prompt, text, caches in zip(PROMPTS, plain, ours.caches, strict=True):
        assert caches[0].offset == len(prompt) + len(text)
        assert all(c.offset <= len(prompt) + len(text) for c in caches[-layers:])


def whole(plain: list[list[int]]) -> list[list[int]]:
    return [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)]


@pytest.fixture(scope="module")
def plain(tokenizer: TokenizerWrapper) -> dict[str, tuple[nn.Module, list[list[int]]]]:
    """Targets with the texts that they make alone, by rule."""
    model = tiny_target()
    sampled = plain_texts(model, tokenizer, LIMITS, sampler=make_sampler(temp=0.9))
    return {"greedy": (model, plain_texts(model, tokenizer, LIMITS)), "seeded": (model, sampled)}


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**20), most=st.integers(1, 5), rule=st.sampled_from(("greedy", "seeded"))
)
def test_texts_are_those_of_each_alone_whoever_is_drafted_for(
    plain: dict[str, tuple[nn.Module, list[list[int]]]],
    tokenizer: TokenizerWrapper,
    seed: int,
    most: int,
    rule: str,
) -> None:
    model, texts = plain[rule]
    drafter = scripted_texts(model, whole(texts))
    policy = AtRandom(4, draw=random.Random(seed))
    options: dict[str, Any] = {"sampler": make_sampler(temp=0.9)} if rule == "seeded" else {}
    check(
        model, drafter, tokenizer, policy, texts, max_tokens=LIMITS, completion_batch_size=most,
        **options,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "gemma3_text"])
def test_other_families(family: str, tokenizer: TokenizerWrapper) -> None:
    model = build(family)
    texts = plain_texts(model, tokenizer, LIMITS)
    drafter = scripted_texts(model, whole(texts), config=drafter_config(model, block_size=5))
    policy = AtRandom(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "batch_policy", lambda *_: policy)
        ours = dspine_mlx.batch_generate(
            model, tokenizer, PROMPTS, drafter, max_tokens=LIMITS, completion_batch_size=3,
            return_token_ids=True,
        )  # fmt: skip
    stops = tokenizer.eos_token_ids
    assert ours.token_ids == [[token for token in text if token not in stops] for text in texts]
    assert any(any(round_) and not all(round_) for round_ in policy.drafted_for)


@dataclass
class OnlyFirst(FixedLength):
    """It drafts for the first text."""

    rounds: int = 0

    def drafted(self, texts: list[BatchText], depth: int) -> list[bool]:
        self.rounds += 1
        return [i == 0 for i in range(len(texts))]


def test_a_round_drafts_once_for_those_it_drafts_for(tokenizer: TokenizerWrapper) -> None:
    """One forward of the drafter over their blocks, and one of the target over all texts."""
    model = tiny_target()
    limits = [13] * 5
    texts = plain_texts(model, tokenizer, limits)
    counting = Counting.like(model)
    drafter, policy = scripted_texts(counting, whole(texts), "right"), OnlyFirst(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "batch_policy", lambda *_: policy)
        ours = dspine_mlx.batch_generate(
            counting, tokenizer, PROMPTS, drafter, max_tokens=limits, return_token_ids=True
        )
    stops = tokenizer.eos_token_ids
    assert ours.token_ids == [[token for token in text if token not in stops] for text in texts]
    rounds = counting.shapes[sum(len(prompt) > 1 for prompt in PROMPTS) :]
    assert rounds[:3] == [(5, 4)] * 3  # the first text: 4 tokens per round, of 13
    assert len(rounds) == ours.stats.generation_steps
    assert drafter.calls == policy.rounds


def test_a_text_left_out_for_long_keeps_its_newest_rows(tokenizer: TokenizerWrapper) -> None:
    """The drafter's cache of a text that is not drafted for grows by the newest rows at the end."""
    model = tiny_target()
    limits = [BACKLOG + 30] * 2
    drafter = scripted_texts(model, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "batch_policy", lambda *_: Nobody(4))
        ours = dspine_mlx.batch_generate(
            model, tokenizer, PROMPTS[:2], drafter, max_tokens=limits, return_prompt_caches=True,
            return_token_ids=True,
        )  # fmt: skip
    for prompt, caches, tokens in zip(PROMPTS, ours.caches, ours.token_ids, strict=False):
        made = caches[0].offset - len(prompt)
        assert made >= len(tokens)
        # The prompt but for its last token, the newest rows, and the row of the last token.
        assert caches[-1].offset == len(prompt) - 1 + min(BACKLOG, made) + 1


class Nobody(FixedLength):
    def drafted(self, texts: list[BatchText], depth: int) -> list[bool]:
        return [False] * len(texts)


@dataclass
class Unread(AtRandom):
    """It says of some plain steps that no draft will need their features."""

    def reads(self, texts: list[BatchText], depth: int) -> bool:
        return self.draw.random() < 0.5


class AnyText(ScriptedTexts):
    """It drafts after any anchor, wherever its context says that it is."""

    def scripted(self, anchor: int, position: int) -> Any:
        at = next(t.index(anchor) for t in self.texts if anchor in t)
        return super().scripted(anchor, at)


def test_features_that_nobody_read_are_missing_context_only(tokenizer: TokenizerWrapper) -> None:
    model = tiny_target()
    texts = plain_texts(model, tokenizer, LIMITS)
    known = scripted_texts(model, whole(texts))
    drafter = AnyText(known.network, known.target, known.verifier, texts=known.texts)
    check(model, drafter, tokenizer, Unread(4), texts, max_tokens=LIMITS, completion_batch_size=3)

"""Texts stay the target's whatever a policy does: steps that run ahead are taken back."""

import random
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.batch import generation
from dspine_mlx.batch.policy import FixedLength
from dspine_mlx.batch.text import BatchText
from dspine_mlx.round.select import Draft
from tests.support.families import build, drafter_config
from tests.support.texts import scripted_texts
from tests.support.tiny import plain_steps, random_prompt

PROMPTS = [random_prompt(n, seed=n) for n in (9, 1, 5, 12, 3)]
LIMITS = [14, 20, 5, 9, 11]


@dataclass
class Restless(FixedLength):
    """Three plain steps, then two rounds, and so on; it never says that it is about to draft."""

    steps: int = 0

    def plainly(self, texts: list[BatchText], depth: int) -> bool:
        self.steps += 1
        return self.steps % 5 < 3

    def stays_plain(self, texts: list[BatchText], depth: int) -> bool:
        return True


RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"sampler": make_sampler(temp=0.9)},
    "penalised": {"logits_processors": make_logits_processors(repetition_penalty=1.4)},
}


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "lfm2", "gemma3_text"])
def test_texts_are_those_of_each_alone(
    family: str,
    rule: str,
    caches: bool,
    tokenizer: TokenizerWrapper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, plain = build(family), []
    for seed, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
        mx.random.seed(seed)
        steps = plain_steps(model, tokenizer, prompt, max_tokens=limit, **RULES[rule])
        plain.append([token for token, _ in steps])
    whole = [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)]
    drafter = scripted_texts(model, whole, config=drafter_config(model, block_size=5))
    policy = Restless(4)
    monkeypatch.setattr(generation, "batch_policy", lambda *_: policy)
    ours = dspine_mlx.batch_generate(
        model, tokenizer, PROMPTS, drafter, max_tokens=LIMITS, completion_batch_size=3,
        seeds=list(range(len(PROMPTS))), return_token_ids=True, return_prompt_caches=caches,
        **RULES[rule],
    )  # fmt: skip
    stops = tokenizer.eos_token_ids
    assert ours.token_ids == [[token for token in text if token not in stops] for text in plain]
    assert drafter.calls
    if caches:
        counted = [[c.offset for c in own if type(c) is not ArraysCache] for own in ours.caches]
        assert [set(offsets) for offsets in counted] == [{len(text)} for text in whole]


@dataclass
class Watching(Restless):
    """It watches a draft of some text after every plain step, and drafts for some texts only."""

    drafts: list[tuple[BatchText, Draft]] = field(default_factory=list)
    draw: random.Random = field(default_factory=lambda: random.Random(3))

    def stays_plain(self, texts: list[BatchText], depth: int) -> bool:
        return self.draw.random() < 0.7

    def drafted(self, texts: list[BatchText], depth: int) -> list[bool]:
        return [self.draw.random() < 0.6 for _ in texts]

    def watch(self, texts: list[BatchText], depth: int) -> int | None:
        return self.draw.randrange(len(texts))

    def watched(self, text: BatchText, draft: Draft, texts: int, depth: int) -> None:
        self.drafts.append((text, draft))


@pytest.mark.parametrize("rule", ["greedy", "seeded"])
def test_a_watched_draft_is_of_the_text_as_it_is_and_changes_nothing(
    rule: str, tokenizer: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = build("qwen3"), []
    for seed, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
        mx.random.seed(seed)
        steps = plain_steps(model, tokenizer, prompt, max_tokens=limit, **RULES[rule])
        plain.append([token for token, _ in steps])
    whole = [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)]
    config = drafter_config(model, block_size=5)
    drafter, policy = scripted_texts(model, whole, "right", config=config), Watching(4)
    monkeypatch.setattr(generation, "batch_policy", lambda *_: policy)
    ours = dspine_mlx.batch_generate(
        model, tokenizer, PROMPTS, drafter, max_tokens=LIMITS, completion_batch_size=3,
        seeds=list(range(len(PROMPTS))), return_token_ids=True, **RULES[rule],
    )  # fmt: skip
    stops = tokenizer.eos_token_ids
    assert ours.token_ids == [[token for token in text if token not in stops] for text in plain]
    # The drafter fails if an anchor is not where its context says. Its drafts are right.
    assert len(policy.drafts) > 4
    for _, draft in policy.drafts:
        tokens = [token for token in draft.tokens.tolist() if token]
        assert any(str(tokens)[1:-1] in str(text) for text in plain)

"""Texts of a batch on targets of every family, and one by one where a family has no batch."""

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.batch.generation import Generation
from tests.batch.test_target_rows import EXACT, REFUSED, ROUNDED, WINDOWED
from tests.support.each_family import KINDS, slow
from tests.support.families import build, drafter_config, random_drafter
from tests.support.texts import scripted_texts
from tests.support.tiny import plain_steps, random_prompt

PROMPTS = [random_prompt(n, seed=n) for n in (9, 1, 5, 12)]
LIMITS = [12, 20, 5, 9]  # past the tiny windows of 24 positions in all


@pytest.mark.parametrize(
    "family", [f if f in KINDS else slow(f) for f in (*EXACT, *WINDOWED, *ROUNDED)]
)
def test_texts_are_those_of_each_alone(family: str, tokenizer: TokenizerWrapper) -> None:
    """Three at once, by a drafter that is right now and then."""
    model = build(family)
    plain = []
    for prompt, limit in zip(PROMPTS, LIMITS, strict=True):
        steps = plain_steps(model, tokenizer, prompt, max_tokens=limit)
        plain.append([token for token, _ in steps])
    whole = [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)]
    drafter = scripted_texts(model, whole, config=drafter_config(model, block_size=5))
    ours = dspine_mlx.batch_generate(
        model, tokenizer, PROMPTS, drafter, max_tokens=LIMITS, verify_length=4,
        completion_batch_size=3, return_token_ids=True,
    )  # fmt: skip
    stops = tokenizer.eos_token_ids
    assert ours.token_ids == [[token for token in text if token not in stops] for text in plain]
    assert drafter.calls


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_decode_one_text_after_another(
    family: str, tokenizer: TokenizerWrapper
) -> None:
    model = build(family)
    drafter, prompts = random_drafter(model), PROMPTS[:2]
    plain = [plain_steps(model, tokenizer, prompt, max_tokens=6) for prompt in prompts]
    why = Generation.of(model, tokenizer, prompts, drafter).refusal()
    assert why is not None
    assert why.startswith(family)
    ours = dspine_mlx.batch_generate(
        model, tokenizer, prompts, drafter, max_tokens=6, verify_length=2,
        return_token_ids=True, return_prompt_caches=True,
    )  # fmt: skip
    assert ours.token_ids == [[token for token, _ in steps] for steps in plain]
    assert [len(own) for own in ours.caches] == [len(model.make_cache()) + 2] * 2


def test_seeds_and_limited_caches_one_after_another(tokenizer: TokenizerWrapper) -> None:
    model = build("qwen3")
    drafter, sampler = random_drafter(model), dspine_mlx.Sampler(temp=0.9)
    plain = []
    for seed, prompt in enumerate(PROMPTS):
        mx.random.seed(seed)
        steps = plain_steps(model, tokenizer, prompt, max_tokens=8, sampler=sampler, max_kv_size=16)
        plain.append([token for token, _ in steps])
    mx.random.seed(70)
    before = mx.array(mx.random.state[0])
    ours = dspine_mlx.batch_generate(
        model, tokenizer, PROMPTS, drafter, max_tokens=8, sampler=sampler, max_kv_size=16,
        seeds=[0, 1, 2, 3], verify_length=3, return_token_ids=True,
    )  # fmt: skip
    assert ours.token_ids == plain
    assert mx.array_equal(before, mx.random.state[0])

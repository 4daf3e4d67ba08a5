"""Texts of a batch against each text alone, joining and leaving as they come."""

import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.verify_length.schedule import prepare
from tests.support.drafters import EVERY
from tests.support.each_family import slow
from tests.support.texts import Counting, scripted_texts
from tests.support.tiny import (
    SCRIPTS,
    Step,
    drafter_config,
    plain_steps,
    random_prompt,
    same_steps,
)

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


@pytest.fixture(scope="module")
def plain(model: nn.Module, tokenizer: TokenizerWrapper) -> list[list[Step]]:
    return plain_texts(model, tokenizer, PROMPTS, LIMITS)


@pytest.mark.parametrize("length", [slow(0), slow(1), 4, "auto"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_greedy_texts_are_those_of_each_alone(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    plain: list[list[Step]],
    script: str,
    length: int | str,
) -> None:
    drafter = scripted_texts(model, whole(PROMPTS, plain), script)
    prepare(drafter, profile=False)
    ours = together(model, tokenizer, drafter, verify_length=length)
    assert same(ours, plain) == [True] * len(PROMPTS)


@pytest.mark.parametrize("kind", EVERY)
def test_every_drafter(
    model: nn.Module, tokenizer: TokenizerWrapper, plain: list[list[Step]], kind: str
) -> None:
    ours = together(model, tokenizer, EVERY[kind](model), verify_length=3)
    assert same(ours, plain) == [True] * len(PROMPTS)


def test_one_forward_of_each_per_round(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    """Four texts that all start at once and accept everything: prompts, then rounds of all."""
    prompts = PROMPTS[:1] + PROMPTS[3:4] + PROMPTS[5:]
    plain = plain_texts(model, tokenizer, prompts, [13] * 4)
    counting = Counting.like(model)
    drafter = scripted_texts(counting, whole(prompts, plain), "right")
    ours = together(
        counting, tokenizer, drafter, prompts, max_tokens=13, verify_length=3,
        completion_batch_size=4,
    )  # fmt: skip
    assert same(ours, plain) == [True] * 4
    rounds = [shape for shape in counting.shapes if shape[0] == 4]
    # 3 drafted and 1 more per round; nothing is drafted for the last token.
    assert rounds == [(4, 4), (4, 4), (4, 4), (4, 1)]
    assert len(counting.shapes) == len(rounds) + len(prompts)
    assert drafter.calls == 3


@pytest.mark.parametrize("length", [2, "auto"])
def test_a_bidirectional_block_is_drafted_in_full(
    model: nn.Module, tokenizer: TokenizerWrapper, plain: list[list[Step]], length: int | str
) -> None:
    """Its slots see one another: those of a shorter block would be others, whose chances nobody
    knows. Fewer of them may be verified."""
    config = DrafterConfig.from_dict(drafter_config(num_hidden_layers=1, is_causal=False))
    drafter = scripted_texts(model, whole(PROMPTS, plain), config=config)
    prepare(drafter, profile=False)
    ours = together(model, tokenizer, drafter, verify_length=length)
    assert same(ours, plain) == [True] * len(PROMPTS)
    assert set(drafter.slots) == {config.num_proposals}


SAMPLING: dict[str, dict[str, Any]] = {
    "mlx-lm's sampler": {"sampler": make_sampler(temp=0.8, top_p=0.9)},
    "our sampler": {"sampler": dspine_mlx.Sampler(temp=0.8, top_p=0.9)},
    "with XTC": {"sampler": dspine_mlx.Sampler(temp=1.0, xtc_probability=0.5, xtc_threshold=0.05)},
    "penalties": {
        "sampler": dspine_mlx.Sampler(temp=0.7),
        "logits_processors": make_logits_processors(repetition_penalty=1.3, logit_bias={9: 2.0}),
    },
}


@pytest.mark.parametrize("length", [slow(0), 3, slow("auto")])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_seeded_texts_are_those_of_each_alone(
    model: nn.Module, tokenizer: TokenizerWrapper, sampling: str, length: int | str
) -> None:
    """Each has a random state of its own, which the others don't touch."""
    plain = []
    for seed, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
        mx.random.seed(seed)
        plain.append(plain_steps(model, tokenizer, prompt, max_tokens=limit, **SAMPLING[sampling]))
    drafter = scripted_texts(model, whole(PROMPTS, plain))
    drafter.whole_context = length != "auto"  # which leaves out what no draft will need
    prepare(drafter, profile=False)
    mx.random.seed(77)
    before = mx.array(mx.random.state[0])
    seeds = list(range(len(PROMPTS)))
    ours = together(
        model, tokenizer, drafter, seeds=seeds, verify_length=length, **SAMPLING[sampling]
    )
    assert same(ours, plain) == [True] * len(PROMPTS)
    assert mx.array_equal(before, mx.random.state[0])


def test_texts_with_rules_of_their_own(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    """Greedy, penalised and seeded texts beside one that is sampled freely."""
    penalties = make_logits_processors(repetition_penalty=1.5)
    samplers = [None, None, make_sampler(temp=0.9), dspine_mlx.Sampler(temp=1.0)]
    seeds, processors = [None, None, 5, None], [[], penalties, [], []]
    prompts, plain = PROMPTS[:1] + PROMPTS[2:5], []
    for prompt, sampler, seed, own in zip(prompts, samplers, seeds, processors, strict=True):
        if seed is not None:
            mx.random.seed(seed)
        plain.append(
            plain_steps(
                model, tokenizer, prompt, max_tokens=15, sampler=sampler, logits_processors=own
            )
        )
    drafter = EVERY["dspine"](model)
    ours = together(
        model, tokenizer, drafter, prompts, max_tokens=15, sampler=samplers, seeds=seeds,
        logits_processors=processors, verify_length=4,
    )  # fmt: skip
    assert same(ours, plain)[:3] == [True] * 3
    assert len(ours[3]) == 15


def test_random_joins_and_leaves(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    draw = random.Random(11)
    prompts = [random_prompt(draw.randint(1, 30), seed=50 + i) for i in range(14)]
    limits = [draw.randint(1, 20) for _ in prompts]
    plain = plain_texts(model, tokenizer, prompts, limits)
    drafter = scripted_texts(model, whole(prompts, plain))
    prepare(drafter, profile=False)
    for most in (2, 5):
        ours = together(
            model, tokenizer, drafter, prompts, max_tokens=limits, completion_batch_size=most
        )
        assert same(ours, plain) == [True] * len(prompts)


def test_a_text_ends_at_its_stop_token(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    """One whose end was drafted, among others: nothing comes after it, and its caches end there."""
    plain = plain_texts(model, tokenizer, PROMPTS, LIMITS)
    stop = plain[0][4][0]
    stopping = TokenizerWrapper(tokenizer._tokenizer, eos_token_ids=[stop])
    wanted = plain_texts(model, stopping, PROMPTS, LIMITS)
    assert wanted[0][-1][0] == stop
    assert len(wanted[0]) <= 5
    drafter = scripted_texts(model, whole(PROMPTS, plain), "right")
    ours = together(model, stopping, drafter, verify_length=7)
    assert same(ours, wanted) == [True] * len(PROMPTS)


@pytest.mark.parametrize("length", [0, 5])
def test_prompt_caches_go_in_and_come_out(
    model: nn.Module, tokenizer: TokenizerWrapper, length: int
) -> None:
    """The caches of a first turn, and a second one from them, in another order."""
    prompts, limits = PROMPTS[:4], LIMITS[:4]
    plain = plain_texts(model, tokenizer, prompts, limits)
    texts, more = whole(prompts, plain), [random_prompt(n, seed=70 + n) for n in (3, 8, 1, 5)]
    turns = [text + extra for text, extra in zip(texts, more, strict=True)]
    second = plain_texts(model, tokenizer, turns, [9] * 4)
    drafter = scripted_texts(model, whole(turns, second))
    options: dict[str, Any] = {"verify_length": length, "completion_batch_size": 2}
    first = dspine_mlx.batch_generate(
        model, tokenizer, prompts, drafter, max_tokens=limits, return_prompt_caches=True,
        return_token_ids=True, **options,
    )  # fmt: skip
    assert first.token_ids == [[token for token, _ in steps] for steps in plain]
    assert [[c.offset for c in own] for own in first.caches] == [
        [len(text)] * len(own) for text, own in zip(texts, first.caches, strict=True)
    ]
    order = [2, 0, 3, 1]
    again = dspine_mlx.batch_generate(
        model, tokenizer, [more[i] for i in order], drafter, max_tokens=9,
        prompt_caches=[first.caches[i] for i in order], return_token_ids=True, **options,
    )  # fmt: skip
    assert again.token_ids == [[token for token, _ in second[i]] for i in order]
    assert [own[0].offset for own in first.caches] == [len(text) for text in texts]


def test_a_filter_cuts_its_own_texts_drafts(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    """It sees the tokens before the draft, and what it lets through is offered."""
    prompts, limits = PROMPTS[:3], [10, 9, 8]
    plain = plain_texts(model, tokenizer, prompts, limits)
    texts = whole(prompts, plain)
    seen: list[list[int]] = []

    def one(tokens: mx.array, draft: list[int]) -> int:
        seen.append(tokens.tolist())
        return min(1, len(draft))

    drafter = scripted_texts(model, texts, "right")
    histogram = {}
    for index, response in dspine_mlx.batch_stream_generate(
        model, tokenizer, prompts, drafter, max_tokens=limits, verify_length=4,
        draft_filter=[None, one, None],
    ):  # fmt: skip
        histogram[index] = response.statistics.verify_lengths
    assert set(histogram[1]) <= {0, 1}
    assert max(histogram[0]) == max(histogram[2]) == 4
    assert seen
    assert all(tokens == texts[1][: len(tokens)] for tokens in seen)


def test_a_text_whose_processor_fails_ends_the_batch_with_its_error(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    def broken(tokens: mx.array, logits: mx.array) -> mx.array:
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        together(
            model, tokenizer, EVERY["dflash"](model), PROMPTS[:2], max_tokens=5,
            logits_processors=[[], [broken]], verify_length=2,
        )  # fmt: skip


def test_what_batch_generate_returns(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    """Texts, ids, logprobs and counts as mlx-lm's own, which answers without a drafter."""
    drafter = scripted_texts(model, whole(PROMPTS, plain_texts(model, tokenizer, PROMPTS, LIMITS)))
    options: dict[str, Any] = {
        "max_tokens": LIMITS, "return_token_ids": True, "return_logprobs": True
    }  # fmt: skip
    theirs = dspine_mlx.batch_generate(model, tokenizer, PROMPTS, **options)
    ours = dspine_mlx.batch_generate(model, tokenizer, PROMPTS, drafter, verify_length=3, **options)
    assert (ours.texts, ours.token_ids) == (theirs.texts, theirs.token_ids)
    for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    assert ours.caches is None
    assert ours.stats.generation_tokens == sum(map(len, ours.token_ids))
    assert ours.stats.prompt_tokens == sum(map(len, PROMPTS))
    assert 0 < ours.stats.generation_steps < theirs.stats.generation_steps


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_tokens": [3]}, "max_tokens has 1 entries for 2 prompts"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seeds": [1, 2, 3]}, "seeds has 3 entries for 2 prompts"),
        ({"seeds": [1, -2]}, "seed"),
        ({"verify_length": -1}, "verify_length is -1"),
        ({"completion_batch_size": 0}, "completion_batch_size is 0"),
        ({"sampler": dspine_mlx.Sampler(temp=1.0, top_k=4000)}, "top_k is 4000"),
        ({"sampler": 5}, "sampler is 5; it must be a function"),
        ({"sampler": [None, "greedy"]}, "sampler is 'greedy'"),
        ({"draft_filter": 5}, "draft_filter is 5"),
        ({"logits_processors": 5}, "logits_processors is 5; it must be a list"),
        ({"logits_processors": [[], ["x"]]}, r"logits_processors\[0\] is 'x'"),
        ({"stream": 5}, "stream is 5"),
        ({"seeds": [1, True]}, "seed is True"),
        ({"prompt_caches": 5}, "prompt_cache is a int"),
    ],
)
def test_wrong_arguments_are_refused(
    model: nn.Module, tokenizer: TokenizerWrapper, wrong: dict[str, Any], said: str
) -> None:
    drafter = EVERY["dflash"](model)
    with pytest.raises(dspine_mlx.InputError, match=said):
        dspine_mlx.batch_generate(model, tokenizer, PROMPTS[:2], drafter, **wrong)


@pytest.mark.parametrize("with_drafter", [True, False])
@pytest.mark.parametrize("place", ["model", "tokenizer", "prompts"])
@pytest.mark.parametrize("wrong", [None, 5, "hello", {}, object()], ids=lambda x: type(x).__name__)
def test_what_a_batch_is_made_of(
    model: nn.Module, tokenizer: TokenizerWrapper, with_drafter: bool, place: str, wrong: Any
) -> None:
    """A string is no list of prompts, but a prompt."""
    given = {"model": model, "tokenizer": tokenizer, "prompts": PROMPTS} | {place: wrong}
    drafter = EVERY["dflash"](model) if with_drafter else None
    with pytest.raises(dspine_mlx.InputError, match=f"{place} is a"):
        dspine_mlx.batch_generate(**given, drafter=drafter)

"""Lookup without a drafter, and while drafting is parked: plain tokens with rounds in between."""

from functools import cache
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.load import load_drafter
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.verify_length.auto import Auto
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.costs import Costs, Curve
from tests.support.each_family import EVERY_FAMILY
from tests.support.families import WINDOW, build
from tests.support.lookups import Told, use
from tests.support.samplers import SAMPLERS, seeded_options
from tests.support.tiny import plain_steps, random_prompt, same_steps, scripted, tiny_target

model_of = cache(build)
Responses = list[dspine_mlx.GenerationResponse]


def alone(model: nn.Module) -> Drafter:
    return load_drafter("lookup", model, kernels="off")


def run(
    model: nn.Module, tokenizer: TokenizerWrapper, prompt: list[int], **options: Any
) -> Responses:
    """Copies wherever the lookup has one; the rest is decoded plainly."""
    options = {"verify_length": 6} | options
    drafter = alone(model)
    responses = list(dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, **options))
    done = responses[-1].statistics
    assert done.lookups == done.rounds > 0
    assert done.plain > 2  # in between
    return responses


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_greedy_text_is_mlx_lms(
    tokenizer: TokenizerWrapper, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = model_of(family), random_prompt(WINDOW - 7)
    plain = [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=40)]
    use(Told(prompt + plain, 5, none=11), monkeypatch)
    ours = run(model, tokenizer, prompt, max_tokens=40)
    assert [r.token for r in ours] == plain
    assert ours[-1].accepted > 5


@pytest.mark.parametrize(
    ("sampler", "processors", "known"),
    [
        (sampler, ("none", "all")[(i + known) % 2], known)
        for i, sampler in enumerate([None, *SAMPLERS])
        for known in (False, True)
    ],
)
def test_seeded_text_is_mlx_lms(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    sampler: str | None,
    processors: str,
    known: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = random_prompt(17)

    plainly = make_sampler(**SAMPLERS[sampler]) if sampler else None
    plain = plain_steps(model, tokenizer, prompt, sampler=plainly, **seeded_options(processors, 40))
    ours = Sampler(**SAMPLERS[sampler], seeded=True) if sampler and known else plainly
    use(Told(prompt + [token for token, _ in plain], 5, none=11), monkeypatch)
    steps = run(model, tokenizer, prompt, sampler=ours, **seeded_options(processors, 40))
    assert same_steps([(r.token, r.logprobs) for r in steps], plain)


@pytest.mark.parametrize("caches", [{"kv_bits": 8, "kv_group_size": 32}, {"max_kv_size": 16}])
def test_quantised_and_limited_caches(
    tokenizer: TokenizerWrapper, caches: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny_target(head_dim=32), random_prompt(12)
    options: dict[str, Any] = {"max_tokens": 40, "quantized_kv_start": 20} | caches
    plain = plain_steps(model, tokenizer, prompt, **options)
    use(Told(prompt + [token for token, _ in plain], 5, none=11), monkeypatch)
    ours = run(model, tokenizer, prompt, **options)
    assert [r.token for r in ours] == [token for token, _ in plain]


@pytest.mark.parametrize("taken", [1, 4, 9, 17])
def test_the_caches_hold_the_text_after_an_early_close(
    model: nn.Module, tokenizer: TokenizerWrapper, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are mlx-lm's own: it goes on from them."""
    prompt, caches = random_prompt(19), make_prompt_cache(model)
    plain = [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=24)]
    use(Told(prompt + plain, 3, none=9), monkeypatch)
    options: dict[str, Any] = {"prompt_cache": caches, "verify_length": 6}
    generator = dspine_mlx.stream_generate(model, tokenizer, prompt, alone(model), **options)
    assert [next(generator).token for _ in range(taken)] == plain[:taken]
    generator.close()
    assert {c.offset for c in caches} == {len(prompt) + taken}
    for c in caches:
        c.trim(1)
    rest = plain_steps(
        model, tokenizer, plain[taken - 1 : taken], prompt_cache=caches, max_tokens=5
    )
    assert [token for token, _ in rest] == plain[taken : taken + 5]


def priced(slots: int, lines: list[str], draft: float = 1.0, row: float = 1 / 3) -> Auto:
    """The policy where each further row costs this share of a plain token."""
    rows = tuple(1 + n * row for n in range(16))
    costs = Costs(Curve((64, 2048), (1.0, 1.0), (draft, draft), (rows, rows)))
    costs.observe = lambda *_: None  # type: ignore[method-assign]
    costs.seen |= {"plain": 1, "verify": 1, "draft": 1}
    return Auto(costs, uncalibrated(slots), lines.append)


def forced(text: list[int]) -> Any:
    """A processor that makes the model write this text."""

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, text[tokens.size]].add(100.0)

    return processor


def written(
    model: nn.Module, tokenizer: TokenizerWrapper, text: list[int], drafter: Drafter, policy: Auto
) -> dspine_mlx.GenerationResponse:
    """The last response of a run that writes the text after its first 8 tokens."""
    prompt, count = text[:8], len(text) - 8
    options: dict[str, Any] = {"max_tokens": count, "logits_processors": [forced(text)]}
    responses = list(
        dspine_mlx.stream_generate(
            model, tokenizer, prompt, drafter, verify_length=policy, **options
        )
    )
    assert [r.token for r in responses] == text[8:]
    return responses[-1]


CIRCLE = [100 + i % 12 for i in range(140)]


def test_a_text_that_repeats_itself_is_copied(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    lines: list[str] = []
    done = written(model, tokenizer, CIRCLE, alone(model), priced(0, lines)).statistics
    assert sum("looked up" in line for line in lines) == done.lookups == done.rounds
    assert done.rounds <= 12
    assert done.plain <= 12 + 3 + 2  # the first circle, and tokens that are made meanwhile
    assert done.accepted + done.rounds + done.plain == 132
    assert "rounds of copies saved the time of" in done.verdict


def test_lookups_cease_where_nothing_repeats(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    """Among six tokens drawn at random most n-grams come again, and nothing follows from it."""
    text = (100 + mx.random.randint(0, 6, (700,), key=mx.random.key(4))).tolist()
    lines: list[str] = []
    done = written(model, tokenizer, text, alone(model), priced(0, lines)).statistics
    places = [int(line.split()[1].rstrip(":")) for line in lines if "looked up" in line]
    assert len(places) == done.rounds <= 12
    assert sum(place > 200 for place in places) <= 2


def test_a_parked_drafter_leaves_copies_to_the_text(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """Its drafts are wrong and expensive, so it is parked early; the text repeats itself later."""
    text = random_prompt(80, seed=9) + CIRCLE
    lines: list[str] = []
    drafter = scripted(model, text, "wrong")
    done = written(model, tokenizer, text, drafter, priced(7, lines)).statistics
    parked = next(i for i, line in enumerate(lines) if line.startswith("parked"))
    copies = [i for i, line in enumerate(lines) if "looked up" in line]
    assert len(copies) == done.lookups > 5
    assert sum(i > parked for i in copies) >= done.lookups - 2
    assert done.accepted >= 90


def test_a_draft_is_left_out_where_copies_gain_more(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """The drafter is half right and the text repeats itself throughout: few drafts are made."""
    text = [100 + i % 12 for i in range(400)]
    drafter = scripted(model, text, "now and then")
    done = written(model, tokenizer, text, drafter, priced(7, [], draft=0.5)).statistics
    assert done.lookups >= done.rounds - 6
    assert drafter.rounds <= done.rounds / 2


def test_a_sampled_block_goes_on_with_a_copy(
    model: nn.Module, tokenizer: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of 7 tokens that are nearly always right, followed by copies."""
    policy = priced(7, [], draft=0.1, row=0.01)
    monkeypatch.setattr(policy.copying, "pays", lambda *_: None)  # no copy in a draft's place
    monkeypatch.setattr(policy.copying, "instead_of_path", lambda *_: None)
    text, prompt = CIRCLE, CIRCLE[:30]
    drafter = scripted(model, text, "right")
    responses = list(
        dspine_mlx.stream_generate(
            model,
            tokenizer,
            prompt,
            drafter,
            max_tokens=110,
            sampler=Sampler(temp=0.1),
            logits_processors=[forced(text)],
            verify_length=policy,
        )
    )
    assert [r.token for r in responses] == text[30:]
    done = responses[-1].statistics
    assert done.verify_lengths[15] >= 4
    assert done.lookups >= done.rounds - 2
    assert done.rounds <= 9


def test_without_copies_it_is_plain_decoding(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    prompt = random_prompt(17)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=24)
    switches: list[dict[str, Any]] = [{"lookup": False}, {"verify_length": 0}]
    for off in switches:
        drafter = alone(model)
        ours = list(
            dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, max_tokens=24, **off)
        )
        assert same_steps([(r.token, r.logprobs) for r in ours], plain)
        assert ours[-1].rounds == 0


def test_copies_come_from_cached_tokens(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    """A turn that only the prompt cache holds, and that the next one repeats."""
    turn = random_prompt(60, seed=7)
    accepted = {}
    for known in (True, False):
        caches = make_prompt_cache(model)
        mx.eval(model(mx.array([turn]), cache=caches))
        responses = list(
            dspine_mlx.stream_generate(
                model,
                tokenizer,
                turn[:4],
                alone(model),
                max_tokens=50,
                logits_processors=[forced(turn)],
                prompt_cache=caches,
                cached_tokens=turn if known else None,
                verify_length=priced(0, []),
            )
        )
        assert [r.token for r in responses] == turn[4:54]
        accepted[known] = responses[-1].accepted
    assert accepted[False] == 0
    assert accepted[True] >= 40


def test_several_prompts(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    """One after another, each copied from its own text."""
    prompts = [random_prompt(9, seed=1), random_prompt(14, seed=2)]
    texts = [[tok for tok, _ in plain_steps(model, tokenizer, p, max_tokens=20)] for p in prompts]
    tokens: list[list[int]] = [[], []]
    for index, response in dspine_mlx.batch_stream_generate(
        model, tokenizer, prompts, alone(model), max_tokens=20
    ):
        tokens[index].append(response.token)
    assert tokens == texts


def test_texts_that_take_turns_with_one_policy(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """A copy found worthwhile is still offered after another text's round, start or end."""
    texts = [CIRCLE, [200 + t for t in CIRCLE], CIRCLE[:60]]
    for slots, kind in ((0, ""), (7, "right"), (7, "wrong")):
        policy = priced(slots, [], draft=0.5)
        running = []
        for text in texts:
            drafter = scripted(model, text, kind) if slots else alone(model)
            tokens = dspine_mlx.stream_generate(
                model,
                tokenizer,
                text[:8],
                drafter,
                max_tokens=len(text) - 8,
                logits_processors=[forced(text)],
                verify_length=policy,
            )
            running.append((text[8:], tokens))
        while running:
            for text, tokens in list(running):
                ours = [response.token for response in islice(tokens, 3)]
                assert ours == text[: len(ours)]
                del text[:3]
                if not text:
                    running.remove((text, tokens))

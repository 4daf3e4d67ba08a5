"""The batch that mlx_lm.server drives, in this process: texts, joining, leaving, forwards."""

import random
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.load import load_drafter
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.server.drafting_batch import QUIET
from dspine_mlx.server.failure import CLIENT_GONE, Failed
from dspine_mlx.verify_length.schedule import prepare
from tests.support.drafting_batch import NEVER, Request, known, new_batch, run
from tests.support.texts import Counting
from tests.support.tiny import random_prompt, same_steps

SAMPLERS = (
    (greedy_sampler, None),
    (Sampler(temp=0.8, top_p=0.9, seeded=True), 3),
    (Sampler(temp=1.0, xtc_probability=0.5, xtc_threshold=0.05, seeded=True), 4),
)


def mixed(seed: int, count: int) -> list[Request]:
    """Requests of all kinds, most of which meet others."""
    draw, asked = random.Random(seed), []
    for i in range(count):
        sampler, own = draw.choice(SAMPLERS)
        asked.append(
            Request(
                random_prompt(draw.choice((1, 2, 9, 40)), seed=100 * seed + i),
                draw.randint(1, 22),
                sampler,
                make_logits_processors(repetition_penalty=1.3) if draw.random() < 0.3 else [],
                own,
                draw.choice(("auto", "auto", 0, 2)),
                draw.randint(0, 60),
            )
        )
    return asked


def cycling(cycle: list[int]) -> Any:
    """A processor under which a text goes on in a cycle."""

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        wanted = mx.arange(logits.shape[-1]) == cycle[tokens.size % len(cycle)]
        return mx.where(wanted, logits + 50.0, logits)

    return processor


@pytest.mark.parametrize("lookup", [True, False])
def test_texts_look_copies_up_alone_and_together(
    model: nn.Module, tokenizer: TokenizerWrapper, lookup: bool
) -> None:
    """Without any drafter. The first one is alone, has company, and is alone again."""
    cycles = [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25, 26, 27], [31, 32, 33, 34]]
    asked = [
        Request(cycle * 3, budget, processors=[cycling(cycle)], comes=comes)
        for cycle, budget, comes in zip(cycles, (150, 30, 40), (0, 20, 25), strict=True)
    ]
    drafter = load_drafter("lookup", model, kernels="off")
    prepare(drafter, profile=False)
    ours = run(drafter, asked, "auto", lookup=lookup)
    for place, one in enumerate(asked):
        assert same_steps(ours.steps[place], one.plain(model, tokenizer)), place
        call = ours.jobs[place].call
        assert (call.statistics.lookups > 0) == lookup
        assert call.path == "batched"
        assert call.shared_texts > call.shared_steps


@pytest.mark.parametrize("verify_length", ["auto", 3])
@pytest.mark.parametrize("seed", [1, 2])
def test_texts_are_those_of_each_alone_whoever_comes_and_goes(
    model: nn.Module, tokenizer: TokenizerWrapper, seed: int, verify_length: int | str
) -> None:
    asked = mixed(seed, 12)
    for one in asked[::4]:
        one.goes = one.comes + 25
    plain = [one.plain(model, tokenizer) for one in asked]
    done = run(known(model, asked, plain), asked, verify_length)
    for place, one in enumerate(asked):
        steps = done.steps[place]
        assert same_steps(steps, plain[place][: len(steps)])
        assert len(steps) == one.budget or one.goes < NEVER
    for tokens, caches in [*done.ended.values(), *done.kept]:
        own = caches[: len(model.layers)]
        assert [c.offset for c in own] == [len(tokens)] * len(own)
        # Without a draft near, "auto" leaves context out that a drafter would need.
        drafts = [c.offset for c in caches[len(own) :]]
        assert all(
            n == len(tokens) or (verify_length == "auto" and n < len(tokens)) for n in drafts
        )


def test_caches_that_a_text_leaves_hold_its_tokens(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """The keys are those of feeding the tokens at once."""
    asked = [Request(random_prompt(n, seed=n), 15) for n in (12, 30)] + [
        Request(random_prompt(7, seed=7), 40, goes=30)
    ]
    plain = [one.plain(model, tokenizer) for one in asked]
    done = run(known(model, asked, plain), asked, 3)
    assert len(done.kept) == 1
    for tokens, caches in [*done.ended.values(), *done.kept]:
        whole = make_prompt_cache(model)
        model(mx.array(tokens)[None], cache=whole)
        for ours, own in zip(caches, whole, strict=False):
            assert mx.array_equal(ours.keys[..., : ours.offset, :], own.keys[..., : own.offset, :])


def test_a_text_alone_is_decoded_as_ever_and_joins_the_next_one(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    asked = [Request(random_prompt(9), 60), Request(random_prompt(5, seed=5), 10, comes=30)]
    plain = [one.plain(model, tokenizer) for one in asked]
    drafter = known(model, asked, plain, "right")
    done = run(drafter, asked[:1], 4)
    assert (done.jobs[0].call.path, drafter.calls) == ("speculative", 0)
    done = run(drafter, asked, 4)
    assert [same_steps(done.steps[i], plain[i]) for i in (0, 1)] == [True, True]
    assert {job.call.path for job in done.jobs.values()} == {"batched"}
    first, second = (done.jobs[i].call for i in (0, 1))
    assert (second.texts_per_step or 0) > (first.texts_per_step or 0) > 1
    assert second.usage()["accepted"] > 0


@pytest.mark.parametrize("settings", SAMPLERS)
def test_a_text_that_the_others_have_left_goes_on_alone_and_joins_again(
    model: nn.Module, tokenizer: TokenizerWrapper, settings: tuple[Any, int | None]
) -> None:
    sampler, seed = settings
    asked = [
        Request(random_prompt(9), 120, sampler, seed=seed, verify_length=1),
        Request(random_prompt(5, seed=5), 6, comes=8, verify_length=1),
        Request(random_prompt(7, seed=6), 6, comes=90, verify_length=1),
    ]
    asked[0].processors = make_logits_processors({2: -100.0}, 1.2)  # it never ends by itself
    plain = [one.plain(model, tokenizer) for one in asked]
    drafter = known(model, asked, plain)
    done = run(drafter, asked, 1)
    assert [same_steps(done.steps[i], plain[i]) for i in range(3)] == [True] * 3
    alone, shared = (done.jobs[0].call.steps_alone, done.jobs[0].call.shared_steps)
    assert alone > 20
    assert QUIET < shared < 4 * QUIET
    assert done.jobs[0].call.path == "batched"
    tokens, caches = done.ended[0]
    assert [c.offset for c in caches] == [len(tokens)] * len(caches)


@dataclass
class EndsAfter:
    """A stop string that is complete after so many tokens."""

    tokens: int

    def advance(self, token: int) -> bool:
        self.tokens -= 1
        return self.tokens == 0


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("stop", [1, 2, 3, 7])
def test_a_stop_string_within_a_block_ends_the_reply(
    model: nn.Module, tokenizer: TokenizerWrapper, stop: int, together: bool
) -> None:
    """All drafts are right, so blocks have five tokens. The caches hold what the key says."""
    asked = [Request(random_prompt(9), 30), Request(random_prompt(14, seed=2), 30)]
    plain = [one.plain(model, tokenizer) for one in asked]
    batch = new_batch(known(model, asked, plain, "right"), 4, [])
    for one in asked[: 1 + together]:
        batch.insert_segments(asked=[one])
    job = batch.jobs[0]
    job.stops = EndsAfter(stop)
    said: list[list[Any]] = [[], []]
    while batch.jobs:
        for r in batch.next()[1]:
            said[r.uid].append(r)
    last = said[0][-1]
    assert (len(said[0]), last.finish_reason) == (stop, "stop")
    whole = asked[0].prompt + [token for token, _ in plain[0]]
    assert last.all_tokens[: 9 + stop] == whole[: 9 + stop] == job.tokens
    assert last.all_tokens == whole[: len(last.all_tokens)]
    assert [c.offset for c in last.prompt_cache] == [len(last.all_tokens)] * len(last.prompt_cache)
    if together:
        assert [r.token for r in said[1]] == [token for token, _ in plain[1]]


def test_own_logprobs_are_those_of_whole_rows(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    asked = [Request(random_prompt(9), 20), Request(random_prompt(14, seed=2), 20)]
    plain = [one.plain(model, tokenizer) for one in asked]
    batch = new_batch(known(model, asked, plain), 3, [])
    for one in asked:
        batch.insert_segments(asked=[one])
    batch.jobs[1].whole_rows = False
    rows: list[Any] = []
    while batch.jobs:
        rows += [r for r in batch.next()[1] if r.uid == 1]
    assert [r.logprobs[r.token].item() for r in rows] == [row[t].item() for t, row in plain[1]]
    assert any(isinstance(r.logprobs, dict) for r in rows)


def test_one_failing_text_leaves_alone(model: nn.Module, tokenizer: TokenizerWrapper) -> None:
    calls = 0

    def broken(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise ValueError("the user's own")
        return logits

    asked = [Request(random_prompt(n, seed=n), 25, verify_length=3) for n in (4, 11, 20)]
    plain = [one.plain(model, tokenizer) for one in asked]
    drafter = known(model, asked, plain)
    asked[1].processors = [broken]
    done = run(drafter, asked, 3)
    assert [same_steps(done.steps[i], plain[i]) for i in (0, 2)] == [True, True]
    assert 0 < len(done.steps[1]) <= 8
    assert same_steps(done.steps[1], plain[1][: len(done.steps[1])])
    assert "the user's own" in str(done.jobs[1].reply.queue.get_nowait())
    assert 1 not in done.ended


def test_a_client_that_is_gone_before_its_text_starts_costs_no_forward(model: nn.Module) -> None:
    counting = Counting.like(model)
    drafter = known(counting, [], [])
    batch = new_batch(drafter, 3, [])
    (uid,) = batch.insert_segments(asked=[Request(random_prompt(9))])
    batch.jobs[uid].call.fail(Failed(CLIENT_GONE, "gone"))
    progress, responses = batch.next()
    assert ([p.uid for p in progress], responses, batch.jobs) == ([uid], [], {})
    assert counting.shapes == []

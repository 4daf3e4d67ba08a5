"""The batch that mlx_lm.server drives, in this process: texts, joins and leaves, whose forwards."""

import random
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.load import load_drafter
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.server.call import Call, Calls, Reply
from dspine_mlx.server.decoding import TextSettings
from dspine_mlx.server.drafting_batch import QUIET, DraftingBatch
from dspine_mlx.server.failure import CLIENT_GONE, Failed
from dspine_mlx.server.job import Job
from dspine_mlx.server.options import Options
from dspine_mlx.server.pace import LEAST, STEPS, Pace
from dspine_mlx.verify_length.schedule import prepare
from tests.support.texts import Counting, scripted_texts
from tests.support.tiny import Step, plain_steps, random_prompt, same_steps

NEVER = 1 << 30


@dataclass
class Asked:
    """A request: what it asks for, when it comes, and when its client goes away."""

    prompt: list[int]
    budget: int = 12
    sampler: Any = greedy_sampler
    processors: list[Any] = field(default_factory=list)
    seed: int | None = None
    verify_length: int | str = "auto"
    comes: int = 0  # calls of `next` before it
    goes: int = NEVER

    def job(self, uid: int) -> Job:
        call = Call()
        call.drafted = self.verify_length != 0
        settings = TextSettings(
            self.sampler, self.processors, frozenset(), None, self.verify_length, self.seed
        )
        return Job(
            uid,
            Reply(Queue(), call, Calls()),
            mx.array(self.prompt, mx.uint32),
            list(self.prompt),
            self.budget,
            None,
            {},
            settings,
            Endless(),
        )

    def plain(self, model: nn.Module, tokenizer: TokenizerWrapper) -> list[Step]:
        if self.seed is not None:
            mx.random.seed(self.seed)
        return plain_steps(
            model,
            tokenizer,
            self.prompt,
            max_tokens=self.budget,
            sampler=self.sampler,
            logits_processors=self.processors,
        )


class Endless:
    """Replies that end at their last token only."""

    def advance(self, token: int) -> bool:
        return False


@dataclass
class Run:
    """A batch and what came of its requests, by their place."""

    batch: DraftingBatch
    steps: dict[int, list[Step]]
    jobs: dict[int, Job]
    ended: dict[int, tuple[list[int], list[Any]]]  # tokens, and the caches that hold them
    kept: list[tuple[list[int], list[Any]]]


def new_batch(
    drafter: Drafter, verify_length: int | str, kept: Any, lookup: bool = True, **options: int
) -> Any:
    sizes = {"completion_batch_size": 4, "prefill_batch_size": 2, "prefill_step_size": 16} | options
    settings = Options(verify_length=verify_length, lookup=lookup)
    return DraftingBatch(
        drafter, settings, lambda uid, asked: asked[0].job(uid),
        lambda tokens, caches: kept.append((tokens, caches)), stream=generation_stream, **sizes,
    )  # fmt: skip


def run(drafter: Drafter, asked: list[Asked], verify_length: int | str, **options: int) -> Run:
    """Serve requests as they come, until nobody is left."""
    kept: list[Any] = []
    batch = new_batch(drafter, verify_length, kept, **options)
    result, places, turn = Run(batch, {}, {}, {}, kept), {}, 0
    while turn <= max(one.comes for one in asked) or batch.jobs:
        for place, one in enumerate(asked):
            if one.comes == turn:
                (uid,) = batch.insert_segments(asked=[one])
                places[uid], result.steps[place] = place, []
                result.jobs[place] = batch.jobs[uid]
        batch.remove([uid for uid, place in places.items() if asked[place].goes == turn])
        _, responses = batch.next()
        for r in responses:
            result.steps[places[r.uid]].append((r.token, r.logprobs))
            if r.finish_reason is not None:
                result.ended[places[r.uid]] = r.all_tokens, r.prompt_cache
        turn += 1
        assert turn < 5000
        assert batch.prompt_cache_nbytes > 0 or not any(job.done for job in batch.jobs.values())
    batch.close()
    assert not batch.batch.texts
    assert batch.prompt_cache_nbytes == 0
    return result


def known(
    model: nn.Module, asked: list[Asked], plain: list[list[Step]], script: str = "now and then"
) -> Any:
    """A drafter that knows the plain texts."""
    texts = [
        one.prompt + [token for token, _ in steps] for one, steps in zip(asked, plain, strict=True)
    ]
    drafter = scripted_texts(model, texts, script)
    prepare(drafter, profile=False)
    return drafter


SAMPLERS = (
    (greedy_sampler, None),
    (Sampler(temp=0.8, top_p=0.9, seeded=True), 3),
    (Sampler(temp=1.0, xtc_probability=0.5, xtc_threshold=0.05, seeded=True), 4),
)


def mixed(seed: int, count: int) -> list[Asked]:
    """Requests of all kinds, most of which meet others."""
    draw, asked = random.Random(seed), []
    for i in range(count):
        sampler, own = draw.choice(SAMPLERS)
        asked.append(
            Asked(
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
        Asked(cycle * 3, budget, processors=[cycling(cycle)], comes=comes)
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
        assert [c.offset for c in caches] == [len(tokens)] * len(caches)


def test_caches_that_a_text_leaves_hold_its_tokens(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """The keys are those of feeding the tokens at once."""
    asked = [Asked(random_prompt(n, seed=n), 15) for n in (12, 30)] + [
        Asked(random_prompt(7, seed=7), 40, goes=30)
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
    asked = [Asked(random_prompt(9), 60), Asked(random_prompt(5, seed=5), 10, comes=30)]
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
        Asked(random_prompt(9), 120, sampler, seed=seed, verify_length=1),
        Asked(random_prompt(5, seed=5), 6, comes=8, verify_length=1),
        Asked(random_prompt(7, seed=6), 6, comes=90, verify_length=1),
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
    asked = [Asked(random_prompt(9), 30), Asked(random_prompt(14, seed=2), 30)]
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
    asked = [Asked(random_prompt(9), 20), Asked(random_prompt(14, seed=2), 20)]
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

    asked = [Asked(random_prompt(n, seed=n), 25, verify_length=3) for n in (4, 11, 20)]
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
    (uid,) = batch.insert_segments(asked=[Asked(random_prompt(9))])
    batch.jobs[uid].call.fail(Failed(CLIENT_GONE, "gone"))
    progress, responses = batch.next()
    assert ([p.uid for p in progress], responses, batch.jobs) == ([uid], [], {})
    assert counting.shapes == []


# ---- prompts of newcomers


class Steady(Pace):
    def tokens(self, plain: float | None, most: int) -> int:
        return most if plain is None else 6


def test_the_last_client_goes_after_a_long_text_of_its_own_batch(model: nn.Module) -> None:
    """A text that is not drafted for stays in the batch. When it is over, the only request that is
    left has no client any more."""
    batch = new_batch(known(Counting.like(model), [], []), 3, [])
    batch.insert_segments(asked=[Asked(random_prompt(5), QUIET + 8, verify_length=0)])
    while batch.jobs:
        batch.next()
    (uid,) = batch.insert_segments(asked=[Asked(random_prompt(5))])
    batch.jobs[uid].call.fail(Failed(CLIENT_GONE, "gone"))
    progress, responses = batch.next()
    assert [one.uid for one in progress] == [uid]
    assert not responses
    assert not batch.jobs


@pytest.mark.parametrize("running", [1, 3])
def test_running_texts_step_between_any_two_chunks_of_a_prompt(
    model: nn.Module, tokenizer: TokenizerWrapper, running: int
) -> None:
    """Forwards are counted: each chunk has at most the tokens that the pace allows."""
    lengths = (5, 8, 3)[:running]
    asked = [Asked(random_prompt(n, seed=n), 60, verify_length=2) for n in lengths]
    asked.append(Asked(random_prompt(100), 4, comes=20))
    plain = [one.plain(model, tokenizer) for one in asked]
    counting = Counting.like(model)
    drafter = known(counting, asked, plain, "wrong")
    batch = new_batch(drafter, 2, [])
    batch.pace = Steady()
    for one in asked[:running]:
        batch.insert_segments(asked=[one])
    for _ in range(20):
        batch.next()
    counting.shapes.clear()
    (uid,) = batch.insert_segments(asked=asked[-1:])
    newcomer, between = batch.jobs[uid], []
    while not newcomer.prefilled:
        before = len(counting.shapes)
        batch.next()
        between.append(counting.shapes[before:])
    batch.remove(list(batch.jobs))
    chunks = [shape for shapes in between for shape in shapes if shape == (1, 6)]
    assert len(chunks) == 99 // 6
    step = (running, 3)
    for shapes in between:  # a step of those that run, then a chunk; or a block is handed out
        assert shapes in ([], [step, (1, 6)], [step, (1, 99 % 6)])
    assert sum(bool(shapes) for shapes in between) == len(chunks) + 1


def test_prompts_take_turns(model: nn.Module) -> None:
    """A short prompt does not wait for the end of a long one before it."""
    counting = Counting.like(model)
    asked = [Asked(random_prompt(80), 3, verify_length=0), Asked(random_prompt(9), 3)]
    batch = new_batch(known(counting, [], []), 0, [])
    uids = [batch.insert_segments(asked=[one])[0] for one in asked]
    first: list[int] = []
    while not first:
        first += [r.uid for r in batch.next()[1]]
    assert first == uids[1:]
    assert counting.shapes[:2] == [(1, 16), (1, 8)]


@given(
    plain=st.floats(0.01, 1), overhead=st.floats(0, 1.5), each=st.floats(1e-5, 0.01)
)  # seconds; overhead in plain steps
def test_chunks_come_to_take_two_plain_steps(plain: float, overhead: float, each: float) -> None:
    pace, most, tokens = Pace(), 1 << 20, 0
    for _ in range(200):
        tokens = pace.tokens(plain, most)
        pace.learn(tokens, overhead * plain + each * tokens)
    seconds = overhead * plain + each * tokens
    assert seconds <= 1.01 * STEPS * plain or tokens == LEAST
    assert seconds + 2 * each >= 0.9 * STEPS * plain


def test_a_prompt_that_nobody_waits_for_is_fed_in_full_chunks() -> None:
    pace = Pace()
    pace.learn(10, 100.0)
    assert pace.tokens(None, 2048) == 2048
    assert pace.tokens(0.1, 2048) == LEAST

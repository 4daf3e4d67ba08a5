"""Prompts of newcomers in the batch that mlx_lm.server drives: in chunks, between steps."""

import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.server.drafting_batch import QUIET
from dspine_mlx.server.failure import CLIENT_GONE, Failed
from dspine_mlx.server.pace import LEAST, STEPS, Pace
from tests.support.drafting_batch import Request, known, new_batch
from tests.support.texts import Counting
from tests.support.tiny import random_prompt


class Steady(Pace):
    def tokens(self, plain: float | None, most: int) -> int:
        return most if plain is None else 6


def test_the_last_client_goes_after_a_long_text_of_its_own_batch(model: nn.Module) -> None:
    """A text without drafting stays in the batch. When it ends, the only request left has lost its
    client."""
    batch = new_batch(known(Counting.like(model), [], []), 3, [])
    batch.insert_segments(asked=[Request(random_prompt(5), QUIET + 8, verify_length=0)])
    while batch.jobs:
        batch.next()
    (uid,) = batch.insert_segments(asked=[Request(random_prompt(5))])
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
    asked = [Request(random_prompt(n, seed=n), 60, verify_length=2) for n in lengths]
    asked.append(Request(random_prompt(100), 4, comes=20))
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
    """A short prompt does not wait until an earlier long one is done."""
    counting = Counting.like(model)
    asked = [Request(random_prompt(80), 3, verify_length=0), Request(random_prompt(9), 3)]
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

"""Where a round's time goes: the parts, and that taking it apart changes nothing else."""

from collections import Counter
from itertools import count

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.errors import InputError
from dspine_mlx.measure.compare import Models
from dspine_mlx.measure.phases import PHASES, Stopwatch, prefilled, split, timed_rounds
from dspine_mlx.round.decode import decode_text
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.verify_length.schedule import Fixed
from tests.support.tiny import plain_steps, random_prompt, scripted, tiny_dspine

PROMPT = random_prompt(6)


@pytest.fixture
def text(model: nn.Module, tokenizer: TokenizerWrapper) -> list[int]:
    return [token for token, _ in plain_steps(model, tokenizer, PROMPT, max_tokens=30)]


def test_inner_phases_dont_count_for_outer_ones() -> None:
    ticks = count()
    watch = Stopwatch(lambda: next(ticks))  # a second between two looks at the clock
    with watch.timing("select"), watch.timing("draft"):  # host 1, select 1, draft 1, select 1
        pass
    with pytest.raises(ValueError, match="x"), watch.timing("verify"):  # host 1, verify 1
        raise ValueError("x")
    watch.turn("host")  # host 1
    assert watch.seconds == dict.fromkeys(PHASES, 0.0) | {
        "draft": 1,
        "select": 2,
        "verify": 1,
        "host": 3,
    }


class Counting(Stopwatch):
    """Counts how often each phase is entered, and makes every look at the clock cost a second."""

    def __init__(self) -> None:
        ticks = count()
        super().__init__(lambda: float(next(ticks)))

    def start(self) -> None:
        super().start()
        self.entered: Counter[str] = Counter()

    def turn(self, phase: str) -> str:
        self.entered[phase] += 1
        return super().turn(phase)


def test_every_part_of_a_round_is_seen(
    model: nn.Module, tokenizer: TokenizerWrapper, text: list[int]
) -> None:
    drafter = scripted(model, PROMPT + text, "right")
    watch = Counting()
    with prefilled(Models(model, tokenizer, drafter, Sampler()), drafter, PROMPT) as timed:
        timed_rounds(timed, 4, 20, watch)
    assert timed.statistics.rounds == 4  # of 5 tokens each
    for phase in set(PHASES) - {"host"}:
        assert watch.entered[phase] == watch.seconds[phase] == 4  # a second a visit


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temp=1.0)], ids=["greedy", "sampled"])
def test_taking_a_round_apart_does_not_change_the_text(
    model: nn.Module, tokenizer: TokenizerWrapper, sampler: Sampler
) -> None:
    drafter = tiny_dspine(model)
    models = Models(model, tokenizer, drafter, sampler)
    ends = []
    for timed in (False, True):
        mx.random.seed(4)
        with prefilled(models, drafter, PROMPT) as text:
            if timed:
                timed_rounds(text, 5, 16, Stopwatch())
            else:
                for _ in decode_text(text, Fixed(5), 16):
                    pass
        text.settle()
        rounds = text.statistics.rounds
        ends.append((text.prompt_cache[-1].offset, text.cache[0].state[0].tolist(), rounds))
    shared = min(offset for offset, *_ in ends)  # a last token may be left to plain decoding
    assert shared >= len(PROMPT) + 15
    assert ends[0][2] == ends[1][2]
    left, right = (np.array(keys)[..., :shared, :] for _, keys, _ in ends)
    np.testing.assert_array_equal(left, right)


def test_a_split_counts_per_round(
    model: nn.Module, tokenizer: TokenizerWrapper, text: list[int]
) -> None:
    pair = Models(model, tokenizer, scripted(model, PROMPT + text, "right"), Sampler())
    one = split(pair, PROMPT, 99, max_tokens=16)  # as many as the drafter has: 7
    assert (one.length, one.rounds) == (7, 2)
    assert list(one.phases) == list(PHASES)
    assert min(one.phases.values()) > 0
    assert one.normal > 0
    with pytest.raises(InputError, match="an offer of at least 1 token, not 0"):
        split(pair, PROMPT, 0)
    with pytest.raises(InputError, match="needs a drafter"):
        split(Models(model, tokenizer, None, Sampler()), PROMPT, 3)

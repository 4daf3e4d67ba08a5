"""Where a round's time goes: the parts, and that taking it apart changes nothing else."""

from collections import Counter
from itertools import count

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.errors import InputError
from dspine_mlx.measure.compare import Pair
from dspine_mlx.measure.phases import PHASES, Stopwatch, TimedDecoder, decode, split
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.text import Decoder
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
    model: nn.Module, tokenizer: TokenizerWrapper, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspine_mlx.measure.phases.Stopwatch", Counting)
    drafter = scripted(model, PROMPT + text, "right")
    pair = Pair(model, tokenizer, drafter, Sampler())
    timed, _ = decode(TimedDecoder, pair, drafter, PROMPT, Fixed(4), 20)
    assert timed.statistics.rounds == 4  # of 5 tokens each
    watch = timed.watch
    assert isinstance(watch, Counting)
    # Each of the 4 rounds: one proposal inside its selection, one forward inside its acceptance,
    # one way back; an outer phase is entered again when its inner one ends.
    assert watch.entered["draft"] == watch.entered["verify"] == watch.entered["rollback"] == 4
    assert watch.entered["select"] == watch.entered["accept"] == 8
    assert watch.seconds["draft"] == watch.seconds["verify"] == 4  # a second a visit
    assert watch.seconds["select"] == watch.seconds["accept"] == 8


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temp=1.0)], ids=["greedy", "sampled"])
def test_taking_a_round_apart_does_not_change_the_text(
    model: nn.Module, tokenizer: TokenizerWrapper, sampler: Sampler
) -> None:
    drafter = tiny_dspine(model)
    pair = Pair(model, tokenizer, drafter, sampler)
    ends = []
    for kind in (Decoder, TimedDecoder):
        mx.random.seed(4)
        decoder, _ = decode(kind, pair, drafter, PROMPT, Fixed(5), 16)
        decoder.settle()
        rows = [c.offset for c in decoder.prompt_cache]
        ends.append((rows, decoder.cache[0].state[0].tolist(), decoder.statistics.rounds))
    assert ends[0] == ends[1]
    assert ends[0][0] == [len(PROMPT) + 16] * len(ends[0][0])


def test_a_split_counts_per_round(
    model: nn.Module, tokenizer: TokenizerWrapper, text: list[int]
) -> None:
    pair = Pair(model, tokenizer, scripted(model, PROMPT + text, "right"), Sampler())
    one = split(pair, PROMPT, 99, max_tokens=16)  # as many as the drafter has: 7
    assert (one.length, one.rounds) == (7, 2)
    assert list(one.phases) == list(PHASES)
    assert min(one.phases.values()) > 0
    assert one.normal > 0
    with pytest.raises(InputError, match="an offer of at least 1 token, not 0"):
        split(pair, PROMPT, 0)
    with pytest.raises(InputError, match="needs a drafter"):
        split(Pair(model, tokenizer, None, Sampler()), PROMPT, 3)

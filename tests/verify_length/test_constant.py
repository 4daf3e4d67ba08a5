"""Where evidence goes unread and one length is offered, and where not."""

import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.round.statistics import Statistics
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.constant import LOSS, READ, READING, UNREAD, Constant
from dspine_mlx.verify_length.costs import Costs, Curve
from dspine_mlx.verify_length.schedule import Auto, prepare
from tests.bench.simulate import (
    Machine,
    made_up,
    replay,
)
from tests.support.tiny import plain_steps, random_prompt, same_steps, scripted


@pytest.mark.parametrize("gain", [0.5, 0.85, 0.95, 1.1, 3.0])
def test_evidence_goes_unread_where_reading_loses(gain: float) -> None:
    """Lengths 2 and 5 are the better one in turn; the better of them as a constant is 5. Choosing
    gains `gain` times the cost of reading, of which a tenth is a hundredth of the round."""
    constant = Constant(5)
    for turn in range(READ):
        assert not constant.unread
        values = [-1.0] * 6
        values[5] = 1.0 if turn % 2 else -2 * gain * READING
        values[2] = 0.5 if turn % 2 else 0.0
        constant.round_over(values, 5 if turn % 2 else 2, READING * 10)
    assert (constant.unread == UNREAD) == (gain < 0.9)
    assert constant.length == 5


def test_evidence_of_long_rounds_is_always_read() -> None:
    constant = Constant(1)
    for _ in range(5 * READ):
        constant.round_over([0.0, 0.0], 1, 1.01 * READING / LOSS)
    assert not constant.unread


def test_evidence_goes_unread_longer_each_time_until_choosing_gains() -> None:
    constant, pauses = Constant(1), []
    for gain in (0.0, 0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0):
        for turn in range(READ):
            values = [gain * READING, 0.0] if turn % 2 else [0.0, gain * READING]
            constant.round_over(values, 1 - turn % 2, READING)
        pauses.append(constant.unread)
        constant.unread = 0
    assert pauses == [64, 128, 256, 256, 0, 0, 64, 128, 256]


@pytest.mark.parametrize("informed", [0.0, 1.0])
def test_evidence_is_read_where_it_tells_something(informed: float) -> None:
    rows = tuple(4e-3 + 1e-3 * n for n in range(8))
    curve = Curve((64, 2048), (4e-3, 4e-3), (1e-3, 1e-3), (rows, rows))
    machine, lines = Machine(curve), list[str]()
    auto = Auto(Costs(curve), uncalibrated(7), lines.append, lambda: machine.now)
    for seed in range(4):
        replay(made_up(400, 7, 1.5, seed, informed), auto, machine, 64)
    unread = [("unread" in line) for line in lines if "offered" in line]
    assert 0.5 < np.mean(unread) < 1 if informed == 0 else not any(unread)


def test_text_is_the_targets_while_evidence_goes_unread(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """Where rows cost nothing, whole blocks are offered unread as soon as that is known."""
    prompt = random_prompt(17)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=150)
    drafter = scripted(model, prompt + [token for token, _ in plain], "now and then")
    lines: list[str] = []
    prepare(drafter, explain=lines.append)
    ours = list(dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, max_tokens=150))
    assert same_steps([(r.token, r.logprobs) for r in ours], plain)
    unread = ["unread" in line for line in lines if "offered" in line]
    assert unread == [i > READ for i in range(len(unread))]
    assert sum(unread) > 5


def test_a_draft_filters_cut_is_not_the_policys_choice() -> None:
    """A grammar that lets no drafted token through says nothing about the lengths chosen."""
    rows = (1e-3,) * 8
    auto = Auto(Costs(Curve((64, 2048), (1e-3, 1e-3), (1e-3, 1e-3), (rows, rows))), uncalibrated(7))
    auto.start_text(Statistics(), make_sampler(0), 64)
    chosen = auto.length(made_up(50, 7, 2.0, 0).draft(0), 7, 64, 1e-3)
    assert auto.newest is not None
    values = auto.newest.values
    auto.learn(0, 0)
    auto.digest()
    assert chosen > 0
    assert auto.constant.brought == values[chosen] - READING > values[0]

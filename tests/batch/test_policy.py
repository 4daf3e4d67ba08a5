"""The batch's policy in a machine of our own making: what it costs when drafting does not pay."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest

from dspine_mlx.batch.costs import BatchCosts, Factors
from dspine_mlx.batch.policy import Scheduled
from dspine_mlx.batch.text import BatchText
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.generate import make_caches
from dspine_mlx.round.select import Draft, Evidence
from dspine_mlx.round.text import Text
from dspine_mlx.verify_length.costs import Costs, Curve
from dspine_mlx.verify_length.schedule import Schedule
from tests.support.tiny import tiny_dflash, tiny_target

M = 7
DEPTH = 100
Right = Callable[[int, int], int]  # text, step -> how many of its drafted tokens are right


def curve(row: float = 0.1) -> Curve:
    rows = tuple(1 + row * n for n in range(M + 1))
    return Curve((64, 2048), (1.0, 1.0), (0.5, 0.5), (rows, rows))


class Machine:
    """B texts: a forward takes 1 second and `row` for each row past the first, a draft `draft`."""

    def __init__(self, B: int, row: float = 0.1, draft: float = 0.5, chance: float = 0.9):
        model = tiny_target()
        self.row, self.draft = row, draft
        drafter = tiny_dflash(model)
        self.policy = Scheduled(Schedule(Costs(curve(row)), {}))
        self.texts = [member(model, drafter) for _ in range(B)]
        tokens = mx.zeros((M,), mx.uint32)
        evidence = Evidence(tokens, mx.full((M,), chance))
        self.drafts = [Draft(tokens, tokens[:, None], None, evidence)] * B
        self.tokens = self.seconds = 0.0
        self.rounds = self.plain = 0
        for n, text in enumerate(self.texts, 1):
            self.policy.join(text, n, DEPTH)

    def forward(self, rows: int) -> float:
        return 1 + self.row * (rows - 1)

    def run(self, steps: int, right: Right) -> None:
        B = len(self.texts)
        for step in range(steps):
            self.tokens += B
            if self.policy.plainly(B, DEPTH):
                self.plain += 1
                self.seconds += self.forward(B)
                self.policy.plain_step(B, self.forward(B), DEPTH)
                continue
            lengths = self.policy.lengths(self.texts, self.drafts, DEPTH)
            accepted = [min(n, right(i, step)) for i, n in enumerate(lengths)]
            verifying = self.forward(B * (1 + max(lengths)))
            self.policy.learn(self.texts, lengths, accepted, self.draft, verifying)
            self.rounds += 1
            self.tokens += sum(accepted)
            self.seconds += self.draft + verifying

    @property
    def gain(self) -> float:
        """Speed over plain decoding of all texts."""
        B = len(self.texts)
        return self.tokens / self.seconds * self.forward(B) / B


def member(model: nn.Module, drafter: Drafter) -> BatchText:
    return BatchText(Text(drafter, make_caches(model, drafter, None, None)), 1e9)


@pytest.mark.parametrize("B", [1, 2, 8, 16])
def test_a_useless_drafter_is_parked(B: int) -> None:
    """It promises much and nothing is accepted: a few rounds, then seldom one."""
    machine = Machine(B)
    machine.run(1500, lambda text, step: 0)
    assert machine.gain > 0.97
    assert machine.rounds < 60
    assert machine.plain > 1400


@pytest.mark.parametrize("B", [1, 2, 8])
def test_a_good_drafter_is_not(B: int) -> None:
    machine = Machine(B, row=0.02)
    machine.run(300, lambda text, step: M)
    assert machine.gain > 2
    assert machine.plain < 10


def test_drafting_comes_back_when_it_pays() -> None:
    machine = Machine(4, row=0.02)
    machine.run(400, lambda text, step: 0)
    rounds = machine.rounds
    machine.run(400, lambda text, step: M)
    assert machine.rounds - rounds > 200


def test_dear_rows_are_not_given_to_unlikely_tokens() -> None:
    """Where a row costs as much as a forward nothing is offered; where it is free, all is."""
    for row, wanted in ((2.0, 0), (0.0, M)):
        machine = Machine(3, row=row)
        lengths = machine.policy.lengths(machine.texts, machine.drafts, DEPTH)
        assert lengths == [wanted] * 3


def test_one_hopeless_text_among_seven_easy_ones() -> None:
    """The easy ones gain, and the hopeless one keeps its token per round."""
    machine = Machine(8, row=0.02)
    machine.run(300, lambda text, step: 0 if text == 0 else M)
    assert machine.gain > 1.5
    chances = [text.chances.of([2.0] * M)[0] for text in machine.texts]
    assert chances[0] < min(chances[1:])


def test_costs_of_more_rows_than_were_measured_go_on_as_a_line() -> None:
    costs = BatchCosts(Costs(curve(0.1)))
    assert costs.verify(M + 1, DEPTH) == pytest.approx(1.7)
    assert costs.verify(4 * (M + 1), DEPTH) == pytest.approx(1 + 0.1 * 31)
    costs.learn_round(4, 32, DEPTH, 2.0, 8.2)
    assert costs.verify(32, DEPTH) == pytest.approx(8.2)
    assert costs.draft(4, DEPTH) == pytest.approx(2.0)
    assert costs.plain(4, DEPTH) == pytest.approx(1.3)


def test_a_factor_is_that_of_the_nearest_case() -> None:
    factors = Factors()
    assert factors.of(5) == 1
    factors.learn(4, 1.0, 2.0)
    factors.learn(16, 1.0, 0.5)
    assert factors.of(3) == pytest.approx(2)
    assert factors.of(32) == pytest.approx(0.5)
    factors.learn(4, 1.0, 4.0)
    assert 2 < factors.of(4) < 4

"""The batch's policy in a machine of our own making: what it costs when drafting does not pay."""

from collections.abc import Callable
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import pytest

from dspine_mlx.batch.costs import BatchCurve
from dspine_mlx.batch.prospects import FLOOR
from dspine_mlx.batch.scheduled import Scheduled
from dspine_mlx.batch.select import nothing
from dspine_mlx.batch.text import BatchText
from dspine_mlx.batch.trials import LENT
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.generate import make_caches
from dspine_mlx.round.select import Draft, Evidence
from dspine_mlx.round.text import Text
from dspine_mlx.verify_length.budget import SHARE, START, Budget
from dspine_mlx.verify_length.costs import Costs, Curve
from dspine_mlx.verify_length.schedule import Schedule
from tests.support.tiny import tiny_dflash, tiny_target

M = 7
DEPTH = 100
Right = Callable[[int, int], int]  # text, step -> how many of its drafted tokens are right


class Machine:
    """B texts: a forward takes 1 second and `row` for each row past the first, a draft `draft`,
    `slot` for each token, and `each` for each text's."""

    def __init__(
        self,
        B: int,
        row: float = 0.1,
        draft: float = 0.5,
        chance: float = 0.9,
        slot: float = 0.0,
        each: float = 0.0,
        known: Budget | None = None,
    ):
        """known: what the pair has shown in single texts."""
        model = tiny_target()
        self.row, self.draft, self.slot, self.chance = row, draft, slot, chance
        self.each, self.known = each, known
        drafter = tiny_dflash(model)
        self.model, self.drafter = model, drafter
        self.policy = self.scheduled()
        self.texts = [member(model, drafter) for _ in range(B)]
        self.tokens = self.seconds = 0.0
        self.rounds = self.plain = 0
        self.widths: list[int] = []
        self.drafted: list[list[bool]] = []
        self.of = [0] * B  # tokens of each text
        self.watches = self.agreeing = 0  # drafts watched; tokens to come that the last one has
        for n, text in enumerate(self.texts, 1):
            self.policy.join(text, n, DEPTH)

    def scheduled(self, shortens: bool = True) -> Scheduled:
        """The policy, which knows what steps cost."""
        curves = []
        for B in (1, 16):
            drafts = [self.drafting(B, n) for n in range(1, M + 1)]
            shares = tuple(seconds / drafts[-1] for seconds in drafts)
            rows = tuple(self.forward(B * width) for width in range(1, M + 2))
            seconds = (rows[0], rows[0]), (drafts[-1], drafts[-1]), (rows, rows)
            curves.append(BatchCurve(B, Curve((64, 2048), *seconds), shares))
        budgets = {} if self.known is None else {"greedy": self.known}
        schedule = Schedule(Costs(curves[0].curve), {}, budgets=budgets)
        return Scheduled(schedule, M, curves, shortens)

    def forward(self, rows: int) -> float:
        return 1 + self.row * (rows - 1)

    def drafting(self, texts: int, slots: int) -> float:
        return self.draft + (self.slot + self.each * texts) * slots

    def drafts(self) -> list[Draft]:
        drafted = self.policy.drafted(self.texts, DEPTH)
        self.drafted.append(drafted)
        slots = self.policy.slots(self.texts, DEPTH)
        self.widths.append(slots)
        return [self.draft_of(slots) if one else nothing() for one in drafted]

    def run(self, steps: int, right: Right) -> None:
        B = len(self.texts)
        for step in range(steps):
            self.tokens += B
            self.of = [n + 1 for n in self.of]
            if self.policy.plainly(self.texts, DEPTH):
                self.step_plainly(right, step)
                continue
            lengths = self.policy.lengths(self.texts, self.drafts(), DEPTH)
            accepted = [min(n, right(i, step)) for i, n in enumerate(lengths)]
            drafting = self.drafting(sum(self.drafted[-1]), self.widths[-1])
            verifying = self.forward(B * (1 + max(lengths)))
            self.policy.learn(self.texts, lengths, accepted, drafting, verifying)
            self.rounds += 1
            self.tokens += sum(accepted)
            self.of = [n + more for n, more in zip(self.of, accepted, strict=True)]
            self.seconds += drafting + verifying

    def step_plainly(self, right: Right, step: int) -> None:
        B = len(self.texts)
        self.plain += 1
        self.seconds += self.forward(B)
        token = 0 if self.agreeing else 1
        self.agreeing = max(0, self.agreeing - 1)
        tokens = [(token, mx.zeros(1), False)] * B
        self.policy.plain_step(self.texts, tokens, self.forward(B), DEPTH)
        at = self.policy.watch(self.texts, DEPTH)
        if at is not None:
            self.watches += 1
            self.agreeing = right(at, step)
            self.seconds += self.drafting(1, M)
            self.policy.watched(self.texts[at], self.draft_of(M), B, DEPTH)

    def draft_of(self, slots: int) -> Draft:
        tokens = mx.zeros((slots,), mx.uint32)
        return Draft(tokens, tokens[:, None], None, Evidence(tokens, mx.full(slots, self.chance)))

    def begin(self) -> None:
        """New texts in place of the old ones."""
        self.texts = [member(self.model, self.drafter) for _ in self.texts]
        for n, text in enumerate(self.texts, 1):
            self.policy.join(text, n, DEPTH)

    @property
    def gain(self) -> float:
        """Speed over plain decoding of all texts."""
        B = len(self.texts)
        return self.tokens / self.seconds * self.forward(B) / B


def member(model: nn.Module, drafter: Drafter) -> BatchText:
    return BatchText(Text(drafter, make_caches(model, drafter, None, None)), 1e9)


@pytest.mark.parametrize("B", [1, 2, 8, 16])
def test_a_useless_drafter_is_parked(B: int) -> None:
    """It promises much, and no token is right: drafts are watched now and then, and no round is
    made."""
    machine = Machine(B)
    machine.run(1500, lambda text, step: 0)
    assert machine.gain > 0.97
    assert machine.rounds == 0
    assert machine.watches > 10


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
        lengths = machine.policy.lengths(machine.texts, machine.drafts(), DEPTH)
        assert lengths == [wanted] * 3


def test_wide_blocks_come_back_with_easy_text() -> None:
    machine = Machine(4, row=0.02, slot=0.15, chance=0.5)
    machine.run(300, lambda text, step: 2)
    assert machine.gain > 1.1
    assert max(machine.widths[-10:]) <= 4
    machine.chance = 0.95
    machine.run(300, lambda text, step: M)
    assert min(machine.widths[-10:]) == M


def test_a_drafter_whose_blocks_may_not_be_cut_drafts_all_of_them() -> None:
    machine = Machine(2, row=0.02, slot=0.05)
    machine.policy = machine.scheduled(shortens=False)
    for n, text in enumerate(machine.texts, 1):
        machine.policy.join(text, n, DEPTH)
    machine.run(50, lambda text, step: 2)
    assert set(machine.widths) == {M}


@pytest.mark.parametrize("row", [0.02, 0.08])
def test_one_hopeless_text_among_seven_easy_ones(row: float) -> None:
    """Where the easy ones gain, the hopeless one still keeps most of its plain speed."""
    machine = Machine(8, row=row)
    machine.run(400, lambda text, step: 0 if text == 0 else M)
    assert machine.gain > 1.1
    plain = machine.seconds / machine.forward(8)  # steps of plain decoding in that time
    assert machine.of[0] > (FLOOR - 0.02) * plain
    chances = [text.chances.of([2.0] * M)[0] for text in machine.texts]
    assert chances[0] < min(chances[1:])


def test_a_text_left_out_comes_back_when_it_is_easy() -> None:
    """While it is hard, the draft is for the others; a try now and then finds the change."""
    machine = Machine(8, row=0.02, draft=0.3, each=0.02)
    machine.run(400, lambda text, step: 0 if text == 0 else M)
    others = [sum(round_[1:]) for round_ in machine.drafted]
    assert others == [7] * len(others)
    left_out = [not round_[0] for round_ in machine.drafted]
    assert sum(left_out[-12:]) >= 9  # in one of four rounds it is tried: a try per LAST_WAIT steps
    before = machine.rounds
    machine.run(400, lambda text, step: M)
    assert [round_[0] for round_ in machine.drafted[-10:]] == [True] * 10
    assert machine.rounds - before > 200  # nothing holds the others back any more


def lost(machine: Machine) -> float:
    """Plain steps' time that was not made up for by tokens."""
    B = len(machine.texts)
    return machine.seconds / machine.forward(B) - machine.tokens / B


@pytest.mark.parametrize("tokens", [64, 192])
@pytest.mark.parametrize("B", [2, 8, 16])
def test_a_useless_drafter_costs_batches_of_new_texts_little(B: int, tokens: int) -> None:
    """However sure it is of itself. Watched drafts take what is lent at first, and 1 % after."""
    machine = Machine(B, draft=0.3, each=0.02)
    losses = [0.0]
    for _ in range(12):
        machine.begin()
        machine.run(tokens, lambda text, step: 0)
        losses.append(lost(machine))
    assert machine.rounds == 0
    assert machine.watches > 3
    assert losses[-1] < LENT + SHARE * 12 * tokens
    assert max(after - before for before, after in pairwise(losses)) < 0.03 * tokens


@pytest.mark.parametrize("B", [2, 8])
def test_what_single_texts_have_shown_counts(B: int) -> None:
    """A pair whose rounds have earned more than they were lent drafts at once; one whose rounds
    have lost waits until a watched draft is 1 % of the time."""
    good, bad = Machine(B, row=0.02, known=Budget(9.0)), Machine(B, known=Budget(0.0, 1.0))
    good.run(1, lambda text, step: M)
    assert (good.rounds, good.watches) == (1, 0)
    bad.run(20, lambda text, step: M)
    assert (bad.rounds, bad.watches) == (0, 0)


def test_one_easy_text_does_not_make_all_draft() -> None:
    """Its drafts would pay if all were like it; rounds find that they are not, and stop."""
    machine = Machine(16, draft=0.5, each=0.06)
    machine.run(1500, lambda text, step: M if text == 3 else 0)
    assert lost(machine) < LENT + START + START / 2 + 1 + 3 * 3 + 2 * SHARE * 1500


def test_a_new_text_inherits_what_others_taught() -> None:
    machine = Machine(4, row=0.02)
    fresh = machine.texts[0].chances.of([2.0] * M)
    machine.run(60, lambda text, step: 0)
    text = member(machine.model, machine.drafter)
    machine.policy.join(text, 5, DEPTH)
    assert text.chances.of([2.0] * M)[0] < fresh[0] - 0.1
    assert text.chances.information == text.chances.prior  # but easy to unlearn


def test_a_verdict_says_what_was_done() -> None:
    machine = Machine(2, row=0.02)
    machine.run(40, lambda text, step: M)
    assert "saved the time of" in machine.policy.verdict(machine.texts[0])
    hopeless = Machine(2, row=3.0, draft=9.0)
    hopeless.run(40, lambda text, step: 0)
    assert "drafted" in hopeless.policy.verdict(hopeless.texts[0])

"""What copies of earlier text are worth, against drafts and against plain decoding.

All are valued alike: the seconds that their tokens are expected to save, less those of the forward
(`dspine_mlx.verify_length.rules`).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from dspine_mlx.round.lookup import COPIED, Copy, CopyChances
from dspine_mlx.round.select import log_odds
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.chances import Chances
from dspine_mlx.verify_length.costs import Costs
from dspine_mlx.verify_length.reading import EVERY
from dspine_mlx.verify_length.rules import contested, length_values

FADING = 1 / 16  # of what unmade drafts would have gained, per round
KNOWN = 4  # rounds that must have shown it before a draft is left out


class Offer(NamedTuple):
    """A copy, how many tokens to offer, those before it included, and the chance of each."""

    copy: Copy
    length: int
    chances: list[float]
    gain: float  # seconds, over what else could be done


class Values(NamedTuple):
    """What an offer's value depends on."""

    seconds: list[float]  # of a forward over 1, 2 .. rows
    tokens: list[float]  # seconds that each token saves: as many as can be offered


class Copying:
    """Chances of copies, and whether to draft where there is one."""

    def __init__(self) -> None:
        self.chances = CopyChances()
        # Copies are offered where they look best, so on average they disappoint: learnt from those
        # offered.
        self.offered = Chances(uncalibrated(COPIED))
        self.contest: Copy | None = None  # worth more than the usual round; now a draft is made
        self.missed = self.rounds = 0.0  # seconds that drafts gained in such contests, fading
        self.skipped = 0  # drafts left out in a row

    def of(self, copy: Copy) -> list[float]:
        """Chance of each token of a copy, given that those before it are accepted."""
        return self.offered.of([log_odds(p) for p in self.chances.of(copy)])

    def pays(
        self, copy: Copy, running: int, costs: Costs, depth: int, rate: float | None
    ) -> Offer | None:
        """A round with the copy and nothing drafted; None: what else is done is worth more. rate:
        tokens per second of recent rounds; None: while parked."""
        seconds = costs.verify(depth)
        if rate is None:
            return self.instead_of_plain(copy, running, seconds, costs.plain(depth))
        return self.instead_of_draft(copy, seconds, costs.draft(depth), 1 / rate)

    def instead_of_plain(
        self, copy: Copy, running: int, seconds: list[float], plain: float
    ) -> Offer | None:
        """A round with the copy, once its first `running` tokens are there; None: plain decoding
        gains. Its first step after something else can't overlap with it."""
        chances = self.of(copy)
        there, ahead = math.prod(chances[:running]), chances[running:]
        values = length_values(ahead, seconds, [plain] * len(ahead))
        best, lost = max(values), max(0.0, seconds[0] - plain)
        gain, length = there * (best + plain) - lost, values.index(best)
        return Offer(copy, length, ahead, gain) if gain > 0 and length else None

    def instead_of_draft(
        self, copy: Copy, seconds: list[float], draft: float, average: float
    ) -> Offer | None:
        """A round with the copy and without the drafter's forward; None: the draft is needed.

        A copy can do without if it is worth more than the usual round would be if its `draft`
        seconds cost nothing, where a token saves `average` seconds. It does without if drafts in
        such rounds have gained less than that, but for one round in EVERY.
        """
        chances = self.of(copy)
        values = length_values(chances, seconds, [average] * len(chances))
        best = max(values)
        gain, length = best + average - draft, values.index(best)
        self.contest = None
        if gain <= 0 or not length:
            return None
        if self.rounds < KNOWN or self.skipped >= EVERY or self.missed > draft * self.rounds:
            self.contest = copy
            return None
        self.skipped += 1
        return Offer(copy, length, chances, gain)

    def alone(self, copy: Copy, seconds: list[float], average: float) -> Offer:
        """The best length of a copy where a token saves `average` seconds; at least 1."""
        chances = self.of(copy)
        values = length_values(chances, seconds, [average] * len(chances))
        length = max(1, values.index(max(values)))
        return Offer(copy, length, chances, values[length])

    def instead_of_path(
        self, drafted: list[float], path: list[int], copies: Iterable[Copy], values: Values
    ) -> Offer | None:
        """The copy that gains most over a draft, whose path has the chances `drafted`; None: none
        gains."""
        offers = [self.against(drafted, path, copy, values) for copy in copies]
        offers = [offer for offer in offers if offer.gain > 0 and offer.length > offer.copy.after]
        best = max(offers, key=lambda offer: offer.gain, default=None)
        if self.contest is not None:
            alone = self.against(drafted, path, self.contest, values)
            self.missed *= 1 - FADING
            self.missed += (0.0 if best is None else best.gain) - alone.gain
            self.rounds = (1 - FADING) * self.rounds + 1
            self.contest, self.skipped = None, 0
        return best

    def behind(self, copy: Copy, survival: float, values: Values) -> tuple[list[float], int]:
        """Chances of a copy behind a block that is accepted with chance `survival`, and how many of
        its tokens to offer. values: of forwards from the block's own on, and of further tokens."""
        chances = self.of(copy)
        first = [survival * chances[0], *chances[1:]]
        net = length_values(first, values.seconds, values.tokens)
        return chances, net.index(max(net))

    def against(self, drafted: list[float], path: list[int], copy: Copy, values: Values) -> Offer:
        """The copy after the first tokens of the path, against the path itself."""
        tokens = path[: copy.after] + copy.tokens
        pairs = enumerate(zip(tokens, path, strict=False))
        agreed = next((i for i, (x, y) in pairs if x != y), len(path))
        chances = [*drafted[: copy.after], *self.of(copy)][: len(values.tokens)]
        chances, others = contested(chances, drafted, agreed)
        mine = length_values(chances, values.seconds, values.tokens)
        best = max(mine)
        gain = best - max(length_values(others, values.seconds, values.tokens))
        return Offer(copy, mine.index(best), chances, gain)

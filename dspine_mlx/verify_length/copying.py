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
        self.missed = self.rounds = 0.0  # seconds that drafts gained where a copy looked good
        self.skipped = 0  # drafts in a row

    def of(self, copy: Copy) -> list[float]:
        """Chance of each token of a copy, given that those before it are accepted."""
        return self.offered.of([log_odds(p) for p in self.chances.of(copy)])

    def instead_of_plain(
        self, copy: Copy, running: int, seconds: list[float], plain: float
    ) -> Offer:
        """A round with the copy, once its first `running` tokens are there, against plain decoding.
        A plain step after something else can't overlap with it."""
        chances = self.of(copy)
        there, ahead = math.prod(chances[:running]), chances[running:]
        values = length_values(ahead, seconds, [plain] * len(ahead))
        best, lost = max(values), max(0.0, seconds[0] - plain)
        return Offer(copy, values.index(best), ahead, there * (best + plain) - lost)

    def instead_of_draft(
        self, copy: Copy, seconds: list[float], draft: float, average: float
    ) -> Offer:
        """A round with the copy, against the usual round, as if its draft cost nothing: rounds save
        `average` seconds per token, and the drafting takes `draft`."""
        chances = self.of(copy)
        values = length_values(chances, seconds, [average] * len(chances))
        best = max(values)
        return Offer(copy, values.index(best), chances, best + average - draft)

    def instead_of(
        self, drafted: list[float], path: list[int], copies: Iterable[Copy], values: Values
    ) -> Offer | None:
        """The copy that gains most over the draft `path`, whose tokens have the chances `drafted`;
        None: none gains."""
        offers = [self.against(drafted, path, copy, values) for copy in copies]
        offers = [offer for offer in offers if offer.length > offer.copy.after]
        best = max(offers, key=lambda offer: offer.gain, default=None)
        return None if best is None or best.gain <= 0 else best

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

    def draft_needed(self, draft: float) -> bool:
        """Whether to draft beside a copy that is worth more than the usual round: where drafts
        gained more than they cost, and now and then to see whether they do."""
        known = self.rounds >= KNOWN and self.skipped < EVERY
        return not known or self.missed > draft * self.rounds

    def drafted(self, gain: float) -> None:
        """A draft beside such a copy gained so many seconds."""
        self.missed = (1 - FADING) * self.missed + gain
        self.rounds = (1 - FADING) * self.rounds + 1
        self.skipped = 0

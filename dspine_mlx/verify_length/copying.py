"""Whether a copy of earlier text is offered, in place of a draft or after some of its tokens."""

import math
from collections.abc import Iterable
from operator import mul
from typing import NamedTuple

from dspine_mlx.round.lookup import COPIED, Copy, CopyChances, Lookup
from dspine_mlx.round.select import Draft, log_odds
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.chances import Chances, sigmoid
from dspine_mlx.verify_length.constant_length import EVERY
from dspine_mlx.verify_length.disagreement import Disagreement
from dspine_mlx.verify_length.forecast import Forecast
from dspine_mlx.verify_length.records import Round
from dspine_mlx.verify_length.rules import Floats, contested, length_values

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
    known: Disagreement | None = None  # where a copy and the draft differ


class CopyOutcomes:
    """Chances of copies, by what became of earlier ones."""

    def __init__(self) -> None:
        self.chances = CopyChances()
        # Copies are offered where they look best, so on average they disappoint: learnt from those
        # offered.
        self.offered = Chances(uncalibrated(COPIED))

    def of(self, copy: Copy) -> list[float]:
        """Chance of each token of a copy, given that those before it are accepted."""
        return self.offered.of([log_odds(p) for p in self.chances.of(copy)])


class Copying(CopyOutcomes):
    """Whether to draft where there is a copy, and what to offer."""

    def __init__(self, forecast: Forecast) -> None:
        super().__init__()
        self.forecast, self.costs = forecast, forecast.costs
        self.weights = forecast.chances.calibration.copy_weights  # between a copy and a draft
        self.contest: Copy | None = None  # worth more than the usual round; now a draft is made
        self.missed = self.rounds = 0.0  # seconds that drafts gained in such contests, fading
        self.skipped = 0  # drafts left out in a row

    def pays(self, copy: Copy, depth: int, parked: bool, running: int) -> bool:
        """Whether a round with the copy and nothing drafted is worth more than what else is done.
        running: its first tokens that a plain step is making already."""
        if parked:
            return self.instead_of_plain(copy, depth, running)
        return self.instead_of_draft(copy, depth)

    def instead_of_plain(self, copy: Copy, depth: int, running: int) -> bool:
        """Whether a round gains over plain decoding once `running` tokens of the copy are there.
        Its first step after something else can't overlap with it."""
        chances, plain, seconds = self.of(copy), self.costs.plain(depth), self.costs.verify(depth)
        best, length = best_length(chances[running:], seconds, plain)
        lost = max(0.0, seconds[0] - plain)
        return length > 0 and math.prod(chances[:running]) * (best + plain) > lost

    def instead_of_draft(self, copy: Copy, depth: int) -> bool:
        """Whether to offer the copy without the drafter's forward.

        A copy can do without if it is worth more than the usual round would be if its draft cost
        nothing. It does without if drafts in such rounds have gained less than they cost, but for
        one round in EVERY.
        """
        draft, average = self.costs.draft(depth), 1 / self.forecast.rate(depth)
        best, length = best_length(self.of(copy), self.costs.verify(depth), average)
        self.contest = None
        if not length or best + average <= draft:
            return False
        if self.rounds < KNOWN or self.skipped >= EVERY or self.missed > draft * self.rounds:
            self.contest = copy
            return False
        self.skipped += 1
        return True

    def alone(self, copy: Copy, depth: int, parked: bool) -> Round:
        """The best round with nothing but the copy; it offers a token at least."""
        costs, chances = self.costs, self.of(copy)
        average = costs.plain(depth) if parked else 1 / self.forecast.rate(depth)
        _, length = best_length(chances, costs.verify(depth), average)
        return Round(depth, chances=chances, chosen=max(1, length), copy=copy, drafted=False)

    def splice(
        self, draft: Draft, greedy: list[float], lookup: Lookup, limit: int, depth: int
    ) -> Round | None:
        """The round whose copy gains most over a draft, after some of its tokens; None: none gains.

        greedy: chances of the greedy path. Of a sampled draft nothing else is asked.
        """
        path = draft.greedy_path or draft.evidence
        assert path is not None
        tokens = path.tokens.tolist()[:limit]
        w = self.forecast.token_values(greedy, limit, depth)
        w += [1 / self.forecast.rate(depth)] * (limit - len(w))
        copies = lookup.splices(tokens) if draft.q is None else lookup.whole()
        known = Disagreement.of(draft, lookup) if self.weights else None
        values = Values(self.costs.verify(depth), w, known)
        offer = self.instead_of_path(greedy[:limit], tokens, copies, values)
        if offer is None:
            return None
        return Round(depth, chances=offer.chances, chosen=offer.length, copy=offer.copy)

    def extend(self, this: Round, draft: list[int], lookup: Lookup, limit: int) -> Copy | None:
        """The copy that the round goes on with after a sampled draft, whose tokens it offers."""
        copy = lookup.draft(limit - len(draft), draft)
        if copy is None:
            return None
        chances, seconds = self.of(copy), self.costs.verify(this.depth)[len(draft) :]
        behind = [math.prod(this.chances) * chances[0], *chances[1:]]
        _, more = best_length(behind, seconds, 1 / self.forecast.rate(this.depth))
        if not more:
            return None
        this.copy, this.chosen = copy, this.chosen + more
        this.chances = [*this.chances, *chances]
        return copy

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

    def against(self, drafted: list[float], path: list[int], copy: Copy, values: Values) -> Offer:
        """The copy after the first tokens of the path, against the path itself."""
        tokens = path[: copy.after] + copy.tokens
        pairs = enumerate(zip(tokens, path, strict=False))
        agreed = next((i for i, (x, y) in pairs if x != y), len(path))
        # Fitted weights know already what those offered are worth.
        copied = self.of(copy) if values.known is None else self.chances.of(copy)
        chances, share = [*drafted[: copy.after], *copied][: len(values.tokens)], None
        differ = agreed < min(len(chances), len(drafted))
        if values.known is not None and differ and agreed == copy.after:
            facts = values.known.facts(copy, chances[agreed], drafted[agreed])
            share = sigmoid(sum(map(mul, self.weights, facts)))
        chances, others = contested(chances, drafted, agreed, share)
        mine = length_values(chances, values.seconds, values.tokens)
        best = max(mine)
        gain = best - max(length_values(others, values.seconds, values.tokens))
        return Offer(copy, mine.index(best), chances, gain)


def best_length(chances: Floats, seconds: Floats, average: float) -> tuple[float, int]:
    """The greatest net seconds where each token saves `average` seconds, and their length."""
    values = length_values(chances, seconds, [average] * len(chances))
    return max(values), values.index(max(values))

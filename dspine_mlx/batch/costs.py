"""What steps of several texts cost, from a pair's costs for one text and what real steps took."""

import math

from dspine_mlx.verify_length.costs import Costs

LEARNT = 0.3  # share of a surprise that is believed


class Factors:
    """By what a kind of step is dearer than was guessed, for each number of rows that was seen."""

    def __init__(self) -> None:
        self.logs: dict[int, float] = {}

    def of(self, rows: int) -> float:
        """Of the nearest number of rows that was seen; 1 before any."""
        nearest = min(self.logs, key=lambda seen: abs(math.log(seen / rows)), default=None)
        return 1.0 if nearest is None else math.exp(self.logs[nearest])

    def learn(self, rows: int, guessed: float, seconds: float) -> None:
        found = math.log(max(seconds, 1e-9) / guessed)
        known = self.logs.get(rows, found)
        self.logs[rows] = known + LEARNT * (found - known)


class BatchCosts:
    """Seconds of a plain step, of drafting and of verifying, by texts, rows in all and depth.

    A guess from the costs of one text, with rows beyond its widest forward on a straight line, is
    corrected by the times of real steps.
    """

    def __init__(self, costs: Costs):
        self.costs = costs
        self.plain_factors, self.draft_factors, self.verify_factors = (
            Factors(),
            Factors(),
            Factors(),
        )

    def guess(self, rows: int, depth: int) -> float:
        """Of a target forward."""
        known = self.costs.verify(depth)
        if rows <= len(known):
            return known[rows - 1]
        each = max(0.0, known[-1] - known[0]) / (len(known) - 1)
        return known[-1] + each * (rows - len(known))

    def guess_plain(self, texts: int, depth: int) -> float:
        return self.guess(texts, depth) * self.costs.plain(depth) / self.guess(1, depth)

    def guess_draft(self, texts: int, depth: int) -> float:
        return self.costs.draft(depth) * self.guess(texts, depth) / self.guess(1, depth)

    def plain(self, texts: int, depth: int) -> float:
        return self.guess_plain(texts, depth) * self.plain_factors.of(texts)

    def draft(self, texts: int, depth: int) -> float:
        return self.guess_draft(texts, depth) * self.draft_factors.of(texts)

    def verify(self, rows: int, depth: int) -> float:
        return self.guess(rows, depth) * self.verify_factors.of(rows)

    def plain_known(self, texts: int) -> bool:
        """Whether a plain step of about so many texts was timed."""
        return any(texts <= 2 * seen <= 4 * texts for seen in self.plain_factors.logs)

    def learn_plain(self, texts: int, depth: int, seconds: float) -> None:
        self.plain_factors.learn(texts, self.guess_plain(texts, depth), seconds)

    def learn_round(
        self, texts: int, rows: int, depth: int, drafting: float, verifying: float
    ) -> None:
        self.draft_factors.learn(texts, self.guess_draft(texts, depth), drafting)
        self.verify_factors.learn(rows, self.guess(rows, depth), verifying)

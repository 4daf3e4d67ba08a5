"""A drafter that loads but does not fit: told from hard text by the drafts that are accepted.

A drafter with another rope theta, or with two tables exchanged, has the right shapes and drafts at
random: of its first drafted tokens next to none is accepted. Hard text on a good pair looks alike
at first sight, since few of its drafts are accepted either.
"""

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

ERROR_RATE = 0.01  # most good pairs in a hundred that are ever warned about
HARD = 8.0  # hard text has this many times fewer first tokens accepted than the pair's usual text
MISJUDGED = 2.0  # a calibrated chance may be this many times too high on text unlike its own
UNKNOWN = 0.4  # first tokens accepted where nothing is known: any useful drafter's, on usual text
ROUNDS = 192  # then a drafter that raised no warning is taken to fit


@dataclass
class Misfit:
    """A sequential test of the first drafted token of each round, which warns at most once.

    Round i's first token is accepted with some chance p_i, given the rounds before it. A pair that
    fits has p_i >= q_i, the least to be expected of it on hard text; of a drafter that does not
    fit, r_i = q_i / HARD is typical. The likelihood ratio

        M_n = prod_i (r_i / q_i if accepted else (1 - r_i) / (1 - q_i))

    is a supermartingale for every pair that fits, however its rounds depend on each other, so it
    ever reaches 1 / ERROR_RATE with at most that probability (Ville's inequality; Ramdas et al.,
    arXiv:2210.01948).

    expected: the share of first drafted tokens that this pair's texts have accepted so far; None:
    not known.
    """

    expected: float | None = None
    rounds: int = 0
    accepted: int = 0  # first tokens
    promised: float = 0.0  # sum of the first tokens' usual or calibrated chances
    tokens: int = 0  # of all rounds, the target's own included
    log_ratio: float = 0.0
    over: bool = field(default=False, init=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Misfit":
        """From JSON of an earlier process, whose test goes on; one that came to its end says what
        to expect. ValueError, KeyError or TypeError when it is none."""
        expected = None if data["expected"] is None else float(data["expected"])
        rounds, accepted, tokens = (int(data[name]) for name in ("rounds", "accepted", "tokens"))
        sums = [float(data["promised"]), float(data["log_ratio"])]
        if not 0 <= accepted <= rounds <= tokens or not all(map(math.isfinite, sums)):
            raise ValueError("counts of accepted tokens contradict each other")
        if expected is not None and not 0 <= expected <= 1:
            raise ValueError("expected is not a share")
        if rounds >= ROUNDS:
            return cls(accepted / rounds)
        return cls(expected, rounds, accepted, sums[0], tokens, sums[1])

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "over"}

    def round_over(self, accepted: int, chance: float | None = None) -> str | None:
        """The warning, at the round that makes it due.

        accepted: the round's accepted tokens, of at least one that was offered (or watched).
        chance: of its first token by the pair's calibration; None: there is none.
        """
        if self.over:
            return None
        expected = UNKNOWN if self.expected is None else self.expected
        least = expected / HARD if chance is None else chance / MISJUDGED
        self.rounds += 1
        self.tokens += 1 + accepted
        self.accepted += accepted > 0
        self.promised += expected if chance is None else chance
        self.log_ratio += (
            -math.log(HARD) if accepted else math.log((1 - least / HARD) / (1 - least))
        )
        wrong = self.log_ratio >= -math.log(ERROR_RATE)
        self.over = wrong or self.rounds >= ROUNDS
        return self.warning() if wrong else None

    def text_over(self, accepted: Counter[int], offered: Counter[int]) -> str | None:
        """The warning, at the end of the text that makes it due.

        accepted, offered: how many rounds accepted and offered how many tokens. Rounds that offered
        none show nothing. Those that accepted some come first, so that only the whole text counts.
        """
        said = None
        for n in sorted(accepted, reverse=True):
            for _ in range(accepted[n] if n else accepted[0] - offered[0]):
                said = self.round_over(n) or said
        return said

    def warning(self) -> str:
        return (
            f"this drafter does not seem to fit this target: expected for this pair "
            f"{self.promised / self.rounds:.0%} of first drafted tokens accepted, got "
            f"{self.accepted} of {self.rounds} ({self.tokens / self.rounds:.2f} tokens per round); "
            "it may have been trained for another model, or its config.json may be wrong "
            "(rope_theta, method)"
        )

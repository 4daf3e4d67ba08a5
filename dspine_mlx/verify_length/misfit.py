"""Detecting a drafter that loads but does not fit, as opposed to text that is hard to draft.

A drafter with another rope theta, or with two tables swapped, has the right shapes and drafts at
random: almost none of its first drafted tokens are accepted. Hard text on a good pair looks similar
at first, since few drafts are accepted there either.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

ERROR_RATE = 0.01  # share of good pairs that are ever warned about, at most
HARD = 8.0  # factor by which hard text has fewer first tokens accepted than the pair's usual text
MISJUDGED = 4.0  # a calibrated chance may be this many times too high on text unlike its own
UNKNOWN = 0.4  # first tokens accepted where nothing is known: any useful drafter's, on usual text
LEAST = 0.08  # and on hard text
ROUNDS = 192  # a drafter without a warning after so many is taken to fit


@dataclass
class Misfit:
    """A sequential test on each round's first drafted token, which warns at most once.

    Round i's first token is accepted with some chance p_i, given the rounds before it. A pair that
    fits has p_i >= q_i, the least to expect on hard text. A drafter that does not fit typically has
    r_i = q_i / HARD. The likelihood ratio

        M_n = prod_i (r_i / q_i if accepted else (1 - r_i) / (1 - q_i))

    is a supermartingale for every pair that fits, however its rounds depend on each other. So it
    ever reaches 1 / ERROR_RATE with probability ERROR_RATE at most (Ville's inequality; Ramdas et
    al., arXiv:2210.01948).

    expected: the share of first drafted tokens accepted in this pair's texts so far; None: not
    known.
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
        """Read from an earlier process's JSON. Its test continues; a finished one says what to
        expect. ValueError, KeyError or TypeError when it is not a misfit test."""
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
        """Count a round; returns the warning if this round makes it due.

        accepted: the round's accepted tokens, of at least one that was offered (or watched).
        chance: its first token's, by the pair's calibration; None: there is none.
        """
        if self.over:
            return None
        expected = UNKNOWN if self.expected is None else self.expected
        least = LEAST if self.expected is None else expected / HARD
        if chance is not None:
            least = chance / MISJUDGED
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

    def text_over(
        self, drafts: Counter[int], promised: Sequence[tuple[int, float]] = ()
    ) -> str | None:
        """Count a text; returns the warning if this text makes it due.

        drafts: how many of the drafter's own drafts had how many tokens accepted. promised: of
        these, the ones with a calibrated chance: accepted tokens, and that chance. Those that had
        tokens accepted are counted first, so only the whole text counts.
        """
        unknown = drafts - Counter(accepted for accepted, _ in promised)
        counted: list[tuple[int, float | None]] = [
            *promised,
            *((n, None) for n in unknown.elements()),
        ]
        said = None
        for accepted, chance in sorted(counted, key=lambda draft: -draft[0]):
            said = self.round_over(accepted, chance) or said
        return said

    def warning(self) -> str:
        return (
            f"this drafter does not seem to fit this target: expected for this pair "
            f"{self.promised / self.rounds:.0%} of first drafted tokens accepted, got "
            f"{self.accepted} of {self.rounds} ({self.tokens / self.rounds:.2f} tokens per round); "
            "it may have been trained for another model, or its config.json may be wrong "
            "(rope_theta, method)"
        )

"""Which is right where a copy of earlier text and a draft first differ.

If one of them is right, it is the copy with the log-odds

    w_0 + w_1 logit p + w_2 logit c + w_3 log d + w_4 o + w_5 log((1 + r) / (1 + f))

with p the chance of a token copied after such a match, c that of the drafted token, d the drafter's
probability of the copied token, o = 1 where another of the earlier places goes on otherwise, and
r and f how often this token was right and wrong when it was copied in this text. `calibrate` fits
the weights w. INDEPENDENT is what they are if copy and draft know nothing of each other.
"""

import math
from typing import NamedTuple

from dspine_mlx.round.lookup import Copy, Lookup
from dspine_mlx.round.select import Draft

INDEPENDENT = (0.0, 1.0, -1.0, 0.0, 0.0, 0.0)
DRAFTED = 2  # which of them is for the drafted token's chance
LEAST = 1e-4  # chances nearer to 0 or 1 are taken for this near


class Disagreement(NamedTuple):
    """What a text and a greedy draft say of copied tokens."""

    lookup: Lookup
    candidates: list[list[int]]  # [M, K] of each slot
    probs: list[list[float]]  # [M, K] of the candidates, after the drafted tokens before

    @classmethod
    def of(cls, draft: Draft, lookup: Lookup) -> "Disagreement | None":
        """None: the draft was sampled, or comes without its candidates' probabilities."""
        known = draft.evidence
        if draft.q is not None or known is None or known.chances.shape != draft.candidates.shape:
            return None
        return cls(lookup, draft.candidates.tolist(), known.chances.tolist())

    def facts(self, copy: Copy, copied: float, drafted: float) -> list[float]:
        """What the weights are for, of a copy that leaves the draft with its first token; copied,
        drafted: chances of its and the draft's token."""
        token = copy.tokens[0]
        right, wrong = self.lookup.outcomes.get(token, (0, 0))
        likely = dict(zip(self.candidates[copy.after], self.probs[copy.after], strict=True))
        return [
            1.0,
            logit(copied),
            logit(drafted),
            math.log(max(likely.get(token, 0.0), LEAST)),
            float(copy.disputed),
            math.log((1 + right) / (1 + wrong)),
        ]


def logit(chance: float) -> float:
    chance = min(max(chance, LEAST), 1 - LEAST)
    return math.log(chance / (1 - chance))

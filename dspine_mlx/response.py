"""What a generation did, round by round."""

from collections import Counter
from dataclasses import dataclass, field

from mlx_lm.generate import GenerationResponse as PlainResponse


@dataclass
class Statistics:
    """Counts of one generation. A round is a proposal and the verify forward after it."""

    rounds: int = 0
    drafted: int = 0  # tokens that were offered to the target
    accepted: int = 0  # of these, the ones that stood
    accepted_histogram: Counter[int] = field(default_factory=Counter)
    verify_lengths: Counter[int] = field(default_factory=Counter)
    plain: int = 0  # tokens decoded plainly, while drafting was parked
    probes: int = 0  # drafts made meanwhile, only to be compared with the plain tokens
    verdict: str = ""  # why the text was drafted or not, in words; set at its end

    def record(self, drafted: int, accepted: int) -> None:
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_histogram[accepted] += 1
        self.verify_lengths[drafted] += 1

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the target's own included."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0


@dataclass
class GenerationResponse(PlainResponse):
    """mlx-lm's response for one token, with the statistics so far (shared, growing)."""

    statistics: Statistics = field(default_factory=Statistics)

    @property
    def rounds(self) -> int:
        return self.statistics.rounds

    @property
    def drafted(self) -> int:
        return self.statistics.drafted

    @property
    def accepted(self) -> int:
        return self.statistics.accepted

    @property
    def acceptance_length(self) -> float:
        return self.statistics.acceptance_length

    @property
    def verify_lengths(self) -> Counter[int]:
        return self.statistics.verify_lengths

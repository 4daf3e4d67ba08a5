"""What the policy notes of a draft, of a round and of a probe."""

from dataclasses import dataclass, field

import mlx.core as mx

from dspine_mlx.round.accept import acceptance
from dspine_mlx.round.lookup import Copy
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft
from dspine_mlx.verify_length.calibration import Calibration
from dspine_mlx.verify_length.chances import Chances
from dspine_mlx.verify_length.costs import Costs


@dataclass
class Evidence:
    """Calibrated log-odds of a draft's tokens, and of the greedy path's."""

    odds: list[float]
    greedy: list[float]

    @classmethod
    def of(cls, draft: Draft, calibration: Calibration) -> "Evidence":
        """Wait for a draft, and read its evidence."""
        assert draft.evidence is not None
        mx.eval(draft.tokens, draft.evidence, draft.greedy_path)
        odds, path = calibration.block_log_odds(draft.evidence.log_odds()), draft.greedy_path
        return cls(odds, odds if path is None else calibration.block_log_odds(path.log_odds()))


@dataclass
class Round:
    """A round and its outcome, filled in as it goes; without chances if its evidence isn't read."""

    depth: int
    begun: float = 0.0  # the clock when verifying began
    drafting: float = 0.0  # seconds
    chances: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)  # net seconds of each length
    chosen: int = -1  # the length, which a draft filter may cut
    copy: Copy | None = None  # that is offered, after `copy.after` drafted tokens
    drafted: bool = True
    verifying: float = 0.0  # seconds
    offered: int = -1  # until verified
    accepted: int = 0

    @property
    def own(self) -> int:
        """Tokens offered that are the drafter's."""
        return self.offered if self.copy is None else min(self.offered, self.copy.after)

    def seconds(self, costs: Costs) -> float:
        """That it is expected to take."""
        draft = costs.draft(self.depth) if self.drafted else 0.0
        return draft + costs.verify(self.depth)[self.offered]


@dataclass
class Probe:
    """A draft beside plain decoding, and the slot that the next token is compared with."""

    draft: Draft
    slot: int = 0
    tokens: list[int] = field(default_factory=list)
    evidence: Evidence = field(default_factory=lambda: Evidence([], []))

    def compare(
        self, token: int, logprobs: mx.array, chances: Chances, sampler: Sampler | None
    ) -> bool:
        """Learn from the next token, picked from logprobs [V]; whether the draft goes on agreeing.
        sampler: what the draft was drawn with; None: it is greedy."""
        if self.slot == 0:
            self.evidence = Evidence.of(self.draft, chances.calibration)
            self.tokens = self.draft.tokens.tolist()
        slot, agrees = self.slot, self.tokens[self.slot] == token
        accepted = float(agrees)
        if sampler is not None and self.draft.q is not None:
            accepted = self.acceptance(sampler.probs(logprobs[None]))
        chances.update(slot, chances.of(self.evidence.odds)[slot], accepted)
        self.slot += agrees
        return agrees and self.slot < len(self.tokens)

    def acceptance(self, p: mx.array) -> float:
        """The chance that the sampled token of this slot is accepted, where the target's probs are
        p [1, V]."""
        assert self.draft.q is not None
        here = slice(self.slot, self.slot + 1)
        one = Draft(self.draft.tokens[here], self.draft.candidates[here], self.draft.q[here])
        return float(acceptance(one, p).item())

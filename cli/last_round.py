"""The last round of a text, as a table: what was drafted, offered and accepted."""

import math
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import Sampler as SamplerFunction
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.round.lookup import Copy, CopyChances, Lookup
from dspine_mlx.round.policy import Policy
from dspine_mlx.round.select import Draft
from dspine_mlx.round.speculate import copied
from dspine_mlx.round.statistics import Statistics


@dataclass
class LastRound:
    """A policy that leaves all to another one and remembers the last round."""

    policy: Policy
    draft: Draft | None = None
    offered: int = 0
    accepted: int = 0

    @property
    def parked(self) -> bool:
        return self.policy.parked

    @property
    def needs_evidence(self) -> bool:
        return self.policy.needs_evidence

    def start_text(self, statistics: Statistics, sampler: SamplerFunction, depth: int) -> None:
        self.draft = None
        self.policy.start_text(statistics, sampler, depth)

    @property
    def copies(self) -> CopyChances | None:
        return self.policy.copies

    def copy_pays(self, copy: Copy, depth: int, running: int = 0) -> bool:
        return self.policy.copy_pays(copy, depth, running)

    def choose(
        self, draft: Draft, lookup: Lookup | None, limit: int, depth: int, seconds: float
    ) -> tuple[Copy | None, int]:
        copy, length = self.policy.choose(draft, lookup, limit, depth, seconds)
        self.draft = draft if copy is None or draft.copied else copied(copy, draft)
        return copy, length

    def learn(self, accepted: int, offered: int) -> None:
        self.accepted, self.offered = accepted, offered
        self.policy.learn(accepted, offered)

    def probe_due(self, depth: int) -> bool:
        return self.policy.probe_due(depth)

    def start_probe(self, draft: Draft) -> None:
        self.policy.start_probe(draft)

    def plain_token(self, token: int, logprobs: mx.array, waiting: float, depth: int) -> None:
        self.policy.plain_token(token, logprobs, waiting, depth)

    def keeps_context(self, depth: int) -> bool:
        return self.policy.keeps_context(depth)

    def verdict(self, depth: int) -> str:
        return self.policy.verdict(depth)

    def rows(self, tokenizer: TokenizerWrapper) -> list[tuple[str, ...]]:
        """Slot, token, the drafter's own chance for it where it was asked, and its fate."""
        if self.draft is None:
            return []
        tokens = self.draft.tokens.tolist()
        chances = [""] * len(tokens)
        if self.draft.copied is not None and self.copies is not None:
            copied = [f"{c:.0%}, copied" for c in self.copies.of(self.draft.copied)]
            chances = [""] * self.draft.copied.after + copied
        elif self.draft.evidence is not None:
            chances = [f"{chance(x):.0%}" for x in self.draft.evidence.log_odds()]
        return [
            (str(i), repr(tokenizer.decode([token])), chances[i - 1], self.fate(i))
            for i, token in enumerate(tokens, 1)
        ]

    def fate(self, slot: int) -> str:
        if slot > self.offered:
            return "not offered"
        if slot <= self.accepted:
            return "accepted"
        return "rejected" if slot == self.accepted + 1 else "after the rejected one"


def chance(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds)) if log_odds > -700 else 0.0

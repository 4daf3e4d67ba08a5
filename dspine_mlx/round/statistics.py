"""What a generation did, round by round, and how fast."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import GenerationResponse as PlainResponse


@dataclass
class Statistics:
    """Counts of one generation. A round is a proposal and the verify forward after it."""

    rounds: int = 0
    drafted: int = 0  # tokens that were offered to the target
    accepted: int = 0  # of these, the ones that became part of the text
    round_tokens: int = 0  # tokens of the text that rounds made
    accepted_histogram: Counter[int] = field(default_factory=Counter)
    verify_lengths: Counter[int] = field(default_factory=Counter)
    # by accepted tokens: offers, and watched drafts, that were the drafter's alone
    own_drafts: Counter[int] = field(default_factory=Counter)
    plain: int = 0  # tokens decoded without a draft
    lookups: int = 0  # rounds that offered a copy of earlier text
    probes: int = 0  # drafts made while parked, only to be compared with plain tokens
    verdict: str = ""  # why the text was drafted or not, in words; set at its end

    def record(
        self, drafted: int, block: Sequence[tuple[int, Any, bool]], copied: bool = False
    ) -> int:
        """Count a round that offered `drafted` tokens, copied or the drafter's, and made this block
        of text. Returns how many of them were accepted."""
        accepted = sum(from_draft for *_, from_draft in block)
        self.rounds += 1
        self.lookups += copied
        self.drafted += drafted
        self.accepted += accepted
        self.round_tokens += len(block)
        self.accepted_histogram[accepted] += 1
        self.verify_lengths[drafted] += 1
        if drafted and not copied:
            self.own_drafts[accepted] += 1
        return accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the target's own included; 1 before the first round."""
        return self.round_tokens / self.rounds if self.rounds else 1.0


class Speed:
    """Clocks of one text. Decoding starts where prefill ends: when all tokens of the prompt but the
    last are in the caches. The same holds for plain decoding."""

    def __init__(self, callback: Callable[[int, int], None] | None):
        self.callback = callback or (lambda *_: None)
        self.fed = 0
        self.started = self.prefilled = time.perf_counter()

    def progress(self, done: int, total: int) -> None:
        """mlx-lm's prompt_progress_callback, on its way to the user's."""
        self.callback(done, total)
        if done == 0:
            self.started = self.prefilled = time.perf_counter()
        elif done < total:
            self.fed, self.prefilled = done, time.perf_counter()

    @property
    def prompt_tps(self) -> float:
        """Tokens per second of prefill; 0 where there was nothing to feed."""
        return self.fed / (self.prefilled - self.started) if self.fed else 0.0

    def generation_tps(self, tokens: int) -> float:
        return tokens / (time.perf_counter() - self.prefilled)


@dataclass
class GenerationResponse(PlainResponse):
    """mlx-lm's response for one token, with the counts at that time.

    statistics: all counts, shared by a generation's responses and growing until it ends.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_length: float = 1.0
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def verify_lengths(self) -> Counter[int]:
        return self.statistics.verify_lengths

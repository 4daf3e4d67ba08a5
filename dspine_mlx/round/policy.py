"""What generation asks of a policy and tells it, and the simplest one: a fixed length."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
from mlx_lm.sample_utils import Sampler as SamplerFunction

from dspine_mlx.arguments import INT32
from dspine_mlx.errors import InputError
from dspine_mlx.round.lookup import Copy, CopyChances, Lookup
from dspine_mlx.round.select import Draft
from dspine_mlx.round.statistics import Statistics


@runtime_checkable
class Policy(Protocol):
    """What generation asks, and tells. A policy that inherits from it needs `choose` only: it
    learns nothing, and never watches a draft."""

    parked: bool = False  # plain decoding, until further notice
    copies: CopyChances | None = None  # learnt for lookup drafts; None: it wants no lookups

    @property
    def needs_evidence(self) -> bool:
        """Whether the next length depends on the draft's evidence, which then comes with it."""
        return False

    def start_text(self, statistics: Statistics, sampler: SamplerFunction, depth: int) -> None:
        """A new text starts after depth tokens."""
        return

    def copy_pays(self, copy: Copy, depth: int, running: int = 0) -> bool:
        """Whether to offer the copy with nothing drafted: in place of the drafter's usual round, or
        of plain tokens while parked. running: the copy's first tokens that a plain step is making
        already; the round would follow them."""
        return False

    def choose(
        self, draft: Draft, lookup: Lookup | None, limit: int, depth: int, seconds: float
    ) -> tuple[Copy | None, int]:
        """What the round offers: a copy after the draft's first `copy.after` tokens, or None for
        the draft as it is; and how many tokens in all, at most limit. The draft may be a copy that
        pays. seconds were spent on starting it; None for a lookup: there are no copies.

        Of a sampled draft, a copy that replaces tokens may depend on the greedy path and its
        evidence only. One that follows all of them may depend on the tokens.
        """

    def learn(self, accepted: int, offered: int) -> None:
        """Take note of a finished round: how many of the offered tokens were accepted."""
        return

    def probe_due(self, depth: int) -> bool:
        """Whether to draft now, while decoding plainly, only to watch the draft."""
        return False

    def start_probe(self, draft: Draft) -> None:
        """Take a draft to compare with the next plain tokens."""
        return

    def plain_token(self, token: int, logprobs: mx.array, waiting: float, depth: int) -> None:
        """Take note of a plain token; its reader began to wait when the clock read `waiting`."""
        return

    def keeps_context(self, depth: int) -> bool:
        """Whether the drafter's caches are worth keeping up with the text while parked."""
        return True

    def verdict(self, depth: int) -> str:
        """How the text was made, in words."""
        return ""


@dataclass
class Fixed(Policy):
    """Always the same length; 0 is plain decoding. With `copies` every copy is offered; parked, it
    offers nothing else."""

    tokens: int
    parked: bool = False
    needs_evidence: bool = False
    copies: CopyChances | None = None

    def start_text(self, statistics: Statistics, sampler: SamplerFunction, depth: int) -> None:
        self.parked |= self.tokens == 0

    def copy_pays(self, copy: Copy, depth: int, running: int = 0) -> bool:
        return len(copy.tokens) > running

    def choose(
        self, draft: Draft, lookup: Lookup | None, limit: int, depth: int, seconds: float
    ) -> tuple[Copy | None, int]:
        return None, min(self.tokens, limit, len(draft.tokens))


def check_verify_length(value: Any) -> None:
    """`InputError` unless it is "auto", an int from 0 on, or a policy."""
    policy = isinstance(value, Policy) and not isinstance(value, type)
    auto = isinstance(value, str) and value == "auto"
    if not (policy or auto or (type(value) is int and 0 <= value <= INT32)):
        raise InputError(
            f"verify_length is {value!r}; it must be 'auto', a policy, or an int from 0 on"
        )

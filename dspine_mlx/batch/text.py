"""A text among others: what is its own while caches and forwards are shared."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from dspine_mlx.drafters.chain import AnyProposal
from dspine_mlx.round.accept import TargetLogits, accept
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft, select
from dspine_mlx.round.text import Text, Token
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.chances import Chances

T = TypeVar("T")
Sampling: TypeAlias = tuple[float, ...] | None  # settings of a sampler
GREEDY: Sampling = ()


@dataclass(eq=False)
class BatchText:
    """A text of a batch, with the rule that picks its tokens and a random state of its own.

    text: made with the caches that its prompt went into; they are empty while it is in the batch.
    failure: what its own sampler, processors or filter raised. It makes no more tokens then, and
    the others' round goes on.
    """

    text: Text
    left: float  # tokens that may still come
    key: mx.array | None = None  # its random state; None: it draws from `mx.random`'s
    most: float = float("inf")  # drafted tokens that a round may offer
    newest: int = -1  # its newest token, once it is in a batch
    over: bool = False
    failure: Exception | None = None

    def __post_init__(self) -> None:
        slots = self.text.drafter.config.num_proposals
        self.chances = Chances(uncalibrated(slots))
        self.plainly_greedy = self.sampling == GREEDY

    @property
    def anchor(self) -> mx.array:
        """The newest token [1], which has no row yet."""
        return mx.array([self.newest], mx.uint32)

    @cached_property
    def sampling(self) -> Sampling:
        """How it picks from the target's own logits: texts of the same kind are sampled in one
        call. None: by code, draws or processors of its own."""
        s = self.text.sampler
        if s is greedy_sampler and not self.text.processors:
            return GREEDY
        shares = isinstance(s, Sampler) and not s.seeded and s.xtc_probability == 0
        if self.key is not None or self.text.processors or not shares:  # XTC: one coin per call
            return None
        return s.temp, s.top_p, s.min_p, s.min_tokens_to_keep, s.top_k

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Around all that draws: `mx.random` has one state for all, a text with a key brings and
        takes its own."""
        if self.key is None:
            yield
            return
        others = mx.array(mx.random.state[0])
        mx.random.state[0][:] = self.key
        try:
            yield
        finally:
            self.key = mx.array(mx.random.state[0])
            mx.random.state[0][:] = others

    @property
    def draft_temperature(self) -> float | None:
        """What drafts are drawn at, 0 for greedy ones; None: by a rule of the text's own."""
        sampler = self.text.draft_sampler
        if sampler is None:
            return 0.0
        return None if sampler.seeded or sampler.truncates or self.key is not None else sampler.temp

    def select(self, proposal: AnyProposal, with_evidence: bool) -> Draft:
        text = self.text
        with self.drawing():
            kernels = text.drafter.kernels
            return select(proposal, text.draft_sampler, kernels, text.stops, with_evidence)

    def limit(self, draft: Draft) -> int:
        """Tokens of a draft that may be offered; none for the last token."""
        return int(min(len(draft.tokens), self.left - 1, self.most))

    def guarded(self, work: Callable[[], T], instead: T) -> T:
        """Run code of the user's; once it has raised, the text gets `instead`."""
        if self.failure is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001  the user's own code
                self.failure = error
        return instead

    def permitted(self, draft: Draft, length: int) -> int:
        """How many of the draft's first `length` tokens the user's filter lets through."""
        return self.guarded(lambda: self.text.permitted(self.anchor, draft, length), 0)

    def accept(self, draft: Draft, rows: TargetLogits) -> tuple[int, int]:
        with self.drawing():
            return self.guarded(lambda: accept(draft, rows, self.text.sampler), (0, 0))

    def sampled(self, logprobs: mx.array) -> mx.array:
        """The token [1] that the text's own sampler picks from logprobs [1, V]."""
        with self.drawing():
            return self.guarded(lambda: self.text.sampler(logprobs), mx.zeros(1, mx.uint32))

    def processed(self, fed: mx.array, logits: mx.array) -> TargetLogits:
        """Logits [n, V] of the rows of tokens fed [n], under the user's processors."""
        self.text.fed = fed
        return TargetLogits(self.guarded(lambda: self.text.processed(logits), logits))

    @property
    def has_history(self) -> bool:
        """Whether somebody reads the tokens that were fed."""
        return bool(self.text.processors or self.text.draft_filter)

    def take_rows(self, fed: mx.array) -> None:
        """Tokens fed [n] are the text's: it has their rows now."""
        if self.has_history:
            self.text.history = mx.concatenate([self.text.history, fed])

    def go_on(self, block: list[Token]) -> list[Token]:
        """The text grows by a block, whose last token is the next anchor."""
        self.left -= len(block)
        self.over = self.left < 1 or self.text.ends_with(block) or self.failure is not None
        self.newest = block[-1][0]
        return block

    def settle(self) -> None:
        """Hand the newest token back to the text, which leaves the batch."""
        self.text.pending = self.anchor

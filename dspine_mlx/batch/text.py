"""A text among others: what is its own while caches and forwards are shared."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from dspine_mlx.drafters.chain import AnyProposal
from dspine_mlx.round.accept import TargetLogits, accept
from dspine_mlx.round.select import Draft, select
from dspine_mlx.round.text import Text, Token
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.chances import Chances


@dataclass(eq=False)
class BatchText:
    """A text of a batch, with the rule that picks its tokens and a random state of its own.

    text: made with the caches that its prompt went into; they are empty while it is in the batch.
    """

    text: Text
    left: float  # tokens that may still come
    key: mx.array | None = None  # its random state; None: it draws from `mx.random`'s
    most: float = float("inf")  # drafted tokens that a round may offer
    over: bool = False

    def __post_init__(self) -> None:
        slots = self.text.drafter.config.num_proposals
        self.chances = Chances(uncalibrated(slots))

    @property
    def anchor(self) -> mx.array:
        """The newest token [1], which has no row yet."""
        return self.text.anchor

    @property
    def plainly_greedy(self) -> bool:
        """Whether its tokens are the best ones of the target's own logits."""
        return self.text.sampler is greedy_sampler and not self.text.processors

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

    def select(self, proposal: AnyProposal, with_evidence: bool) -> Draft:
        text = self.text
        with self.drawing():
            kernels = text.drafter.kernels
            return select(proposal, text.draft_sampler, kernels, text.stops, with_evidence)

    def limit(self, draft: Draft) -> int:
        """Tokens of a draft that may be offered; none for the last token."""
        return int(min(len(draft.tokens), self.left - 1, self.most))

    def accept(self, draft: Draft, rows: TargetLogits) -> tuple[int, int]:
        with self.drawing():
            return accept(draft, rows, self.text.sampler)

    def processed(self, fed: mx.array, logits: mx.array) -> TargetLogits:
        """Logits [n, V] of the rows of tokens fed [n], under the user's processors."""
        self.text.fed = fed
        return TargetLogits(self.text.processed(logits))

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
        self.over = self.left < 1 or self.text.ends_with(block)
        self.text.pending = mx.array([block[-1][0]], mx.uint32)
        return block

"""What a batch asks of a policy and tells it, and the simplest one: a fixed length."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from dspine_mlx.batch.text import BatchText
from dspine_mlx.round.select import Draft
from dspine_mlx.round.text import Token


class BatchPolicy(Protocol):
    needs_evidence: bool

    @property
    def copies_only(self) -> bool:
        """After `plainly`: whether the next round offers copies, and drafts nothing."""

    def join(self, text: BatchText, texts: int, depth: int) -> None:
        """A text joins; there are so many now."""

    def plainly(self, texts: list[BatchText], depth: int) -> bool:
        """Whether the next step is plain decoding of all texts."""

    def stays_plain(self, texts: list[BatchText], depth: int) -> bool:
        """During a plain step: whether the next one will be plain, too, as far as is known."""

    def reads(self, texts: list[BatchText], depth: int) -> bool:
        """Whether a draft may still need the features of the plain step that is about to start."""

    def keeps_context(self, texts: list[BatchText], depth: int) -> bool:
        """Whether the drafter's caches are worth keeping up with the texts in plain decoding."""

    def drafted(self, texts: list[BatchText], depth: int) -> list[bool]:
        """Whom to draft for in the next round; the others get a token each."""

    def slots(self, texts: list[BatchText], depth: int) -> int:
        """Tokens to draft for each of them, at least 1; known before any is."""

    def lengths(self, texts: list[BatchText], drafts: list[Draft], depth: int) -> list[int]:
        """Drafted tokens to offer, of each text."""

    def choose(
        self, texts: list[BatchText], drafts: list[Draft], depth: int
    ) -> tuple[list[Draft], list[int]]:
        """The drafts to offer, copies in place of some, and how many tokens of each."""

    def learn(
        self,
        texts: list[BatchText],
        lengths: list[int],
        accepted: list[int],
        drafting: float,
        verifying: float,
    ) -> None:
        """A round is over, and took so many seconds."""

    def plain_step(
        self, texts: list[BatchText], tokens: list[Token], seconds: float | None, depth: int
    ) -> None:
        """A step of plain decoding is over, and brought a token for each text; None: its time could
        not be told."""

    def watch(self, texts: list[BatchText], depth: int) -> int | None:
        """After a plain step: whose next draft to make, only to be compared with plain tokens."""

    def watched(self, text: BatchText, draft: Draft, texts: int, depth: int) -> None:
        """It is being made, for one of so many texts."""

    def plain_seconds(self, texts: int, depth: int) -> float | None:
        """What a step of plain decoding takes; None: not known."""

    def verdict(self, text: BatchText) -> str:
        """How a text was made, in words; it is over."""


@dataclass
class FixedLength:
    """The same length for every text; 0 is plain decoding."""

    tokens: int
    needs_evidence: bool = False
    copies_only: ClassVar[bool] = False

    def join(self, text: BatchText, texts: int, depth: int) -> None:
        text.text.lookup = None

    def plainly(self, texts: list[BatchText], depth: int) -> bool:
        return self.tokens == 0

    stays_plain = plainly

    def reads(self, texts: list[BatchText], depth: int) -> bool:
        return True

    def keeps_context(self, texts: list[BatchText], depth: int) -> bool:
        return self.tokens > 0

    def drafted(self, texts: list[BatchText], depth: int) -> list[bool]:
        return [text.most > 0 for text in texts]

    def slots(self, texts: list[BatchText], depth: int) -> int:
        return self.tokens

    def lengths(self, texts: list[BatchText], drafts: list[Draft], depth: int) -> list[int]:
        pairs = zip(texts, drafts, strict=True)
        return [max(0, min(self.tokens, text.limit(draft))) for text, draft in pairs]

    def choose(
        self, texts: list[BatchText], drafts: list[Draft], depth: int
    ) -> tuple[list[Draft], list[int]]:
        return drafts, self.lengths(texts, drafts, depth)

    def learn(
        self,
        texts: list[BatchText],
        lengths: list[int],
        accepted: list[int],
        drafting: float,
        verifying: float,
    ) -> None: ...

    def plain_step(
        self, texts: list[BatchText], tokens: list[Token], seconds: float | None, depth: int
    ) -> None: ...

    def watch(self, texts: list[BatchText], depth: int) -> int | None:
        return None

    def watched(self, text: BatchText, draft: Draft, texts: int, depth: int) -> None: ...

    def plain_seconds(self, texts: int, depth: int) -> float | None:
        return None

    def verdict(self, text: BatchText) -> str:
        return ""

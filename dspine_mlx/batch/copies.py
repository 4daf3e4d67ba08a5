"""Copies of earlier text in a batch (`dspine_mlx.round.lookup`): what they are worth to its rounds.

Each text looks up its own newest tokens. A round offers a copy in place of a draft where it is
expected to bring more tokens, and where copies do without a draft, nothing is drafted. All of this
comes from tokens that the text has, never from drawn ones.
"""

import math
from collections.abc import MutableMapping, Sequence
from itertools import accumulate, pairwise
from operator import mul
from weakref import WeakKeyDictionary

import numpy as np

from dspine_mlx.batch.costs import Steps
from dspine_mlx.batch.prospects import FLOOR
from dspine_mlx.batch.schedule import best, padded
from dspine_mlx.batch.text import BatchText
from dspine_mlx.round.lookup import Copy
from dspine_mlx.round.select import Draft
from dspine_mlx.round.speculate import copied
from dspine_mlx.verify_length.copying import CopyOutcomes


class Copies:
    """The copies of a batch's texts in this round.

    most: tokens of one, at most. offered: the texts whose copy the round offers.
    """

    def __init__(self, most: int):
        self.most, self.copying = most, CopyOutcomes()
        self.found: MutableMapping[BatchText, Copy] = WeakKeyDictionary()
        # with the chances of its tokens
        self.offered: MutableMapping[BatchText, list[float]] = WeakKeyDictionary()

    def join(self, text: BatchText) -> None:
        """Texts learn together how often copies are right. One with a length of its own is not
        copied for, as when it is alone."""
        if text.most != math.inf:
            text.text.lookup = None
        if text.text.lookup is not None:
            text.text.lookup.chances = self.copying.chances

    def look_up(self, texts: list[BatchText]) -> None:
        """Find what followed each text's newest tokens earlier."""
        self.found.clear()
        self.offered.clear()
        for text in texts:
            copy = None if text.text.lookup is None else text.text.lookup.watch()
            tokens = [] if copy is None else copy.tokens[: int(min(self.most, text.left - 1))]
            if copy is not None and tokens:
                self.found[text] = copy._replace(tokens=tokens)

    def survival(self, text: BatchText, running: int = 0) -> list[float]:
        """Of each token of a text's copy past the first `running`, which are being made."""
        if text not in self.found:
            return []
        chances = self.copying.of(self.found[text])
        return list(accumulate(chances, mul))[running:]

    def pay(
        self,
        texts: list[BatchText],
        steps: Steps,
        value: float,
        credits: Sequence[float],
        running: int = 0,
    ) -> bool:
        """Whether a round with copies and nothing drafted gains, a token being worth `value`
        seconds, and leaves every text FLOOR of its plain speed. credits: tokens that each may fall
        behind. running: tokens of each copy that a step makes already."""
        if not self.found:
            return False
        B, rows = len(texts), [self.survival(text, running) for text in texts]
        lengths, fed, tokens = best(padded(rows), lambda n: steps.verify[n // B - 1], value)
        seconds = float(steps.verify[fed // B - 1])
        if not max(lengths) or value * tokens <= seconds:
            return False
        own = np.array([1 + sum(row[:n]) for row, n in zip(rows, lengths, strict=True)])
        return bool((np.array(credits) + own >= FLOOR * seconds / steps.plain).all())

    def beside(self, text: BatchText, survival: list[float]) -> list[float]:
        """The tokens that each further row of a text is expected to bring, by its draft with this
        survival or by its copy, whichever brings more in so many rows."""
        copy = self.survival(text)
        if not copy:
            return survival
        rows = range(1 + max(len(survival), len(copy)))
        brought = [max(sum(survival[:n]), sum(copy[:n])) for n in rows]
        return [after - before for before, after in pairwise(brought)]

    def put_in(
        self,
        texts: list[BatchText],
        drafts: list[Draft],
        lengths: list[int],
        survival: list[list[float]],
    ) -> tuple[list[Draft], list[int]]:
        """Put copies in place of the drafts with this survival that bring fewer tokens in so many
        rows: the drafts, and how many tokens of each to offer."""
        offered = list(drafts)
        for i, (text, own, length) in enumerate(zip(texts, survival, lengths, strict=True)):
            copy = self.survival(text)[:length]
            if sum(copy) > sum(own[:length]):
                self.offered[text] = self.copying.of(self.found[text])
                offered[i], own = copied(self.found[text]), copy
            lengths[i] = min(length, len(own))
        return offered, lengths

    def has(self, text: BatchText) -> bool:
        """Whether the round offers a text's copy."""
        return text in self.offered

    def learn(self, text: BatchText, length: int, accepted: int) -> None:
        """A round offered so many tokens of a text's copy."""
        chances, known = self.copying.offered, self.offered[text]
        for slot in range(min(length, accepted + 1)):
            chances.update(slot, known[slot], float(slot < accepted))
        chances.round_over()

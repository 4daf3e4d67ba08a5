"""Texts that share forwards: they join and leave between rounds."""

from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.batch.draft_contexts import DraftContexts
from dspine_mlx.batch.target_rows import TargetRows
from dspine_mlx.batch.text import BatchText
from dspine_mlx.drafters.chain import AnyProposal
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.round.select import Draft


class Ahead(NamedTuple):
    """A step of plain decoding that runs before the tokens it is fed have been read."""

    fed: mx.array  # [B]
    tokens: mx.array  # [B] that follow
    logprobs: list[mx.array]  # [V] of each text
    features: mx.array  # [B, 1, m*d]
    keys: list[mx.array | None]  # random states of the texts before it
    started: float  # the clock's reading

    def keep(self, texts: list[int]) -> "Ahead":
        at = mx.array(texts)
        rows, keys = [self.logprobs[i] for i in texts], [self.keys[i] for i in texts]
        return Ahead(self.fed[at], self.tokens[at], rows, self.features[at], keys, self.started)


class Batch:
    """The texts, the target's and the drafter's caches of all of them, and forwards over them.

    ahead: a plain step that has been started; whoever does something else takes it back.
    """

    def __init__(self, drafter: Drafter):
        self.drafter, self.texts = drafter, list[BatchText]()
        self.clear()

    def clear(self) -> None:
        """Caches without a text."""
        self.ahead: Ahead | None = None
        model, widest = self.drafter.target.model, 1 + self.drafter.config.num_proposals
        self.target = TargetRows(model, make_prompt_cache(model), widest)
        self.context = DraftContexts(self.drafter)

    @property
    def anchors(self) -> mx.array:
        """The newest token [B] of each text."""
        return mx.concatenate([text.anchor for text in self.texts])

    @property
    def depth(self) -> int:
        """Positions of the longest text, to which all rows of keys are padded."""
        return self.target.lengths.longest

    def join(self, text: BatchText) -> None:
        """Move a prefilled text in."""
        self.cancel()
        own = text.text
        self.context.join(own.context.cache)
        self.target.join(own.cache)
        mx.eval([c.state for c in self.context.cache])
        for cache in own.context.cache:
            cache.trim(cache.offset)
            cache.keys = cache.values = None
        own.checkpoint()
        self.texts.append(text)

    def leave(self, text: BatchText, with_caches: bool = False) -> list[Any] | None:
        """A text leaves; if asked for, with its caches of mlx-lm's classes, the target's and then
        the drafter's. They hold all of the text, also its newest token."""
        at = self.texts.index(text)
        if with_caches:
            self.cancel()
        caches = self.extract(at) if with_caches else None
        staying = [i for i in range(len(self.texts)) if i != at]
        self.texts.pop(at)
        if staying:
            self.target.keep(staying)
            self.context.keep(staying)
            self.ahead = self.ahead and self.ahead.keep(staying)
        else:
            self.clear()
        return caches

    def cancel(self) -> None:
        """Take back a step that was started ahead."""
        if self.ahead is not None:
            self.target.cancel()
            for text, key in zip(self.texts, self.ahead.keys, strict=True):
                text.key = key
            self.ahead = None

    def extract(self, at: int) -> list[Any]:
        self.context.catch_up()
        own, context = self.target.extract(at), self.context.extract(at)
        target, taps = self.drafter.target, self.drafter.config.target_layer_ids
        _, features = target.forward(self.texts[at].anchor, own, taps)
        self.drafter.extend(features, context)
        mx.eval([c.state for c in [*own, *context]])
        return [*own, *context]

    def propose(self) -> list[AnyProposal]:
        """One forward of the drafter for all texts."""
        self.cancel()
        return self.context.propose(self.anchors)

    def verify(self, drafts: list[Draft], length: int) -> tuple[mx.array, mx.array]:
        """One forward of the target over every text's anchor and the first tokens of its draft:
        the tokens fed [B, 1 + length], and their logits [B, 1 + length, V]."""
        anchors = self.anchors[:, None]
        drafted = mx.stack([draft.tokens[:length] for draft in drafts]).astype(anchors.dtype)
        fed = mx.concatenate([anchors, drafted], axis=1)
        return fed, self.feed(fed, eager_taps=True)

    def feed(self, tokens: mx.array, eager_taps: bool = False) -> mx.array:
        """The target's logits [B, n, V] after each of the tokens [B, n]."""
        target, taps = self.drafter.target, self.drafter.config.target_layer_ids
        kernels = target.verify_kernels
        with self.target.verifying(tokens.shape[1]), kernels.verifying(tokens.size):
            logits, self.features = target.forward(tokens, self.target.caches, taps, eager_taps)
        return logits

    def accept(self, rows: list[int]) -> None:
        """The first rows[i] >= 1 of the rows just fed belong to text i."""
        self.target.accept(rows)
        self.context.add(self.features[:, : max(rows)], rows)

"""Texts that share forwards: they join and leave between rounds."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.batch.draft_contexts import DraftContexts
from dspine_mlx.batch.select import nothing, select_texts
from dspine_mlx.batch.target_rows import TargetRows
from dspine_mlx.batch.text import BatchText
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.round.draft_context import DraftContext
from dspine_mlx.round.lookup import COPIED
from dspine_mlx.round.select import Draft
from dspine_mlx.round.text import Text

PADDING = 1.5  # times the room that its texts would take alone, a group's keys may take
SHORT = 1024  # positions up to which texts share a group, however different


class Ahead(NamedTuple):
    """A step of plain decoding that runs before the tokens it is fed have been read."""

    fed: mx.array  # [B]
    tokens: mx.array  # [B] that follow
    logprobs: list[mx.array]  # [V] of each text
    features: mx.array | None  # [B, 1, m*d]; None: nobody will read them
    keys: list[mx.array | None]  # random states of the texts before it
    started: float  # the clock's reading when it began

    def keep(self, texts: list[int]) -> "Ahead":
        at = mx.array(texts)
        rows, keys = [self.logprobs[i] for i in texts], [self.keys[i] for i in texts]
        features = None if self.features is None else self.features[at]
        return Ahead(self.fed[at], self.tokens[at], rows, features, keys, self.started)


class Group:
    """Texts of about one depth, whose keys lie in common arrays: one forward serves them.

    drafted: the texts that are drafted for, in the order of `context`. Of the others the drafter
    keeps the prompt and the newest rows, in a context of each text's own.
    """

    def __init__(self, drafter: Drafter):
        model, widest = drafter.target.model, 1 + (drafter.config.num_proposals or COPIED)
        self.target = TargetRows(model, make_prompt_cache(model), widest)
        self.context = DraftContexts(drafter)
        self.drafted: list[int] = []

    @property
    def lengths(self) -> list[int]:
        """Positions of each text."""
        return self.target.lengths.host

    def takes(self, length: int) -> bool:
        """Whether one more text of this length leaves the padding in bounds."""
        lengths = [*self.lengths, length]
        longest = max(lengths)
        return longest <= SHORT or len(lengths) * longest <= PADDING * sum(lengths)

    def join(self, text: Text) -> None:
        self.include(len(self.lengths), text.context)
        self.target.join(text.cache)
        text.checkpoint()

    def include(self, text: int, own: DraftContext) -> None:
        """Draft for a text from now on."""
        self.context.join(own.cache)
        self.drafted.append(text)
        mx.eval([c.state for c in self.context.cache])
        for cache in own.cache:
            cache.trim(cache.offset)
            cache.keys = cache.values = None

    def draft_for(self, wanted: list[bool], contexts: list[DraftContext]) -> None:
        """Draft for these texts only; contexts: each text's own."""
        staying = [k for k, text in enumerate(self.drafted) if wanted[text]]
        if len(staying) < len(self.drafted):
            for k, text in enumerate(self.drafted):
                if not wanted[text]:
                    contexts[text].keeps_up = lambda depth: False
                    self.context.put_apart(k, contexts[text])
            self.context.keep(staying)
            self.drafted = [self.drafted[k] for k in staying]
        for text in range(len(wanted)):
            if wanted[text] and text not in self.drafted:
                contexts[text].catch_up()
                self.include(text, contexts[text])

    def own_context(self, text: int, own: DraftContext) -> DraftContext:
        """A text's context: its own one, or a copy of its part of the shared one."""
        if text not in self.drafted:
            return own
        drafter = self.context.drafter
        copied = DraftContext(drafter, drafter.make_cache())
        self.context.put_apart(self.drafted.index(text), copied)
        return copied

    def draft(self, texts: list[BatchText], slots: int | None, with_evidence: bool) -> list[Draft]:
        """A draft of each text; of those that are not drafted for, an empty one."""
        drafts = [nothing() for _ in texts]
        if self.drafted:
            own, kernels = [texts[i] for i in self.drafted], self.context.drafter.kernels
            anchors = mx.array([text.newest for text in own], mx.uint32)
            proposals = self.context.propose(anchors, slots)
            found = select_texts(own, proposals, kernels, with_evidence)
            for text, draft in zip(self.drafted, found, strict=True):
                drafts[text] = draft
        return drafts

    def add(
        self,
        features: mx.array,
        rows: list[int],
        contexts: list[DraftContext],
        keeps_up: Callable[[], bool],
    ) -> None:
        """Queue features [B, n, m*d] of each text's new rows, for later drafts."""
        drafted = self.drafted
        if drafted:
            shared = features if drafted == list(range(len(rows))) else features[mx.array(drafted)]
            self.context.add(shared, [rows[text] for text in drafted], keeps_up)
        if len(drafted) < len(rows):
            for text in set(range(len(rows))).difference(drafted):
                contexts[text].add(features[text : text + 1, : rows[text]], self.lengths[text])

    def keep(self, texts: list[int]) -> None:
        """Only these texts stay."""
        self.target.keep(texts)
        staying = [k for k, text in enumerate(self.drafted) if text in texts]
        self.context.keep(staying)
        self.drafted = [texts.index(self.drafted[k]) for k in staying]


class Batch:
    """The texts, the target's and the drafter's caches of all of them, and forwards over them.

    texts: ordered by group. A forward runs once per group, which are few: each but the first has a
    text that the others' keys would have been padded for.
    ahead: a plain step that has been started; whoever does something else takes it back.
    """

    def __init__(self, drafter: Drafter):
        self.drafter, self.texts = drafter, list[BatchText]()
        self.groups: list[Group] = []
        self.ahead: Ahead | None = None
        self.features: mx.array | None = None  # [B, n, m*d] of the newest forward, if they are read

    @property
    def anchors(self) -> mx.array:
        """The newest token [B] of each text."""
        return mx.array([text.newest for text in self.texts], mx.uint32)

    @property
    def depth(self) -> int:
        """Positions that rows of keys are padded to; with several groups, on average."""
        slots = [len(g.lengths) * g.target.lengths.longest for g in self.groups]
        return sum(slots) // max(1, len(self.texts))

    @property
    def parts(self) -> list[tuple[Group, slice]]:
        """The groups, and where their texts are among all."""
        ends = list(accumulate((len(group.lengths) for group in self.groups), initial=0))
        return [(g, slice(*ends[i : i + 2])) for i, g in enumerate(self.groups)]

    def place(self, at: int) -> tuple[Group, int]:
        """The group of a text, and its index there."""
        return next((g, at - part.start) for g, part in self.parts if at < part.stop)

    def join(self, text: BatchText) -> None:
        """Move a prefilled text in."""
        self.cancel()
        length, text.newest = text.text.position, int(text.text.anchor.item())
        group = next((group for group in self.groups if group.takes(length)), None)
        if group is None:
            group = Group(self.drafter)
            self.groups.append(group)
        end = next(part.stop for g, part in self.parts if g is group)
        group.join(text.text)
        self.texts.insert(end, text)

    def leave(
        self, text: BatchText, with_caches: bool = False, with_newest: bool = True
    ) -> list[Any] | None:
        """A text leaves; if asked for, with its caches of mlx-lm's classes, the target's and then
        the drafter's. They hold all of the text, its newest token only if with_newest."""
        at = self.texts.index(text)
        if with_caches:
            self.cancel()
        caches = self.extract(at, with_newest) if with_caches else None
        group, own = self.place(at)
        staying = [i for i in range(len(group.lengths)) if i != own]
        if staying:
            group.keep(staying)
        else:
            self.groups.remove(group)
        self.texts.pop(at).settle()
        if self.ahead is not None:
            others = [i for i in range(len(self.texts) + 1) if i != at]
            self.ahead = self.ahead.keep(others) if others else None
        return caches

    def cancel(self) -> None:
        """Take back a step that was started ahead."""
        if self.ahead is not None:
            for group in self.groups:
                group.target.cancel()
            for text, key in zip(self.texts, self.ahead.keys, strict=True):
                text.key = key
            self.ahead = None

    def extract(self, at: int, with_newest: bool) -> list[Any]:
        group, index = self.place(at)
        own = group.target.extract(index)
        if index in group.drafted:
            group.context.catch_up()
            context = group.context.extract(group.drafted.index(index))
        else:
            context = self.texts[at].text.context.cache
            self.texts[at].text.context.catch_up()
        if with_newest:
            target, taps = self.drafter.target, self.drafter.config.target_layer_ids
            _, features = target.forward(self.texts[at].anchor, own, taps)
            self.drafter.extend(features, context)
        mx.eval([c.state for c in [*own, *context]])
        return [*own, *context]

    def contexts(self, part: slice) -> list[DraftContext]:
        return [text.text.context for text in self.texts[part]]

    def draft_for(self, drafted: list[bool]) -> None:
        """Draft for these texts only. What is not taken in yet of many rows is taken in now."""
        for group, part in self.parts:
            group.draft_for(drafted[part], self.contexts(part))
            if group.context.waiting > self.drafter.config.block_size:
                group.context.catch_up()
                mx.eval([c.state for c in group.context.cache])

    def draft(self, slots: int | None, with_evidence: bool) -> list[Draft]:
        """One forward of the drafter for all texts that are drafted for, over blocks that propose
        so many tokens; None: all that it can. Nothing is evaluated here."""
        self.cancel()
        if not self.drafter.config.causal_block:
            slots = None
        parts = [group.draft(self.texts[part], slots, with_evidence) for group, part in self.parts]
        return [draft for part in parts for draft in part]

    def watch(self, at: int) -> Draft:
        """A draft for one text, made after the step ahead; the text goes on as if there were
        none."""
        text, (group, index) = self.texts[at], self.place(at)
        context = group.own_context(index, text.text.context)
        proposal = context.propose(text.anchor, self.drafter.no_features())
        key = text.key
        if self.ahead is not None:
            text.key = self.ahead.keys[at]  # that the next token is drawn with
        draft = text.select(proposal, with_evidence=True)
        text.key = key
        mx.async_eval(draft.tokens, draft.evidence, draft.greedy_path)
        return draft

    def verify(self, drafts: list[Draft], length: int) -> tuple[mx.array, mx.array]:
        """One forward of the target over every text's anchor and the first tokens of its draft:
        the tokens fed [B, 1 + length], and their logits [B, 1 + length, V]."""
        rows = []
        for text, draft in zip(self.texts, drafts, strict=True):
            tokens = draft.tokens.tolist()[:length]
            rows.append([text.newest, *tokens, *[0] * (length - len(tokens))])
        fed = mx.array(rows, mx.uint32)
        return fed, self.feed(fed, eager_taps=True)

    def feed(self, tokens: mx.array, eager_taps: bool = False, tapped: bool = True) -> mx.array:
        """The target's logits [B, n, V] after each of the tokens [B, n]. tapped: whether features
        are read for the drafter."""
        target, parts = self.drafter.target, []
        taps = self.drafter.config.target_layer_ids if tapped else ()
        for group, part in self.parts:
            own, rows = tokens[part], group.target
            with rows.verifying(own.shape[1]), target.verify_kernels.verifying(own.size):
                parts.append(target.forward(own, rows.caches, taps, eager_taps))
        logits, features = zip(*parts, strict=True)
        self.features = joined(features) if tapped else None
        return joined(logits)

    def accept(self, rows: list[int], keeps_up: Callable[[], bool] = lambda: True) -> None:
        """The first rows[i] >= 1 of the rows just fed belong to text i; keeps_up: whether the
        drafter should take in a long backlog of them."""
        for group, part in self.parts:
            own = rows[part]
            group.target.accept(own)
            if self.features is not None:
                group.add(self.features[part, : max(own)], own, self.contexts(part), keeps_up)


def joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)

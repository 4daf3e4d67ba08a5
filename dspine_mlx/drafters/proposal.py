"""A drafter's proposal for one block, as selection takes it: the interface of all drafters."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.top_k import rank, scale_scores, shortlist
from dspine_mlx.metal.kernel import OFF, Kernels
from dspine_mlx.metal.walk import Scale, walk


class Proposal(NamedTuple):
    """M slots with K candidates each, and the scores of each pair of neighbours. Of several texts
    all arrays have a leading axis."""

    candidates: mx.array  # [M, K] token ids in descending base logit
    first: mx.array  # [K] float32 scores of slot 1's candidates given the anchor
    transitions: mx.array  # [M - 1, K, K] float32, T_t[i, j]: j of slot t after i of slot t - 1
    # [M, K] the chance that slot t is accepted if t - 1 is, with candidate i
    confidence: mx.array | None = None

    def ranked(self) -> "Proposal":
        """Itself: its candidates are ranked."""
        return self

    def texts(self) -> list["Proposal"]:
        """Of several texts: one for each."""
        parts = zip(*(x for x in self if x is not None), strict=True)
        return [Proposal(*own) for own in parts]

    def paths(
        self,
        noises: list[mx.array],
        scale: Scale,
        reshape: Callable[[mx.array], mx.array] | None = None,
        kernels: Kernels = OFF,
    ) -> list[tuple[mx.array, mx.array]]:
        """Walk by argmax(scores + noise), for each noise [M, K]. Returns the indices [M] of
        candidates, and the probs softmax(scale * scores) [M, K] of each slot on the way.

        reshape: applied first to the scores [n, K] of one text.
        """
        first, transitions = self.first, self.transitions
        if reshape is not None:
            rows = mx.concatenate([first[None], transitions.reshape(-1, first.size)])
            rows = reshape(rows)
            first, transitions = rows[0], rows[1:].reshape(transitions.shape)
        return [walk(first, transitions, noise, scale, kernels) for noise in noises]

    def confidence_on(self, path: mx.array) -> mx.array | None:
        """[M] the chance that each slot of a path [M] is accepted if the one before is."""
        if self.confidence is None:
            return None
        before = mx.concatenate([mx.zeros_like(path[..., :1]), path[..., :-1]], axis=-1)
        return mx.take_along_axis(self.confidence, before[..., None], axis=-1)[..., 0]


@dataclass(frozen=True)
class SlotwiseProposal:
    """M slots that each pick on their own. Candidates are ranked only on demand; a greedy draft
    needs none. Of several texts all arrays but the vocabulary have a leading axis."""

    config: DrafterConfig
    logits: mx.array  # [M, Vd] of the drafter's head
    vocabulary: mx.array | None = None  # [Vd] the target's ids of the head's rows; None: all
    confidence: mx.array | None = None  # [M] the chance that slot t is accepted if t - 1 is

    def texts(self) -> list["SlotwiseProposal"]:
        """Of several texts: one for each."""
        known = [None] * len(self.logits) if self.confidence is None else self.confidence
        pairs = zip(self.logits, known, strict=True)
        return [replace(self, logits=logits, confidence=own) for logits, own in pairs]

    def tokens(self, ids: mx.array) -> mx.array:
        """Map rows of the head to the target's token ids."""
        return ids if self.vocabulary is None else self.vocabulary[ids]

    def greedy_tokens(self) -> mx.array:
        """Ids [M] of the best tokens."""
        return self.tokens(mx.argmax(self.logits, axis=-1))

    def probs(self) -> mx.array:
        """Probs [M, K] of the slots' K candidates, in no order."""
        K = self.config.top_k
        values = shortlist(self.flat, K)[0]
        top = mx.partition(values, -K, axis=-1)[:, -K:] if values.shape[1] > K else values
        return self.of_slots(mx.softmax(scale_scores(top, self.config), axis=-1))

    def ranked(self) -> Proposal:
        """The same as a table, T_t[i, j] = U_t(v_j)."""
        ids, scores = map(self.of_slots, rank(self.flat, self.config))
        *texts, M, K = scores.shape
        table = mx.broadcast_to(scores[..., 1:, None, :], (*texts, M - 1, K, K))
        confidence = self.confidence
        if confidence is not None:
            confidence = mx.broadcast_to(confidence[..., None], scores.shape)
        return Proposal(self.tokens(ids), scores[..., 0, :], table, confidence)

    @property
    def flat(self) -> mx.array:
        """The logits of all slots of all texts [n, Vd]."""
        return self.logits.reshape(-1, self.logits.shape[-1])

    def of_slots(self, rows: mx.array) -> mx.array:
        """Rows [n, K] of all slots of all texts, as the logits have them."""
        return rows.reshape(*self.logits.shape[:-1], -1)

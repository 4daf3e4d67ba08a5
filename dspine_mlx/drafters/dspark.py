"""DSpark: a Markov head over the parallel backbone, and a confidence head.

The heads are DeepSpec's: a block of B slots starts with the anchor, whose slot makes the first of B
proposals. Slot t scores token v after token u as U_t(v) + B_t(u, v), of which only the K base
candidates of both slots are kept, so the proposal is a K x K table as in DSpine.
"""

from collections.abc import Collection
from copy import copy

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from dspine_mlx.drafters.chain import AnyProposal, shared_pool
from dspine_mlx.drafters.config import DSparkConfig
from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.markov_walk import MarkovProposal
from dspine_mlx.drafters.proposal import Proposal
from dspine_mlx.drafters.top_k import rank, scale_scores
from dspine_mlx.metal.kernel import OFF, Kernels, Lookup
from dspine_mlx.metal.markov import markov_scores
from dspine_mlx.target.model import Target


class VanillaMarkov(nn.Module):
    """B_t(u, v) = w2[v] . w1[u]

    Both matrices are read by rows only, so both are embeddings.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Embedding(config.num_draft_tokens, config.markov_rank)

    def __call__(
        self, base: mx.array, previous: mx.array, successors: mx.array, states: mx.array
    ) -> mx.array:
        """The table [M, K, K]: base [M, K] plus the bias of each candidate after each predecessor.

        previous: [M, K, r], w1 of the predecessors; successors: [M, K, r], w2 of the candidates;
        states: [M, d] normalised.
        """
        mixed = self.mix(
            previous, mx.broadcast_to(states[:, None], (*base.shape, states.shape[-1]))
        )
        return base[:, None] + bias(mixed, successors)

    def mix(self, previous: mx.array, states: mx.array) -> mx.array:
        return previous

    def step(
        self, previous: mx.array, states: mx.array, memory: mx.array
    ) -> tuple[mx.array, mx.array]:
        """See `dspine_mlx.drafters.markov_walk.MarkovHead`."""
        return self.mix(previous, states), memory


class GatedMarkov(VanillaMarkov):
    """B_t(u, v) = w2[v] . (sigmoid(G [h_t; w1[u]] + g) * w1[u])"""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        rank = config.markov_rank
        self.gate_proj = nn.Linear(config.hidden_size + rank, rank)

    def mix(self, previous: mx.array, states: mx.array) -> mx.array:
        gate = mx.sigmoid(self.gate_proj(mx.concatenate([states, previous], axis=-1)))
        return gate * previous


class RNNMarkov(VanillaMarkov):
    """B_t(v) = w2[v] . tanh(o),  s_t = g s_{t-1} + (1 - g) tanh(c)

    with [g; c; o] = J [s_{t-1}; w1[u]; h_t] + j, a sigmoid on g, and s_0 = 0. The state depends on
    the whole path, so a table follows the greedy one: row i of slot t is exact for a path that is
    greedy up to slot t - 2 and has candidate i at t - 1.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        rank = config.markov_rank
        self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def __call__(
        self, base: mx.array, previous: mx.array, successors: mx.array, states: mx.array
    ) -> mx.array:
        M, K, rank = previous.shape
        state, visited, table = mx.zeros((rank,), previous.dtype), mx.array(0), []
        for t in range(M):
            shared = [mx.broadcast_to(x, (K, x.shape[-1])) for x in (state, states[t])]
            joint = self.joint_proj(mx.concatenate([shared[0], previous[t], shared[1]], axis=-1))
            gate, candidate, output = mx.split(joint, 3, axis=-1)
            gate = mx.sigmoid(gate)
            rows = base[t] + bias(mx.tanh(output), successors[t])
            state = (gate * state + (1 - gate) * mx.tanh(candidate))[visited]
            visited = mx.argmax(rows[visited])
            table.append(rows)
        return mx.stack(table)

    def step(
        self, previous: mx.array, states: mx.array, memory: mx.array
    ) -> tuple[mx.array, mx.array]:
        joint = self.joint_proj(mx.concatenate([memory, previous, states], axis=-1))
        gate, candidate, output = mx.split(joint, 3, axis=-1)
        gate = mx.sigmoid(gate)
        return mx.tanh(output), gate * memory + (1 - gate) * mx.tanh(candidate)


MARKOV_HEADS = {"vanilla": VanillaMarkov, "gated": GatedMarkov, "rnn": RNNMarkov}


def bias(mixed: mx.array, successors: mx.array) -> mx.array:
    return (mixed @ successors.swapaxes(-1, -2)).astype(mx.float32)


class ConfidenceHead(nn.Module):
    """c_t = sigmoid(w [h_t; w1[u]] + b), the chance that slot t stands given that t - 1 did."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        token = config.markov_rank if config.confidence_head_with_markov else 0
        self.proj = nn.Linear(config.hidden_size + token, 1)

    def __call__(self, features: mx.array) -> mx.array:
        """Logits of c [...] from features [..., d + r] or [..., d]."""
        return self.proj(features)[..., 0].astype(mx.float32)


class DSpark(DFlash):
    config: DSparkConfig

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        if config.markov_rank:
            self.markov_head = MARKOV_HEADS[config.markov_head_type](config)
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(config)
        if config.num_draft_tokens < config.vocab_size:
            self.lm_head = nn.Linear(config.hidden_size, config.num_draft_tokens, bias=False)

    def add_ends(self, paths: Collection[str]) -> None:
        """Make room for a checkpoint's own embedding and head, where its parameters name them."""
        config = self.config
        if "embed_tokens.weight" in paths:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if "lm_head.weight" in paths:
            self.lm_head = nn.Linear(config.hidden_size, config.num_draft_tokens, bias=False)

    def with_ends(self, target: Target) -> Target:
        """The target's embedding and head, except where the checkpoint has ones that differ."""
        ends = copy(target)
        if "embed_tokens" in self:
            if equal(self.embed_tokens, target.embed):
                del self.embed_tokens
            else:
                ends.embed = self.embed_tokens
        if "lm_head" in self:
            if equal(self.lm_head, target.lm_head):
                del self.lm_head
            else:
                ends.lm_head, ends.tied = self.lm_head, False
        return ends

    def propose(
        self,
        anchor: int | mx.array,
        features: mx.array,
        cache: list[KVCache],
        target: Target,
        kernels: Kernels = OFF,
    ) -> AnyProposal:
        """Propose M tokens after the anchor. See `Drafter.propose`.

        Slot t scores v after u as U_t(v) + B_t(u, v): over a pool of `candidate_pool` tokens,
        walked slot by slot, or if that is 0 over the `top_k` best base candidates of both slots, as
        a table.
        """
        anchor = mx.array(anchor)
        states = self.backbone(anchor, features, cache, target)
        logits = target.head(states)
        if "markov_head" not in self:
            return self.slotwise(logits, self.confidence(states))
        if self.config.candidate_pool:
            base = scale_scores(logits, self.config)
            pool = shared_pool(base, self.config.candidate_pool)
            vocabulary = self.d2t if "d2t" in self else None
            return MarkovProposal(
                self.markov_head, base, states, anchor, vocabulary, pool, self.confidence
            )
        return self.table(anchor, states, logits, kernels)

    def table(
        self, anchor: mx.array, states: mx.array, logits: mx.array, kernels: Kernels = OFF
    ) -> Proposal:
        """T_t[i, j] = U_t(v_j) + B_t(v_i, v_j), and the confidence of every slot after each
        candidate of the one before."""
        ids, scores = rank(logits, self.config)
        candidates = self.tokens(ids)
        before = mx.broadcast_to(anchor.reshape(1, 1), (1, ids.shape[1])).astype(candidates.dtype)
        before = mx.concatenate([before, candidates[:-1]])
        table = self.markov_table(scores, before, ids, states, kernels)
        over = mx.broadcast_to(states[:, None], (*ids.shape, states.shape[-1]))
        confidence = self.confidence(over, self.markov_head.markov_w1(before))
        return Proposal(candidates, table[0, 0], table[1:], confidence)

    def markov_table(
        self,
        base: mx.array,
        before: mx.array,
        ids: mx.array,
        states: mx.array,
        kernels: Kernels = OFF,
    ) -> mx.array:
        """The Markov head's table [M, K, K] after predecessors `before` [M, K]; that of an unpacked
        vanilla head takes one launch where kernels run."""
        head = self.markov_head
        w1, w2 = head.markov_w1, head.markov_w2
        if type(head) is VanillaMarkov and "scales" not in w1 and "scales" not in w2:
            predecessors, successors = Lookup(before, w1.weight), Lookup(ids, w2.weight)
            return markov_scores(base, predecessors, successors, kernels)
        return head(base, w1(before), w2(ids), states)

    def confidence(self, features: mx.array, previous: mx.array | None = None) -> mx.array | None:
        """Chances [M, ...] of every slot, of its states [M, ..., d] and, if they count, w1 of the
        tokens before it [M, ..., r]; None without a head."""
        if "confidence_head" not in self:
            return None
        if previous is not None and self.config.confidence_head_with_markov:
            features = mx.concatenate([features, previous], axis=-1)
        logits = self.confidence_head(features)
        if self.config.confidence_temperatures:
            temperatures = mx.array(self.config.confidence_temperatures)
            logits = logits / temperatures.reshape(-1, *[1] * (logits.ndim - 1))
        return mx.sigmoid(logits)


def equal(own: nn.Module, shared: nn.Module) -> bool:
    """Whether two modules hold the same weight, neither packed."""
    if "scales" in own or "scales" in shared or own.weight.shape != shared.weight.shape:
        return False
    return mx.array_equal(own.weight, shared.weight).item()

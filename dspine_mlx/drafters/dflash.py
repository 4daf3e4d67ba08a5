"""DFlash: one parallel forward fills a whole block (arXiv:2602.06036).

A block is the anchor x_0 followed by masks. The target's features of all positions before the
anchor enter every draft layer as extra keys and values, kept in a cache from round to round.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from dspine_mlx.drafters.chain import ChainProposal
from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.errors import InputError
from dspine_mlx.metal.kernel import OFF, Kernels
from dspine_mlx.metal.walk import walk
from dspine_mlx.target.model import Target


class Proposal(NamedTuple):
    """What a drafter hands to selection, for one block of M slots with K candidates each."""

    candidates: mx.array  # [M, K] token ids in descending base logit
    first: mx.array  # [K] float32 scores of slot 1's candidates given the anchor
    transitions: mx.array  # [M - 1, K, K] float32, T_t[i, j]: j of slot t after i of slot t - 1
    confidence: mx.array | None = None  # [M, K] that slot t stands given candidate i of t - 1

    def ranked(self) -> "Proposal":
        """Itself: its candidates are ranked."""
        return self

    def paths(
        self,
        noises: list[mx.array],
        scale: float,
        reshape: Callable[[mx.array], mx.array] | None = None,
        kernels: Kernels = OFF,
    ) -> list[tuple[mx.array, mx.array]]:
        """The walk that argmax(scores + noise) takes, for each noise [M, K]: indices [M] of
        candidates, and the probs softmax(scale * scores) [M, K] of each slot that it met.

        reshape: applied to the scores [n, K] first.
        """
        first, transitions = self.first, self.transitions
        if reshape is not None:
            rows = mx.concatenate([first[None], transitions.reshape(-1, first.size)])
            rows = reshape(rows)
            first, transitions = rows[0], rows[1:].reshape(transitions.shape)
        walks = (walk(first, transitions, noise, scale, kernels) for noise in noises)
        return [(path, probs) for path, probs in walks]

    def confidence_on(self, path: mx.array) -> mx.array | None:
        """[M] the chance that each slot of a path [M] is accepted if the one before is."""
        if self.confidence is None:
            return None
        before = mx.concatenate([mx.zeros((1,), path.dtype), path[:-1]])
        return mx.take_along_axis(self.confidence, before[:, None], axis=1)[:, 0]


@dataclass
class SlotwiseProposal:
    """A block of M slots that each pick on their own; its candidates are not ranked yet, and a
    greedy draft needs none."""

    drafter: "DFlash"
    logits: mx.array  # [M, V] of the drafter's head
    confidence: mx.array | None = None  # [M] that slot t stands given that t - 1 does

    def greedy_tokens(self) -> mx.array:
        """Ids [M] of the best tokens."""
        return self.drafter.tokens(mx.argmax(self.logits, axis=-1))

    def probs(self) -> mx.array:
        """Chances of the slots' K candidates [M, K], in no order."""
        values, K = shortlist(self.logits, self.drafter.config.top_k)[0], self.drafter.config.top_k
        top = mx.partition(values, -K, axis=-1)[:, -K:] if values.shape[1] > K else values
        return mx.softmax(self.drafter.scale_scores(top), axis=-1)

    def ranked(self) -> Proposal:
        """T_t[i, j] = U_t(v_j)"""
        ids, scores = self.drafter.rank(self.logits)
        M, K = scores.shape
        table = mx.broadcast_to(scores[1:, None, :], (M - 1, K, K))
        confidence = self.confidence
        if confidence is not None:
            confidence = mx.broadcast_to(confidence[:, None], (M, K))
        return Proposal(self.drafter.tokens(ids), scores[0], table, confidence)


class ContextAttention(nn.Module):
    """Attention of the block over the context's keys and its own.

    Context rows skip the layer's input norm: both kinds of rows go through one key and one value
    product, and the cache holds the block's rows only while they are attended to.
    """

    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__()
        dim, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.n_heads, self.n_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = head_dim**-0.5
        self.value_scale = config.attention_value_scale
        self.causal = config.layer_causal(layer)
        self.window, self.window_from_anchor = config.layer_window(layer), config.window_from_anchor
        self.q_proj = nn.Linear(dim, self.n_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, self.n_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, self.n_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(self.n_heads * head_dim, dim, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        if config.attention_sink_bias:
            self.attention_sink_bias = mx.zeros((self.n_heads,))
        self.rope = initialize_rope(
            head_dim,
            config.rope_theta,
            not config.rope_is_neox_style,
            config.rope_scaling,
            config.max_position_embeddings,
        )

    def keys_and_values(self, rows: mx.array, cache: KVCache) -> tuple[mx.array, mx.array]:
        """Append the rows [1, n, d] to the cache; all keys and values so far."""
        keys = self.k_proj(rows).reshape(*rows.shape[:2], self.n_kv_heads, -1)
        values = self.make_values(rows, keys).swapaxes(1, 2)
        keys = self.rope(self.k_norm(keys).swapaxes(1, 2), offset=cache.offset)
        return cache.update_and_fetch(keys, values)

    def make_values(self, rows: mx.array, keys: mx.array) -> mx.array:
        """Values of rows [1, n, d], shaped as their keys before any norm: [1, n, heads, hd]."""
        values = self.v_proj(rows).reshape(keys.shape)
        return values if self.value_scale == 1.0 else values * self.value_scale

    def __call__(self, x: mx.array, context: mx.array, cache: KVCache) -> mx.array:
        """x: [1, B, d] normalised block rows; context: [1, n, d] rows that are new to the cache."""
        B, L, _ = x.shape
        keys, values = self.keys_and_values(mx.concatenate([context, x], axis=1), cache)
        cache.trim(L)
        anchor = cache.offset
        queries = self.q_norm(self.q_proj(x).reshape(B, L, self.n_heads, -1)).swapaxes(1, 2)
        keys, values, mask = self.visible(keys, values, L, anchor)
        output = mx.fast.scaled_dot_product_attention(
            self.rope(queries, offset=anchor),
            keys,
            values,
            scale=self.scale,
            mask=mask,
            sinks=self.attention_sink_bias if "attention_sink_bias" in self else None,
        )
        return self.o_proj(output.swapaxes(1, 2).reshape(B, L, -1))

    def visible(
        self, keys: mx.array, values: mx.array, block: int, anchor: int
    ) -> tuple[mx.array, mx.array, mx.array | str | None]:
        """The keys that some slot may see, and the mask over them.

        Slot q sees context key k while q - k < W; with `window_from_anchor`: anchor - k <= W.
        """
        if self.window is None:
            return keys, values, "causal" if self.causal else None
        reach = self.window if self.window_from_anchor else self.window - 1
        first = max(0, anchor - reach)
        keys, values = keys[..., first:, :], values[..., first:, :]
        if self.window_from_anchor or anchor + block <= self.window:
            return keys, values, "causal" if self.causal else None
        slots, context = mx.arange(anchor, anchor + block), mx.arange(first, anchor)
        near = slots[:, None] - context < self.window
        inside = slots[:, None] >= slots if self.causal else mx.ones((block, block), mx.bool_)
        return keys, values, mx.concatenate([near, inside], axis=1)


class DraftLayer(nn.Module):
    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__()
        self.self_attn = ContextAttention(config, layer)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self, x: mx.array, normed: mx.array, context: mx.array, cache: KVCache
    ) -> mx.array:
        """x: [1, B, d], and normed = input_layernorm(x), which the caller may get more cheaply."""
        h = x + self.self_attn(normed, context, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class DFlash(nn.Module):
    """The parallel backbone. Embedding and LM head are the target's, shared and never copied.

    With a reduced draft vocabulary the head is the target's rows of the tokens `d2t` [Vd], and a
    candidate's id counts those rows.
    """

    layer_class: type[DraftLayer] = DraftLayer
    folder: Path | None = None  # that it was loaded from

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        target_size = config.target_hidden_size or config.hidden_size
        self.feature_size = len(config.target_layer_ids) * target_size
        self.fc = nn.Linear(self.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [self.layer_class(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.num_draft_tokens < config.vocab_size:
            self.d2t = mx.arange(config.num_draft_tokens, dtype=mx.uint32)  # absolute target ids
            self.freeze(keys="d2t", recurse=False)

    def bind(self, target: Target, kernels: Kernels = OFF) -> "DFlash":
        """Use the target's embedding and head; they stay out of this module's parameters.

        kernels: which Metal kernels may run. They have no gradient: training needs OFF.
        """
        if "d2t" in self:
            ids = self.d2t
            if not mx.all(ids[1:] > ids[:-1]).item() or ids[-1].item() >= self.config.vocab_size:
                raise InputError(
                    "d2t does not lead to ascending ids of the target's vocabulary; it must hold "
                    "offsets, to be added to 0, 1, 2 ..."
                )
        object.__setattr__(self, "target", self.with_ends(target))
        object.__setattr__(self, "verifier", target)  # whose law is drafted for
        object.__setattr__(
            self, "schedule", None
        )  # made by dspine_mlx.verify_length.schedule at first use
        self.kernels = kernels
        return self

    def with_ends(self, target: Target) -> Target:
        """The target with the embedding and the head that this drafter proposes with."""
        return target.with_head_rows(self.d2t) if "d2t" in self else target

    def tokens(self, ids: mx.array) -> mx.array:
        """The target's ids of candidates."""
        return self.d2t[ids] if "d2t" in self else ids

    def no_features(self) -> mx.array:
        """Features of no positions: [1, 0, m*d]."""
        return mx.zeros((1, 0, self.feature_size), self.target.dtype)

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self.layers]

    def context(self, features: mx.array) -> mx.array:
        """Context rows [1, n, d] of target features [1, n, m*d]."""
        if features.shape[1] == 0:  # quantised products of no rows crash on the CPU
            return mx.zeros((1, 0, self.config.hidden_size), features.dtype)
        return self.hidden_norm(self.fc(features))

    def extend(self, features: mx.array, cache: list[KVCache]) -> None:
        """Take target features [1, n, m*d] of the next n context positions into the cache."""
        context = self.context(features)
        for layer, c in zip(self.layers, cache, strict=True):
            layer.self_attn.keys_and_values(context, c)

    def embed_block(self, anchor: mx.array) -> mx.array:
        """[anchor, mask, mask, ...] embedded: [1, B, d]."""
        masks = mx.full((self.config.block_size - 1,), self.config.mask_token_id, anchor.dtype)
        block = self.target.embed(mx.concatenate([anchor.reshape(1), masks])[None])
        scale = self.config.input_embedding_scale
        return block if scale == 1.0 else block * scale

    def backbone(self, anchor: mx.array, features: mx.array, cache: list[KVCache]) -> mx.array:
        """The block's states after the last layer: [1, B, d]."""
        h, context = self.embed_block(anchor), self.context(features)
        for layer, c in zip(self.layers, cache, strict=True):
            h = layer(h, layer.input_layernorm(h), context, c)
        return h

    def scale_scores(self, logits: mx.array) -> mx.array:
        """Float32 scores of raw logits: the config's multiplier, then cap * tanh(logits / cap).

        Both keep the order, so they are applied to the K candidates only.
        """
        scores = logits.astype(mx.float32)
        if self.config.output_multiplier != 1.0:
            scores = scores * self.config.output_multiplier
        if self.config.final_logit_softcapping is not None:
            cap = self.config.final_logit_softcapping
            scores = cap * mx.tanh(scores / cap)
        return scores

    def candidates(self, states: mx.array) -> tuple[mx.array, mx.array]:
        """Ids of each slot's K best tokens and their base scores, from normalised states [M, d]."""
        return self.rank(self.target.head(states))

    def rank(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """The same from the head's logits [M, V]."""
        ids, values = top_k(logits, self.config.top_k)
        return ids, self.scale_scores(values)

    def propose(
        self, anchor: int | mx.array, features: mx.array, cache: list[KVCache]
    ) -> Proposal | SlotwiseProposal | ChainProposal:
        """Propose M tokens after the anchor.

        features: [1, n, m*d], target features of the positions before the anchor that are not yet
        in the cache (n may be 0).
        """
        h = self.backbone(mx.array(anchor), features, cache)
        states = self.norm(h[0, self.config.first_slot :])
        return SlotwiseProposal(self, self.target.head(states))


CHUNK = 128


def top_k(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest entries of each row [n, V], descending: indices and values, each [n, k].

    Equal values are listed in index order.
    """
    return sorted_top(*shortlist(logits, k), min(k, logits.shape[1]))


def shortlist(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Values and indices, each [n, m], among which each row's k largest are.

    They lie in the k chunks with the largest maxima, so only chunk maxima and k chunks are
    partitioned, never a large vocabulary.
    """
    n, V = logits.shape
    if 4 * k * CHUNK > V:
        return logits, mx.broadcast_to(mx.arange(V, dtype=mx.uint32), (n, V))
    whole = V - V % CHUNK
    chunks = logits[:, :whole].reshape(n, -1, CHUNK)
    best = mx.argpartition(-chunks.max(axis=-1), k - 1, axis=-1)[:, :k]
    indices = (best[..., None] * CHUNK + mx.arange(CHUNK, dtype=mx.uint32)).reshape(n, -1)
    values = mx.take_along_axis(chunks, best[..., None], axis=1).reshape(n, -1)
    if whole < V:
        rest = mx.broadcast_to(mx.arange(whole, V, dtype=mx.uint32), (n, V - whole))
        indices = mx.concatenate([indices, rest], axis=1)
        values = mx.concatenate([values, logits[:, whole:]], axis=1)
    return values, indices


def sorted_top(values: mx.array, indices: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest values of each row, descending, and their entries of indices."""
    picked = mx.argpartition(-values, k - 1, axis=-1)[:, :k]
    indices = mx.take_along_axis(indices, picked, axis=-1)
    values = mx.take_along_axis(values, picked, axis=-1)
    order = mx.argsort(indices, axis=-1)  # argsort is stable: equal values will stay in index order
    order = mx.take_along_axis(order, mx.argsort(-mx.take_along_axis(values, order, -1), -1), -1)
    return mx.take_along_axis(indices, order, axis=-1), mx.take_along_axis(values, order, axis=-1)

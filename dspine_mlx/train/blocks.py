"""All blocks of a batch in one forward, with the drafters' own parameters: each block sees the
context strictly before its anchor, and itself.

S sequences of n tokens, A blocks each, B slots per block of which M make proposals. Proposal i of
the block at anchor a (i = 0 .. M - 1) proposes token a + 1 + i, whose predecessor is token a + i.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.drafters.dflash import ContextAttention, DraftLayer
from dspine_mlx.drafters.drafter import Drafter


class Batch(NamedTuple):
    tokens: mx.array  # [S, n]
    features: mx.array  # [S, n, m*d] of the target's taps
    hidden: mx.array  # [S, n, d] the target's normalised last states: head(hidden) are its logits
    anchors: mx.array  # [S, A]
    weights: mx.array  # [S, A, M] of the loss; 0 where there is nothing to learn
    replaced: mx.array  # [S, A] bool: blocks whose first layers see the true predecessor

    def gather(self, rows: mx.array, shift: int) -> mx.array:
        """rows [S, n, ...] at the tokens anchor + shift + i: [S, A, M, ...]."""
        S, A, M = self.weights.shape
        positions = self.anchors[..., None] + shift + mx.arange(M)
        positions = mx.minimum(positions, rows.shape[1] - 1).reshape(S, A * M)
        picked = rows[mx.arange(S)[:, None], positions]
        return picked.reshape(S, A, M, *rows.shape[2:])

    @property
    def labels(self) -> mx.array:
        return self.gather(self.tokens, 1)

    @property
    def predecessors(self) -> mx.array:
        return self.gather(self.tokens, 0)


class States(NamedTuple):
    """States of every block's M proposals: [S, A, M, d] each."""

    base: mx.array  # normalised, for the LM head
    refined: mx.array | None = None  # the same after the last injection with the true predecessor
    layers: tuple[mx.array, ...] = ()  # after every layer's injection


class Context(NamedTuple):
    """Data that all layers share: the context rows, the anchors, and which keys a slot sees."""

    rows: mx.array  # [S, n, d]
    anchors: mx.array  # [S, A]


Layer = Callable[[mx.array, mx.array, mx.array], mx.array]


class Inputs(NamedTuple):
    """Inputs of a forward's layers."""

    layers: list[Layer]
    h: mx.array  # [S, A, B, d]
    context: Context


def run(layer: DraftLayer, checkpoint: bool) -> Layer:
    def function(x: mx.array, rows: mx.array, anchors: mx.array) -> mx.array:
        normed = layer.input_layernorm(x)
        context = Context(rows, anchors)
        return layer.around(lambda inner: attend(layer.self_attn, inner, context), x, normed)

    return nn.utils.checkpoint(layer, function) if checkpoint else function


def embed(drafter: Drafter, batch: Batch) -> mx.array:
    """Embed [anchor, mask, mask, ...] of every block: [S, A, B, d]."""
    S, A, M = batch.weights.shape
    masks = M - 1 + drafter.config.num_unused_slots
    anchors = batch.gather(batch.tokens, 0)[:, :, :1]
    fill = mx.full((S, A, masks), drafter.config.mask_token_id, anchors.dtype)
    block = drafter.target.embed(mx.concatenate([anchors, fill], axis=-1))
    return block.astype(drafter.network.fc.weight.dtype) * drafter.config.input_embedding_scale


def attend(attn: ContextAttention, x: mx.array, context: Context) -> mx.array:
    """Attend from normalised block rows x [S, A, B, d] to their context and their own block.

    The two parts are scored separately, so that no block meets another block's keys, and share one
    softmax.
    """
    S, A, B, _ = x.shape
    n, groups = context.rows.shape[1], attn.n_kv_heads
    keys, values = project(attn, context.rows, mx.array(0))  # [S, groups, n, head_dim]
    offsets = context.anchors.reshape(S * A)
    own = project(attn, x.reshape(S * A, B, -1), offsets)
    own_keys, own_values = (rows.reshape(S, A, groups, B, -1) for rows in own)
    queries = attn.q_norm(attn.q_proj(x).reshape(S * A, B, attn.n_heads, -1)).swapaxes(1, 2)
    queries = attn.rope(queries, offset=offsets) * attn.scale
    queries = queries.reshape(
        S, A, groups, -1, queries.shape[-1]
    )  # rows: heads of the group, slots
    rows = queries.shape[3]

    by_group = queries.swapaxes(1, 2).reshape(S, groups, A * rows, -1)
    far = (by_group @ keys.swapaxes(-1, -2)).reshape(S, groups, A, rows, n).swapaxes(1, 2)
    near = queries @ own_keys.swapaxes(-1, -2)  # [S, A, groups, rows, B]
    if attn.causal:
        inside = mx.where(mx.tri(B, dtype=mx.bool_), 0.0, -mx.inf)
        near = near + mx.tile(inside, (rows // B, 1)).astype(near.dtype)
    scores = mx.concatenate([far + context_bias(attn, context, B, rows), near], axis=-1)
    attention = softmax(attn, scores, B)
    far, near = attention[..., :n], attention[..., n:]
    output = far.swapaxes(1, 2).reshape(S, groups, A * rows, n) @ values
    output = output.reshape(S, groups, A, rows, -1).swapaxes(1, 2) + near @ own_values
    output = output.reshape(S, A, attn.n_heads, B, -1).swapaxes(2, 3)
    return attn.o_proj(output.reshape(S, A, B, -1))


def project(attn: ContextAttention, rows: mx.array, offset: mx.array) -> tuple[mx.array, mx.array]:
    """Keys and values [S, groups, n, head_dim] of rows [S, n, d], the first at position offset."""
    S, n, _ = rows.shape
    keys = attn.k_norm(attn.k_proj(rows).reshape(S, n, attn.n_kv_heads, -1)).swapaxes(1, 2)
    values = attn.v_proj(rows).reshape(S, n, attn.n_kv_heads, -1).swapaxes(1, 2)
    return attn.rope(keys, offset=offset), values * attn.value_scale


def context_bias(attn: ContextAttention, context: Context, B: int, rows: int) -> mx.array:
    """0 where a slot sees a context key, else -inf: [S, A, 1, 1 or rows, n].

    A slot at position q sees key k < anchor while q - k < W, or anchor - k <= W with
    `window_from_anchor`.
    """
    keys, anchors = mx.arange(context.rows.shape[1]), context.anchors[:, :, None, None]
    seen = keys < anchors
    if attn.window is not None and attn.window_from_anchor:
        seen = seen & (anchors - keys <= attn.window)
    elif attn.window is not None:
        slots = anchors + mx.tile(mx.arange(B), rows // B)[:, None]
        seen = seen & (slots - keys < attn.window)
    return mx.where(seen, 0.0, -mx.inf).astype(context.rows.dtype)[:, :, None]


def softmax(attn: ContextAttention, scores: mx.array, B: int) -> mx.array:
    """Softmax over the keys of scores [S, A, groups, rows, keys], with the head's sink if it has
    one."""
    if "attention_sink_bias" not in attn:
        return mx.softmax(scores, axis=-1, precise=True)
    sinks = mx.repeat(attn.attention_sink_bias.reshape(attn.n_kv_heads, -1), B, axis=-1)
    sinks = mx.broadcast_to(sinks[..., None].astype(scores.dtype), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, sinks], axis=-1), axis=-1, precise=True)[..., :-1]

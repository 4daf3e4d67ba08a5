"""DFlash: one parallel forward fills a whole block (arXiv:2602.06036).

A block is the anchor x_0 followed by masks. The target's features of all positions before the
anchor enter every draft layer as extra keys and values, kept in a cache from round to round.
"""

from collections.abc import Callable, Collection
from copy import copy

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from dspine_mlx.batch.draft_rows import DraftRows
from dspine_mlx.checkpoints.packing import same_weight
from dspine_mlx.drafters.chain import AnyProposal
from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.method import Layout, Method, Names, same
from dspine_mlx.drafters.network import Caches, Network
from dspine_mlx.drafters.proposal import SlotwiseProposal
from dspine_mlx.drafters.proposals import Proposals, flat
from dspine_mlx.drafters.settings import is_speculators, read_flat, read_speculators
from dspine_mlx.errors import InputError
from dspine_mlx.metal.kernel import OFF, Kernels
from dspine_mlx.target.model import Target


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

    def keys_and_values(
        self, rows: mx.array, cache: KVCache | DraftRows
    ) -> tuple[mx.array, mx.array]:
        """Append the rows [B, n, d] of B texts to the cache; all keys and values so far."""
        keys = self.k_proj(rows).reshape(*rows.shape[:2], self.n_kv_heads, -1)
        values = self.make_values(rows, keys).swapaxes(1, 2)
        keys = self.rope(self.k_norm(keys).swapaxes(1, 2), offset=cache.offset)
        return cache.update_and_fetch(keys, values)

    def make_values(self, rows: mx.array, keys: mx.array) -> mx.array:
        """Values of rows [B, n, d], shaped as their keys before any norm: [B, n, heads, hd]."""
        values = self.v_proj(rows).reshape(keys.shape)
        return values if self.value_scale == 1.0 else values * self.value_scale

    def __call__(self, x: mx.array, context: mx.array, cache: KVCache | DraftRows) -> mx.array:
        """x: [B, L, d] normalised block rows of B texts; context: [B, n, d] rows that are new to
        the cache."""
        B, L, _ = x.shape
        mask: mx.array | str | None
        anchor: int | mx.array
        if isinstance(cache, DraftRows):
            keys, values = self.keys_and_values(cache.side_by_side(context, x), cache)
            anchor = cache.anchors
            mask = self.visible_to_texts(keys.shape[2], L, anchor)
        else:
            keys, values = self.keys_and_values(mx.concatenate([context, x], axis=1), cache)
            cache.trim(L)
            anchor = cache.offset
            keys, values, mask = self.visible(keys, values, L, anchor)
        queries = self.q_norm(self.q_proj(x).reshape(B, L, self.n_heads, -1)).swapaxes(1, 2)
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

    def visible_to_texts(self, columns: int, block: int, anchors: mx.array) -> mx.array:
        """`visible` for texts with anchors [B]: the mask [B, 1, L, S] over all columns."""
        column, anchor = mx.arange(columns, dtype=mx.int32), anchors[:, None, None, None]
        slot = anchor + mx.arange(block, dtype=mx.int32)[:, None]
        mask = column <= slot if self.causal else column < anchor + block
        if self.window is None:
            return mask
        from_anchor = self.window_from_anchor
        near = anchor - column <= self.window if from_anchor else slot - column < self.window
        return mask & (near | (column >= anchor))


class DraftLayer(nn.Module):
    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__()
        self.self_attn = ContextAttention(config, layer)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self, x: mx.array, normed: mx.array, context: mx.array, cache: KVCache | DraftRows
    ) -> mx.array:
        """x: [1, B, d], and normed = input_layernorm(x), which the caller may get more cheaply."""
        return self.around(lambda rows: self.self_attn(rows, context, cache), x, normed)

    def around(
        self, attend: Callable[[mx.array], mx.array], x: mx.array, normed: mx.array
    ) -> mx.array:
        """The layer with its attention given as a function of rows [..., B, d]."""
        h = x + attend(normed)
        return h + self.mlp(self.post_attention_layernorm(h))


class DFlash(Network):
    """The parallel backbone. Embedding and LM head are the target's, lent for every proposal and
    never copied (see `bind`), unless a checkpoint has its own.

    With a reduced draft vocabulary, the head has the target's rows for the tokens `d2t` [Vd], and a
    candidate's id is an index into them.
    """

    layer_class: type[DraftLayer] = DraftLayer

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        target_size = config.target_hidden_size or config.hidden_size
        self.feature_size = len(config.target_layer_ids) * target_size
        self.fc = nn.Linear(self.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [self.layer_class(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.num_draft_tokens < config.vocab_size:
            self.d2t = mx.arange(config.num_draft_tokens, dtype=mx.uint32)  # absolute target ids
            self.freeze(keys="d2t", recurse=False)

    def bind(self, target: Target, kernels: Kernels = OFF) -> Drafter:
        """Bind the network to a target, whose embedding and head it proposes with.

        kernels: which Metal kernels may run. They have no gradient: training needs OFF.
        """
        if "d2t" in self:
            ids = self.d2t
            if not mx.all(ids[1:] > ids[:-1]).item() or ids[-1].item() >= self.config.vocab_size:
                raise InputError(
                    "d2t does not lead to ascending ids of the target's vocabulary; it must hold "
                    "offsets, to be added to 0, 1, 2 ..."
                )
        return Drafter(self, self.with_own_embeddings(target), target, kernels)

    def add_own_embeddings(self, paths: Collection[str]) -> None:
        """Add modules for a checkpoint's own embedding and head, if its parameters name them."""
        config = self.config
        if "embed_tokens.weight" in paths:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if "lm_head.weight" in paths:
            self.lm_head = nn.Linear(config.hidden_size, config.num_draft_tokens, bias=False)

    def with_own_embeddings(self, target: Target) -> Target:
        """The target with the embedding and head to propose with: the network's own where they
        differ, and only the head's rows of a reduced vocabulary."""
        for name, shared in (("embed_tokens", target.embed), ("lm_head", target.lm_head)):
            if name in self and same_weight(self[name], shared):
                del self[name]
        lent = copy(target)
        if "embed_tokens" in self:
            lent.embed = self.embed_tokens
        if "lm_head" in self:
            lent.lm_head, lent.tied = self.lm_head, False
        elif "d2t" in self:
            lent = lent.with_head_rows(self.d2t)
        return lent

    def tokens(self, ids: mx.array) -> mx.array:
        """Map candidates to the target's token ids."""
        return self.d2t[ids] if "d2t" in self else ids

    def context(self, features: mx.array) -> mx.array:
        """Turn target features [B, n, m*d] into context rows [B, n, d]."""
        if features.shape[1] == 0:  # quantised products with no rows crash on the CPU
            return mx.zeros((len(features), 0, self.config.hidden_size), features.dtype)
        return self.hidden_norm(self.fc(features))

    def extend(self, features: mx.array, cache: Caches) -> None:
        context = self.context(features)
        for layer, c in zip(self.layers, cache, strict=True):
            layer.self_attn.keys_and_values(context, c)

    def embed_block(self, anchor: mx.array, target: Target, slots: int | None = None) -> mx.array:
        """Embed [anchor, mask, mask, ...]: [1, L, d], or [B, L, d] for anchors [B, 1].

        slots: tokens that the block proposes; None: all M.
        """
        config = self.config
        left_out = 0 if slots is None else config.num_proposals - slots
        anchors, more = anchor.reshape(-1, 1), config.block_size - 1 - left_out
        masks = mx.full((len(anchors), more), config.mask_token_id, anchor.dtype)
        block = target.embed(mx.concatenate([anchors, masks], axis=1))
        scale = config.input_embedding_scale
        return block if scale == 1.0 else block * scale

    def backbone(
        self,
        anchor: mx.array,
        features: mx.array,
        cache: Caches,
        target: Target,
        slots: int | None = None,
    ) -> mx.array:
        """Run all layers; normalised states [M, d] of the proposing slots, or [B, M, d] for several
        texts with anchors [B, 1]."""
        h, context = self.embed_block(anchor, target, slots), self.context(features)
        for layer, c in zip(self.layers, cache, strict=True):
            h = layer(h, layer.input_layernorm(h), context, c)
        h = h if anchor.ndim == 2 else h[0]
        return self.norm(h[..., self.config.first_slot :, :])

    def propose(
        self,
        anchor: int | mx.array,
        features: mx.array,
        cache: list[KVCache],
        target: Target,
        kernels: Kernels = OFF,
    ) -> AnyProposal:
        """Propose M tokens; `Drafter.propose` lends the target's embedding and head, and the
        kernels."""
        anchor = mx.array(anchor)
        states = self.backbone(anchor, features, cache, target)
        return self.proposal(anchor, states, target.head(states), kernels)

    def propose_texts(
        self,
        anchors: mx.array,
        features: mx.array,
        cache: list[DraftRows],
        slots: int | None,
        target: Target,
        kernels: Kernels = OFF,
    ) -> Proposals:
        """Propose for several texts with one run of the layers and one product with the head."""
        states = self.backbone(anchors[:, None], features, cache, target, slots)
        logits = target.head(flat(states)).reshape(*states.shape[:2], -1)
        return self.proposals(anchors, states, logits, kernels)

    def proposals(
        self, anchors: mx.array, states: mx.array, logits: mx.array, kernels: Kernels
    ) -> Proposals:
        """See `proposal`; of several texts, with a leading axis."""
        return Proposals(self.slotwise(logits))

    def proposal(
        self, anchor: mx.array, states: mx.array, logits: mx.array, kernels: Kernels = OFF
    ) -> AnyProposal:
        """A text's proposal from its slots' states [M, d] and the head's logits [M, Vd] of them."""
        return self.slotwise(logits)

    def slotwise(self, logits: mx.array, confidence: mx.array | None = None) -> SlotwiseProposal:
        """A proposal of slots that pick on their own, from the head's logits [M, Vd]."""
        return SlotwiseProposal(self.config, logits, self.get("d2t"), confidence)


ATTENTION = tuple(f"layers.{{i}}.self_attn.{name}_proj" for name in "qkvo")
MLPS = tuple(f"layers.{{i}}.mlp.{name}_proj" for name in ("gate", "up", "down"))
LARGE = tuple(f"{name}.weight" for name in ("fc", "embed_tokens", "lm_head", *ATTENTION, *MLPS))
BACKBONE: Names = (
    same(
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "layers.{i}.input_layernorm.weight",
        "layers.{i}.post_attention_layernorm.weight",
        "layers.{i}.self_attn.q_norm.weight",
        "layers.{i}.self_attn.k_norm.weight",
        "layers.{i}.self_attn.attention_sink_bias",
        *(f"{name}.weight" for name in (*ATTENTION, *MLPS)),
        *(f"{name}.bias" for name in ATTENTION),  # with attention_bias
        "d2t",  # with a reduced draft vocabulary
    )
    | {
        "encoder.fc.weight": "fc.weight",
        "encoder.output_norm_enc.weight": "hidden_norm.weight",
    }
    | dict.fromkeys(("t2d", "mask_embedding", "mask_embedding.weight"), "")
)
# For drafters that don't use the target's embedding and head.
OWN_EMBEDDINGS = same("embed_tokens.weight", "lm_head.weight")
TENSORS = BACKBONE | OWN_EMBEDDINGS

METHOD = Method(
    name="dflash",
    title="DFlash",
    config=DrafterConfig,
    network=DFlash,
    layouts=(
        Layout("DFlash, speculators", TENSORS, read_speculators, is_speculators),
        Layout("DFlash, z-lab", TENSORS, read_flat),
    ),
    large=LARGE,
    # DFlashDraftModel is not a sign: Tencent's DSpine uses it too.
    architectures=("DFlashSpeculator",),
    speculators_model_type=("dflash",),
    projector_type=("dflash",),
    several_texts=True,
    reference="dspine_mlx.convert.reference:dflash_round",
    objective="dspine_mlx.train.objectives.dflash:OBJECTIVE",
)

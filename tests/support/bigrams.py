"""Pairs of a target whose next token depends on the last one alone, and drafters whose heads know
how, while their backbones know less."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3

from dspine_mlx.drafters.dflash2 import DFlash2, DFlash2Config
from dspine_mlx.drafters.domino import Domino, DominoConfig
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspark import DSpark, DSparkConfig
from dspine_mlx.target.model import Target
from tests.support.tiny import HIDDEN as D
from tests.support.tiny import LAYERS, MASK, drafter_config, randomise

BIGRAM = mx.arange(D) > 0  # entries of states that depend on the token
VOICE = 0.2  # of these, in the backbone's logits, where they are of no use
LINEAR = 1e-2  # numbers this small pass through tanh as they are


def bigram_target(
    vocab_size: int, spread: float = 3.0, frequency: float = 1.0, seed: int = 0
) -> nn.Module:
    """Logits head[v] . embed[u] after u: its layers add nothing.

    The first entry of every embedding is 1, so the first column of the head says how frequent a
    token is on the whole: rank ** -frequency, in a random order. The others make logits differ by
    `spread`.
    """
    args = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=D,
        num_hidden_layers=LAYERS,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        vocab_size=vocab_size,
        max_position_embeddings=4096,
        rope_theta=1e4,
        tie_word_embeddings=False,
    )
    model = randomise(qwen3.Model(args), seed)
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight = mx.zeros_like(linear.weight)
    embed, head = model.model.embed_tokens, model.lm_head
    embed.weight[:, 0] = 0
    embed.weight = (
        embed.weight * ((D - 1) / embed.weight.square().sum(axis=-1, keepdims=True)) ** 0.5
    )
    head.weight = head.weight * (spread / (head.weight @ embed.weight[: 2 * D].T).std())
    embed.weight[:, 0] = 1
    order = mx.random.permutation(vocab_size, key=mx.random.key(seed))
    head.weight[:, 0] = -frequency * mx.log(1 + order.astype(mx.float32))
    model.model.norm.weight = mx.ones((D,))
    mx.eval(model.parameters())
    return model


def blurred(model: nn.Module, blur: float) -> mx.array:
    """The states [V, d] that the target's head reads after each token, and noise; nothing of how
    frequent tokens are, which the backbone knows."""
    states: mx.array = model.model.embed_tokens.weight
    return (states + blur * mx.random.normal(states.shape, key=mx.random.key(7))) * BIGRAM


def network(cls: Any, config: Any, backbone: float) -> Any:
    """Random weights, and layers that add `backbone` of what they would to the embeddings."""
    net = randomise(cls(config), 1)
    for layer in net.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight = linear.weight * backbone
    net.norm.weight = mx.where(BIGRAM, VOICE, 1.0)
    return net


def knowing_dspark(
    model: nn.Module, blur: float = 0.3, backbone: float = 1.0, **changes: Any
) -> Drafter:
    V = Target(model).vocab_size
    config = drafter_config(vocab_size=V, markov_rank=D, **changes)
    net = network(DSpark, DSparkConfig.from_dict(config), backbone)
    head = net.markov_head
    head.markov_w1.weight, head.markov_w2.weight = blurred(model, blur), model.lm_head.weight
    return net.bind(Target(model))


def knowing_dflash2(
    model: nn.Module, blur: float = 0.3, backbone: float = 0.1, **changes: Any
) -> Drafter:
    """W h = 1 at the state h of a mask that layers add nothing to."""
    V = Target(model).vocab_size
    own = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": D}
    config = drafter_config(vocab_size=V, selector_top_k=min(V, 64), **own | changes)
    net = network(DFlash2, DFlash2Config.from_dict(config), backbone)
    selector, mask = net.candidate_selector, net.norm(model.model.embed_tokens.weight[MASK])
    selector.predecessor_codebook.weight = blurred(model, blur)
    selector.successor_codebook.weight = model.lm_head.weight
    selector.hidden_projection.weight = mx.broadcast_to(mask / mask.square().sum(), (D, D))
    return net.bind(Target(model))


def knowing_domino(
    model: nn.Module, blur: float = 0.3, backbone: float = 0.1, **changes: Any
) -> Drafter:
    """The GRU's state is half of the newest embedding, made small: with z = r = 1/2, W_hn = -2
    takes the older half away. Two units give a number back: silu(y) - silu(-y) = y."""
    V = Target(model).vocab_size
    config = drafter_config(vocab_size=V, gru_hidden_dim=D, emb_dim=2 * D, shift_label=True)
    net = network(Domino, DominoConfig.from_dict(config | changes), backbone)
    mix = mx.eye(D) + blur * mx.random.normal((D, D), key=mx.random.key(7)) / D**0.5
    none = mx.zeros((2 * D, D))
    net.prefix_gru.weight_ih_l0 = mx.concatenate([none, LINEAR * mix])
    net.prefix_gru.weight_hh_l0 = mx.concatenate([none, -2 * mx.eye(D)])
    hidden, _, out = net.embed_proj
    unit = 2 / LINEAR * mx.eye(D)
    hidden.weight = mx.concatenate([none, mx.concatenate([unit, -unit])], axis=1)
    rows = model.lm_head.weight * BIGRAM
    out.weight = mx.concatenate([rows, -rows], axis=1)
    return net.bind(Target(model))


KNOWING = {"dspark": knowing_dspark, "dflash2": knowing_dflash2, "domino": knowing_domino}

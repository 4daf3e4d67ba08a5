"""DFlash2 checkpoints with random weights in the published layouts, and the one whose figures are
known: names and shapes as published, tensor by tensor."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dspine_mlx.convert.reference import Head
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.proposal import Proposal
from tests.support.checkpoints import Checkpoint, Maker, Shape, Weights


@dataclass(frozen=True)
class Sizes:
    """Of the convolutions and the selector."""

    C: int = 2
    g: int = 8
    r: int = 6
    K: int = 5


SHAPE, SIZES = Shape(), Sizes()
LARGE = tuple(f"self_attn.{n}_proj" for n in "qkvo") + tuple(  # of a layer, packed by --quantize
    f"mlp.{n}_proj" for n in ("gate", "up", "down")
)


def convolutions(m: Maker, sizes: Sizes) -> Weights:
    H, C, groups = m.s.H, sizes.C, m.s.H // sizes.g
    w: Weights = {}
    for i in range(m.s.L):
        for name in ("attention_conv", "mlp_conv"):
            at = f"layers.{i}.{name}."
            w[f"{at}base_kernel"] = (0.7 * m.rng.normal(size=(2, C, H))).astype(np.float32)
            w[f"{at}kernel_projection.weight"] = m.matrix(2 * C * groups, H, 0.3)
    return w


def selector(m: Maker, sizes: Sizes) -> Weights:
    V, H, r = m.s.V, m.s.H, sizes.r
    at = "candidate_selector."
    return {
        f"{at}predecessor_codebook": m.matrix(V, r, 2),
        f"{at}successor_codebook": m.matrix(V, r, 2),
        f"{at}hidden_projection.weight": m.matrix(r, H),
    }


def keys(sizes: Sizes) -> dict[str, int]:
    return {
        "conv_kernel_size": sizes.C,
        "conv_group_size": sizes.g,
        "selector_rank": sizes.r,
        "selector_top_k": sizes.K,
    }


def dflash2_zlab(shape: Shape = SHAPE, sizes: Sizes = SIZES, **extra: Any) -> Checkpoint:
    """As z-lab and incoai publish: all keys of the method in dflash_config."""
    m = Maker(shape)
    config = m.qwen3() | {
        "architectures": ["DFlash2DraftModel"],
        "auto_map": {"AutoModel": "dflash2.DFlash2DraftModel"},
        "num_target_layers": shape.target_layers,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * shape.L,
        "sliding_window": 7,
        "dflash_config": m.blocks() | {"block_size": shape.B} | keys(sizes),
    }
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    weights = m.backbone() | convolutions(m, sizes) | selector(m, sizes)
    return config | extra, weights


def dflash2_speculators(shape: Shape = SHAPE, sizes: Sizes = SIZES, **extra: Any) -> Checkpoint:
    """transformer_layer_config as a diff against Qwen3's defaults; the method's keys on top."""
    m = Maker(shape)
    layer = {k: v for k, v in m.qwen3().items() if k not in ("rms_norm_eps", "attention_bias")}
    layer |= {"rope_parameters": {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}}
    layer |= {"layer_types": ["sliding_attention"] * shape.L, "sliding_window": 7}
    config = {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash2",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": shape.B - 1}],
            "verifier": {"name_or_path": "owner/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.V,
        "block_size": shape.B,
        "target_hidden_size": shape.H,
        "mask_token_id": shape.V - 2,
        "aux_hidden_state_layer_ids": [i + 1 for i in shape.taps],
    }
    weights = m.backbone() | convolutions(m, sizes) | selector(m, sizes)
    return config | keys(sizes) | extra, weights


Tensor = tuple[str, tuple[int, ...], float, float]  # name, shape, a and c of fill


def fill(n: int, shape: tuple[int, ...], a: float, c: float) -> np.ndarray:
    """Tensor number n: element i is c + a (((7919 i + 104729 n) mod 2003) / 1001 - 1)."""
    i = np.arange(np.prod(shape))
    return (c + a * ((7919 * i + 104729 * n) % 2003 / 1001 - 1)).reshape(shape)


KNOWN_CONFIG: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 20,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "is_causal": False,
    "dflash_config": {
        "block_size": 4,
        "mask_token_id": 19,
        "target_layer_ids": [0, 1],
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "selector_rank": 3,
        "selector_top_k": 3,
    },
}
KNOWN_ANCHOR = 7


def known() -> tuple[Weights, Head, np.ndarray]:
    """Tensors, the target's embedding and head, and features [9, 16]: the sizes of KNOWN_CONFIG."""
    layer: list[Tensor] = [
        ("input_layernorm.weight", (8,), 0.2, 1),
        ("self_attn.q_proj.weight", (8, 8), 0.6, 0),
        ("self_attn.k_proj.weight", (4, 8), 0.6, 0),
        ("self_attn.v_proj.weight", (4, 8), 0.6, 0),
        ("self_attn.o_proj.weight", (8, 8), 0.6, 0),
        ("self_attn.q_norm.weight", (4,), 0.2, 1),
        ("self_attn.k_norm.weight", (4,), 0.2, 1),
        ("post_attention_layernorm.weight", (8,), 0.2, 1),
        ("mlp.gate_proj.weight", (12, 8), 0.6, 0),
        ("mlp.up_proj.weight", (12, 8), 0.6, 0),
        ("mlp.down_proj.weight", (8, 12), 0.6, 0),
        ("attention_conv.base_kernel", (2, 2, 8), 1, 0),
        ("attention_conv.kernel_projection.weight", (8, 8), 0.3, 0),
        ("mlp_conv.base_kernel", (2, 2, 8), 1, 0),
        ("mlp_conv.kernel_projection.weight", (8, 8), 0.3, 0),
    ]
    tensors: list[Tensor] = [
        ("fc.weight", (8, 16), 0.6, 0),
        ("hidden_norm.weight", (8,), 0.2, 1),
        ("norm.weight", (8,), 0.2, 1),
    ]
    for i in range(2):
        tensors += [(f"layers.{i}.{name}", shape, a, c) for name, shape, a, c in layer]
    at = "candidate_selector."
    tensors += [
        (f"{at}predecessor_codebook", (20, 3), 2.5, 0),
        (f"{at}successor_codebook", (20, 3), 2.5, 0),
        (f"{at}hidden_projection.weight", (3, 8), 0.6, 0),
    ]
    weights = {name: fill(n, shape, a, c) for n, (name, shape, a, c) in enumerate(tensors, 1)}
    assert len(weights) == 36
    head = Head(fill(37, (20, 8), 1, 0), fill(38, (20, 8), 1, 0))
    return weights, head, fill(39, (9, 16), 1, 0)


def propose(
    drafter: Drafter, features: np.ndarray, anchor: int, chunks: tuple[int, ...] = ()
) -> Proposal:
    """Feed all chunks of features but the last ahead; the last comes with the anchor."""
    cache = drafter.make_cache()
    *ahead, last = np.split(features, np.cumsum(chunks, dtype=int))
    for part in ahead:
        drafter.extend(mx.array(part)[None], cache)
    proposal = drafter.propose(anchor, mx.array(last)[None], cache).ranked()
    assert {c.offset for c in cache} == {len(features)}  # the block's rows are gone
    return proposal

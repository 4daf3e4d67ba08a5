"""DSpark over a backbone of Gemma 4's global layers (DeepSpec's dspark_gemma4_*)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma3_text import MLP
from mlx_lm.models.gemma4_text import RMSNormNoScale

from dspine_mlx.drafters.config import flatten
from dspine_mlx.drafters.dflash import LARGE, TENSORS, ContextAttention, DraftLayer
from dspine_mlx.drafters.dspark import (
    HEADS,
    MARKS,
    DSpark,
    DSparkConfig,
    heads_from_tensors,
    readings,
)
from dspine_mlx.drafters.method import Config, Layout, Method, Shapes, same
from dspine_mlx.drafters.settings import backbone_settings, layer_types, section
from dspine_mlx.errors import InputError

# transformers' Gemma4TextConfig: global layers when rope_parameters is absent.
GEMMA4_ROPE = {
    "rope_type": "proportional",
    "partial_rotary_factor": 0.25,
    "rope_theta": 1000000.0,
}


@dataclass(frozen=True)
class Gemma4DSparkConfig(DSparkConfig):
    """head_dim and num_key_value_heads are those of Gemma 4's global layers."""

    attention_k_eq_v: bool = False  # values are made from the key projection


class Gemma4Attention(ContextAttention):
    """Values are normalised without a scale, scores are not divided by sqrt(head_dim)."""

    def __init__(self, config: Gemma4DSparkConfig, layer: int):
        super().__init__(config, layer)
        self.scale = 1.0
        self.v_norm = RMSNormNoScale(config.head_dim, eps=config.rms_norm_eps)
        if config.attention_k_eq_v:
            del self.v_proj

    def make_values(self, rows: mx.array, keys: mx.array) -> mx.array:
        return self.v_norm(self.v_proj(rows).reshape(keys.shape) if "v_proj" in self else keys)


class Gemma4Layer(DraftLayer):
    """h = x + norm(attention(x)), y = s (h + norm(mlp(norm(h)))), with GELU in the MLP."""

    def __init__(self, config: Gemma4DSparkConfig, layer: int):
        super().__init__(config, layer)
        self.self_attn = Gemma4Attention(config, layer)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            self[name] = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer_scalar = mx.ones((1,))  # s

    def around(
        self, attend: Callable[[mx.array], mx.array], x: mx.array, normed: mx.array
    ) -> mx.array:
        h = x + self.post_attention_layernorm(attend(normed))
        mlp = self.mlp(self.pre_feedforward_layernorm(h))
        return (h + self.post_feedforward_layernorm(mlp)) * self.layer_scalar


class Gemma4DSpark(DSpark):
    layer_class = Gemma4Layer


def read_gemma4(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Read DeepSpec's config for Gemma 4: the target's text config, with global layers only."""
    rope = section(config, "rope_parameters").get("full_attention", GEMMA4_ROPE)
    flat = flatten(dict(config) | {"rope_parameters": rope})
    rope = flat["rope_scaling"] or {}
    if any(kind != "full_attention" for kind in layer_types(flat)):
        raise InputError(f"layer_types is {flat['layer_types']}; Gemma 4 drafters have full layers")
    wanted = {
        "hidden_activation": "gelu_pytorch_tanh",
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
    }
    for name, value in wanted.items():
        if flat.get(name, value) != value:
            raise InputError(f"{name} is {flat[name]!r}; this backbone computes {value!r}")
    if rope.get("rope_type") != "proportional":
        raise InputError(f"rope_type is {rope.get('rope_type')!r}; it must be proportional")
    heads = "num_global_key_value_heads" if flat.get("attention_k_eq_v") else "num_key_value_heads"
    for field, name in (("head_dim", "global_head_dim"), ("num_key_value_heads", heads)):
        flat[field] = flat.get(name)
        if flat[field] is None:
            raise InputError(f"config.json states no {name}; a drafter for Gemma 4 needs it")
    share, size = rope.get("partial_rotary_factor", 1.0), flat["head_dim"]
    numbers = type(share) in (int, float) and type(size) is int
    if not numbers or not 0 < share <= 1 or share * size % 2:
        raise InputError(
            f"partial_rotary_factor {share!r} of global_head_dim {size!r} is no number of pairs"
        )
    if type(flat.get("hidden_size")) is int:
        flat["input_embedding_scale"] = flat["hidden_size"] ** 0.5
    return backbone_settings(flat | {"is_causal": None, "causal": None}, shapes)


GEMMA4 = same(
    "layers.{i}.pre_feedforward_layernorm.weight",
    "layers.{i}.post_feedforward_layernorm.weight",
    "layers.{i}.layer_scalar",
)

METHOD = Method(
    name="dspark_gemma4",
    title="DSpark for Gemma 4",
    config=Gemma4DSparkConfig,
    network=Gemma4DSpark,
    layouts=(Layout("DSpark for Gemma 4, DeepSpec", TENSORS | HEADS | GEMMA4, read_gemma4),),
    large=LARGE,
    architectures=("Gemma4DSparkModel",),
    marks=MARKS,
    fill=heads_from_tensors,
    several_texts=True,
    readings=readings,
    reference="dspine_mlx.convert.reference:dspark_round",
)

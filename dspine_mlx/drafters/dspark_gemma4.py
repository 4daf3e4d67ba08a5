"""DSpark over a backbone of Gemma 4's global layers (DeepSpec's dspark_gemma4_*)."""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.gemma3_text import MLP
from mlx_lm.models.gemma4_text import RMSNormNoScale

from dspine_mlx.drafters.config import DSparkConfig
from dspine_mlx.drafters.dflash import ContextAttention, DraftLayer
from dspine_mlx.drafters.dspark import DSpark


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

    def __call__(
        self, x: mx.array, normed: mx.array, context: mx.array, cache: KVCache
    ) -> mx.array:
        h = x + self.post_attention_layernorm(self.self_attn(normed, context, cache))
        mlp = self.mlp(self.pre_feedforward_layernorm(h))
        return (h + self.post_feedforward_layernorm(mlp)) * self.layer_scalar


class Gemma4DSpark(DSpark):
    layer_class = Gemma4Layer

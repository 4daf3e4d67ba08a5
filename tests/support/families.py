"""Tiny models with random weights of every target family, through mlx-lm's own classes.

The window of windowed families is WINDOW rows, so that short texts run past it.
"""

from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.target.model import Target
from tests.support.tiny import MASK, VOCABULARY, Scripted

WINDOW = 24
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
GATED_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
SLIDING = ["sliding_attention", "full_attention"] * 2
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
LFM2: dict[str, Any] = {
    "norm_eps": 1e-6,
    "conv_bias": True,
    "conv_L_cache": 3,
    "full_attn_idxs": [1, 3],
}
QWEN3_5 = SIZES | GATED_DELTA | {"full_attention_interval": 2, "rope_parameters": {
    "type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}  # fmt: skip
GEMMA = {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
GEMMA4 = GEMMA | {
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "tie_word_embeddings": True,
}

# name: mlx-lm's model_type, then what its config adds to SIZES or replaces
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "qwen3_tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "llama": {},
    "llama_sliding": {"model_type": "llama", "layer_types": SLIDING, "sliding_window": WINDOW},
    "olmo3": {"layer_types": SLIDING, "sliding_window": WINDOW},
    "gemma3_text": GEMMA,
    "gemma3": {"text_config": SIZES | GEMMA | {"model_type": "gemma3_text"}},
    "gemma4_text": GEMMA4,
    "gemma4": {"text_config": SIZES | GEMMA4 | {"model_type": "gemma4_text"}},
    "gpt_oss": {
        "layer_types": SLIDING,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "llama4": {
        "text_config": SIZES
        | {
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
    "qwen3_5": QWEN3_5,
    "qwen3_5_wrapped": {"model_type": "qwen3_5", "text_config": QWEN3_5},
    "qwen3_5_moe": QWEN3_5 | EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_next": GATED_DELTA
    | EXPERTS
    | {"shared_expert_intermediate_size": 32, "full_attention_interval": 2},
    "olmo_hybrid": GATED_DELTA
    | {
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "kimi_linear": EXPERTS
    | {
        "linear_attn_config": {
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 4096,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "-", "*", "M", "E", "M", "*", "-"],
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-6,
        "use_bias": False,
        "use_conv_bias": True,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 64},
    "granitemoehybrid": MAMBA2
    | {
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "mamba2": {
        "num_heads": 4,
        "state_size": 16,
        "layer_norm_epsilon": 1e-6,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, float("inf")),
        "time_step_rank": "auto",
    },
    "lfm2": LFM2
    | {
        "block_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": LFM2 | EXPERTS | {"use_expert_bias": True, "num_dense_layers": 1},
    "rwkv7": {
        "norm_eps": 1e-6,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "recurrent_gemma": {
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"] * 2,
        "num_key_value_heads": 1,
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def build(name: str, bits: int | None = None, seed: int = 0, **changes: Any) -> nn.Module:
    """A float32 model of the family, quantised with groups of 32 if bits are given.

    No parameter keeps a neutral value (a zero bias, a norm of ones), so that each one matters.
    """
    config = {"model_type": name} | SIZES | FAMILIES[name] | changes
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda p: p + 0.1 * mx.random.normal(p.shape), model.parameters()))
    if bits:
        nn.quantize(model, 32, bits, class_predicate=quantizable)
    model.eval()
    mx.eval(model.parameters())
    return model


def quantizable(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def drafter_config(model: nn.Module, **changes: Any) -> DrafterConfig:
    target = Target(model)
    config: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": target.vocab_size,
        "block_size": 8,
        "mask_token_id": MASK,
        "target_layer_ids": (0, max(0, len(target.layers) - 2)),
    }
    return DrafterConfig(**config | changes)


def random_drafter(model: nn.Module, **changes: Any) -> Drafter:
    """A DFlash drafter that fits the model and knows nothing: hardly a token is accepted."""
    mx.random.seed(1)
    return DFlash(drafter_config(model, **changes)).bind(Target(model))


def scripted_drafter(model: nn.Module, text: list[int], script: str, **changes: Any) -> Scripted:
    """A drafter that knows the text, and spoils it as one of SCRIPTS says."""
    mx.random.seed(1)
    return Scripted.of(DFlash(drafter_config(model, **changes)), model, text, script)

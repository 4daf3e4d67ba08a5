"""Tiny checkpoints with random weights in the published layouts and names, and a tiny target."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3
from safetensors.numpy import save_file

from dspine_mlx.convert.reference import Head

Config = dict[str, Any]
Weights = dict[str, np.ndarray]
Checkpoint = tuple[Config, Weights]


def offsets(kept: Any) -> np.ndarray:
    """The d2t of a draft vocabulary [Vd] of ascending target ids, as published."""
    return np.array(kept) - np.arange(len(kept))


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny drafter and its target, under formats' letters."""

    H: int = 32
    I: int = 48  # noqa: E741
    L: int = 2
    heads: int = 4
    kv: int = 2
    hd: int = 8
    V: int = 96
    Vd: int = 40  # reduced draft vocabulary
    taps: tuple[int, ...] = (0, 2, 3)
    B: int = 5
    r: int = 24  # transfer rank
    a: int = 12  # message size
    reach: int = 1  # slots back that are injected from
    rank: int = 8  # Markov rank
    seed: int = 0

    @property
    def target_layers(self) -> int:
        return max(self.taps) + 2


class Maker:
    def __init__(self, shape: Shape):
        self.s, self.rng = shape, np.random.default_rng(shape.seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (gain * self.rng.normal(size=(rows, columns)) / columns**0.5).astype(np.float32)

    def vector(self, n: int, mean: float = 1.0) -> np.ndarray:
        return (mean + 0.2 * self.rng.normal(size=n)).astype(np.float32)

    def backbone(self) -> Weights:
        s = self.s
        w = {
            "fc.weight": self.matrix(s.H, len(s.taps) * s.H),
            "hidden_norm.weight": self.vector(s.H),
            "norm.weight": self.vector(s.H),
        }
        for i in range(s.L):
            at = f"layers.{i}."
            w |= {
                f"{at}input_layernorm.weight": self.vector(s.H),
                f"{at}post_attention_layernorm.weight": self.vector(s.H),
                f"{at}self_attn.q_proj.weight": self.matrix(s.heads * s.hd, s.H, 2),
                f"{at}self_attn.k_proj.weight": self.matrix(s.kv * s.hd, s.H, 2),
                f"{at}self_attn.v_proj.weight": self.matrix(s.kv * s.hd, s.H),
                f"{at}self_attn.o_proj.weight": self.matrix(s.H, s.heads * s.hd),
                f"{at}self_attn.q_norm.weight": self.vector(s.hd),
                f"{at}self_attn.k_norm.weight": self.vector(s.hd),
                f"{at}mlp.gate_proj.weight": self.matrix(s.I, s.H),
                f"{at}mlp.up_proj.weight": self.matrix(s.I, s.H),
                f"{at}mlp.down_proj.weight": self.matrix(s.H, s.I),
            }
        return w

    def injection(self) -> Weights:
        s = self.s
        codes = self.rng.normal(size=(s.V, s.r))
        w = {f"injection.readouts.{i}.weight": self.matrix(s.r, s.H) for i in range(s.L)}
        w |= {f"injection.writes.{i}.weight": self.matrix(s.H, s.a, 0.7) for i in range(s.L)}
        w |= {
            "injection.message.weight": self.matrix(s.a, s.r),
            "injection.receiver_gate.weight": self.matrix(s.a, s.r),
            "injection.predecessor_gate.weight": self.matrix(s.a, s.r),
            "injection.bias": self.vector(s.a, 0.0),
            "transfer_codes": (codes / np.linalg.norm(codes, axis=1, keepdims=True)).astype("f4"),
            "transfer_ready": np.array(True),
        }
        if s.reach == 2:
            w |= {f"earlier.writes.{i}.weight": self.matrix(s.H, s.a, 0.7) for i in range(s.L)}
            w["earlier.gates.weight"] = self.matrix(3 * s.a, s.r)
            w["earlier.bias"] = self.vector(s.a, 0.0)
        return w

    def heads(
        self, kind: str = "vanilla", with_markov: bool = True, Vd: int | None = None
    ) -> Weights:
        """Markov and confidence heads; rank 0 leaves the Markov head out."""
        s, r = self.s, self.s.rank
        w = {
            "confidence_head.proj.weight": self.matrix(1, s.H + (r if with_markov else 0)),
            "confidence_head.proj.bias": self.vector(1, 0.3),
        }
        if r:
            w["markov_head.markov_w1.weight"] = self.matrix(s.V, r, 2)
            w["markov_head.markov_w2.weight"] = self.matrix(Vd or s.V, r, 2)
        if kind == "gated":
            w["markov_head.gate_proj.weight"] = self.matrix(r, s.H + r)
            w["markov_head.gate_proj.bias"] = self.vector(r, 0.0)
        if kind == "rnn":
            w["markov_head.joint_proj.weight"] = self.matrix(3 * r, 2 * r + s.H)
            w["markov_head.joint_proj.bias"] = self.vector(3 * r, 0.0)
        return w

    def reduced(self) -> Weights:
        """d2t (offsets) and t2d of a reduced draft vocabulary, with its own head."""
        s = self.s
        kept = np.sort(self.rng.choice(s.V, s.Vd, replace=False))
        return {
            "d2t": offsets(kept),
            "t2d": np.isin(np.arange(s.V), kept),
            "lm_head.weight": self.matrix(s.Vd, s.H),
        }

    def qwen3(self) -> Config:
        s = self.s
        return {
            "model_type": "qwen3",
            "hidden_size": s.H,
            "intermediate_size": s.I,
            "num_hidden_layers": s.L,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv,
            "head_dim": s.hd,
            "vocab_size": s.V,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 512,
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }

    def blocks(self) -> Config:
        return {"mask_token_id": self.s.V - 2, "target_layer_ids": list(self.s.taps)}


def dflash_zlab(shape: Shape = Shape(), nested_block: bool = False, **extra: Any) -> Checkpoint:
    m = Maker(shape)
    config = m.qwen3() | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "num_target_layers": shape.target_layers,
        "dflash_config": m.blocks(),
    }
    (config["dflash_config"] if nested_block else config)["block_size"] = shape.B
    return config | extra, m.backbone()


def dspine_specforge(shape: Shape = Shape(), **extra: Any) -> Checkpoint:
    m = Maker(shape)
    config = m.qwen3() | {
        "architectures": ["DSpineDraftModel"],
        "block_size": shape.B,
        "is_causal": True,
        "dflash_config": m.blocks(),
        "dspine_config": {"transfer_rank": shape.r, "message_size": shape.a, "top_k": 6},
    }
    if shape.reach != 1:
        config["injection_reach"] = shape.reach
    return config | extra, m.backbone() | m.injection()


def dspine_reference(shape: Shape = Shape()) -> Checkpoint:
    """Model keys under "config"; C is to be saved in a file of its own under `codes`."""
    config, weights = dspine_specforge(shape)
    for key in ("architectures", "is_causal", "dspine_config"):
        del config[key]
    del weights["transfer_ready"]
    weights["codes"] = weights.pop("transfer_codes")
    return {"config": config, "step": 9000}, weights


def dspine_tencent(shape: Shape = Shape()) -> Checkpoint:
    """DFlash's architecture plus the key that marks DSpine; here with SpecForge's tensor names."""
    config, weights = dspine_specforge(shape)
    del config["dspine_config"], config["is_causal"], weights["transfer_ready"]
    config["architectures"] = ["DFlashDraftModel"]
    config["dflash_config"] |= {"selected_prefix_code_bridge": {"code_dim": shape.r}}
    return config, weights


def dspark_deepspec(shape: Shape = Shape(), kind: str = "vanilla", **extra: Any) -> Checkpoint:
    """Flat keys copied from the target's config, noise included; own embedding and head."""
    m = Maker(shape)
    config = m.qwen3() | m.blocks()
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "num_target_layers": shape.target_layers,
        "block_size": shape.B,
        "layer_types": ["full_attention"] * shape.L,
        "num_anchors": 512,
        "enable_confidence_head": True,
        "confidence_head_with_markov": shape.rank > 0,
        "markov_rank": shape.rank,
        "markov_head_type": kind,
        "partial_rotary_factor": 0.25,
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        },
        "sliding_window": 4,
        "use_sliding_window": False,
    }
    weights = m.backbone() | m.heads(kind, shape.rank > 0)
    weights["embed_tokens.weight"] = m.matrix(shape.V, shape.H, 4)
    weights["lm_head.weight"] = m.matrix(shape.V, shape.H)
    return config | extra, weights


def dspark_gemma4(
    shape: Shape = Shape(), k_eq_v: bool = True, kind: str = "vanilla", **extra: Any
) -> Checkpoint:
    """DeepSpec's for Gemma 4: the noise of a copied text config around layers of the global kind,
    whose heads are four times as wide; with k_eq_v there is one key-value head."""
    s = shape
    m = Maker(replace(s, hd=4 * s.hd, kv=1 if k_eq_v else s.kv))
    config = {
        key: value
        for key, value in m.qwen3().items()
        if key not in ("rope_theta", "hidden_act", "head_dim", "num_key_value_heads")
    }
    config |= m.blocks() | {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "num_target_layers": s.target_layers,
        "block_size": s.B,
        "layer_types": ["full_attention"] * s.L,
        "head_dim": s.hd,  # of the target's sliding layers
        "num_key_value_heads": s.kv,
        "global_head_dim": 4 * s.hd,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": k_eq_v,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
        "num_kv_shared_layers": 0,
        "sliding_window": 4,
        "final_logit_softcapping": 3.0,
        "num_anchors": 512,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": s.rank,
        "markov_head_type": kind,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 5000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    }
    weights = m.backbone() | m.heads(kind)
    for i in range(s.L):
        at = f"layers.{i}."
        weights[f"{at}pre_feedforward_layernorm.weight"] = m.vector(s.H)
        weights[f"{at}post_feedforward_layernorm.weight"] = m.vector(s.H)
        weights[f"{at}layer_scalar"] = m.vector(1)
        if k_eq_v:
            del weights[f"{at}self_attn.v_proj.weight"]
    weights["embed_tokens.weight"] = m.matrix(s.V, s.H)
    weights["lm_head.weight"] = m.matrix(s.V, s.H, 3)
    return config | extra, weights


def dflash_block7(shape: Shape = Shape()) -> Checkpoint:
    """DeepSpec's dflash_*_block7: DSpark's model with rank 0 and no confidence head."""
    config, weights = dspark_deepspec(shape)
    config |= {"markov_rank": 0, "enable_confidence_head": False}
    config |= {"confidence_head_with_markov": False}
    return config, {n: v for n, v in weights.items() if "_head." not in n or n.startswith("lm")}


def dspark_specforge(
    shape: Shape = Shape(), kind: str = "vanilla", nested: bool = False, **extra: Any
) -> Checkpoint:
    m = Maker(shape)
    config = m.qwen3() | {
        "architectures": ["DSparkDraftModel"],
        "block_size": shape.B,
        "num_target_layers": shape.target_layers,
        "dflash_config": m.blocks()
        | {
            "projector_type": "dspark",
            "attention_mode": "gqa",
            "markov_rank": shape.rank,
            "markov_head_type": kind,
            "enable_confidence_head": True,
            "confidence_head_alpha": 1.0,
            "confidence_head_with_markov": True,
        },
    }
    heads = m.heads(kind)
    if nested:
        heads = {f"logit_head.{name}": value for name, value in heads.items()}
    return config | extra, m.backbone() | heads


def speculators(
    shape: Shape = Shape(), method: str = "dspark", reduced: bool = False, **extra: Any
) -> Checkpoint:
    """transformer_layer_config as a diff against Qwen3's defaults; aux ids one above the taps."""
    m = Maker(shape)
    layer = {k: v for k, v in m.qwen3().items() if k not in ("rms_norm_eps", "attention_bias")}
    layer |= {"rope_parameters": {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}}
    config = {
        "architectures": ["DSparkSpeculator" if method == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": method,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": shape.B if method == "dspark" else shape.B - 1,
                }
            ],
            "verifier": {"name_or_path": "owner/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.Vd if reduced else shape.V,
        "block_size": shape.B,
        "target_hidden_size": shape.H,
        "mask_token_id": shape.V - 2,
        "aux_hidden_state_layer_ids": [i + 1 for i in shape.taps],
    }
    weights = m.backbone()
    if method == "dspark":
        config |= {"markov_rank": shape.rank, "markov_head_type": "vanilla"}
        config |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
        weights |= m.heads(Vd=shape.Vd if reduced else None)
    if reduced:
        weights |= m.reduced()
    return config | extra, weights


def save(folder: Path, config: Config, weights: Weights, shards: int = 1) -> Path:
    """A folder as published: one file, or shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    if shards == 1:
        save_file(dict(weights), folder / "model.safetensors")
        return folder
    index: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        save_file({n: weights[n] for n in part}, folder / file)
        index |= dict.fromkeys(part, file)
    total = sum(w.nbytes for w in weights.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    return folder


def tiny_target(shape: Shape = Shape(), tied: bool = False) -> tuple[nn.Module, Head]:
    """An mlx-lm Qwen3 of the right width and depth, and its embedding and head for NumPy."""
    rng = np.random.default_rng(shape.seed + 1)
    model = qwen3.Model(
        qwen3.ModelArgs(
            model_type="qwen3",
            hidden_size=shape.H,
            num_hidden_layers=shape.target_layers,
            intermediate_size=shape.I,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            rms_norm_eps=1e-6,
            vocab_size=shape.V,
            max_position_embeddings=512,
            rope_theta=10000.0,
            tie_word_embeddings=tied,
        )
    )
    embedding = rng.normal(size=(shape.V, shape.H)).astype(np.float32)
    model.model.embed_tokens.weight = mx.array(embedding)
    if tied:
        return model, Head(embedding, embedding)
    head = (rng.normal(size=(shape.V, shape.H)) / shape.H**0.5).astype(np.float32)
    model.lm_head.weight = mx.array(head)
    return model, Head(embedding, head)


def random_features(shape: Shape, n: int = 7) -> np.ndarray:
    rng = np.random.default_rng(shape.seed + 2)
    return rng.normal(size=(n, len(shape.taps) * shape.H)).astype(np.float32)

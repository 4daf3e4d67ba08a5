"""A trained drafter as a folder: for this package, or in SpecForge's layout."""

import json
import os
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspark import DSpark
from dspine_mlx.drafters.dspine import GATES, DSpine
from dspine_mlx.errors import InputError
from dspine_mlx.train.config import LossConfig

DSPINE_KEYS = ("transfer_rank", "message_size", "top_k")
DFLASH_KEYS = ("mask_token_id", "target_layer_ids")
DSPARK_KEYS = (  # stated twice: SpecForge nests them, other readers look at the top level
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
STATED = {"is_causal", "rms_norm_eps", "rope_theta", "max_position_embeddings", *DSPINE_KEYS}


def export(
    drafter: Drafter,
    folder: Path,
    loss: LossConfig,
    *,
    hf: bool = False,
    dtype: mx.Dtype = mx.bfloat16,
    replace: bool = False,
) -> None:
    """Write config.json and model.safetensors; the folder appears when both are complete.

    hf: SpecForge's tensor names, which servers elsewhere expect; both kinds load here.
    """
    check_layout(type(drafter.network), drafter.config.draft_vocab_size, hf)
    if folder.exists() and not replace:
        raise InputError(f"{folder} exists already; name a new folder")
    temporary = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    weights = dict(tree_flatten(drafter.network.parameters()))
    if hf and isinstance(drafter.network, DSpine):
        weights = torch_names(weights)
    if "d2t" in weights:
        weights |= vocabulary_map(weights["d2t"], drafter.config.vocab_size)
    weights = {
        n: w.astype(dtype) if mx.issubdtype(w.dtype, mx.floating) else w for n, w in weights.items()
    }
    mx.save_safetensors(
        str(temporary / "model.safetensors"), weights, {"format": "pt" if hf else "mlx"}
    )
    text = json.dumps(checkpoint_config(drafter, loss, dtype), indent=2)
    (temporary / "config.json").write_text(text + "\n", encoding="utf-8")
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
        os.replace(temporary, folder)
        shutil.rmtree(old)
    else:
        os.replace(temporary, folder)


def check_layout(method: type[DFlash], draft_vocab_size: int | None, hf: bool) -> None:
    """Whether such a drafter can be written in that layout."""
    if hf and draft_vocab_size is not None and not issubclass(method, DSpark):
        raise InputError(
            f"draft_vocab_size is {draft_vocab_size}, which the hf layout takes for DSpark only; "
            "export in the mlx layout, or leave it out"
        )


def vocabulary_map(ids: mx.array, vocab_size: int) -> dict[str, mx.array]:
    """A reduced draft vocabulary as published: d2t, offsets from its tokens to the target's ids,
    and t2d, which of the target's tokens are in it."""
    known = mx.zeros((vocab_size,), mx.bool_)
    known[ids] = True
    return {"d2t": ids.astype(mx.int64) - mx.arange(ids.size, dtype=mx.int64), "t2d": known}


def torch_names(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """DSpine's tensors under SpecForge's names: as it publishes them."""
    out = dict(weights)
    parts = mx.split(out.pop("injection.gates.weight"), len(GATES))
    out |= {f"injection.{name}.weight": part for name, part in zip(GATES, parts, strict=True)}
    out["transfer_codes"] = out.pop("transfer_codes.weight")
    out["transfer_ready"] = mx.array(True)
    return out


def checkpoint_config(drafter: Drafter, loss: LossConfig, dtype: mx.Dtype) -> dict[str, Any]:
    """config.json with the keys that public checkpoints have; of ours those that say something."""
    defaults = {f.name: f.default for f in fields(drafter.config) if f.name not in STATED}
    flat = {
        k: v for k, v in asdict(drafter.config).items() if k not in defaults or v != defaults[k]
    }
    method = type(drafter.network).__name__
    nested = {k: flat.pop(k) for k in DFLASH_KEYS}
    if isinstance(drafter.network, DSpark):
        nested |= {"projector_type": "dspark"} | {k: vars(drafter.config)[k] for k in DSPARK_KEYS}
    config: dict[str, Any] = {
        "architectures": [f"{method}DraftModel"],
        "model_type": "qwen3",
        "tie_word_embeddings": False,  # it has none; some readers want the key
    }
    if isinstance(drafter.network, DSpine):
        config["dspine_config"] = {k: flat.pop(k) for k in DSPINE_KEYS} | training_keys(loss)
    return config | flat | {"dflash_config": nested, "dtype": str(dtype).removeprefix("mlx.core.")}


def training_keys(loss: LossConfig) -> dict[str, float]:
    """How it was trained, under SpecForge's names."""
    names = (
        "ce_weight",
        "alignment_weight",
        "replacement_layers",
        "replacement_probability",
        "replacement_hold_ratio",
        "replacement_end_ratio",
        "candidate_mass_threshold",
    )
    return {name: vars(loss)[name] for name in names}

"""Exporting a trained drafter to a folder: for this package, or in SpecForge's layout."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dspine_mlx.checkpoints.names import published_weights
from dspine_mlx.drafters import method_of
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.objectives import objective_named, objective_of

STATED = {"is_causal", "rms_norm_eps", "rope_theta", "max_position_embeddings", "top_k"}


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

    hf: SpecForge's tensor names, which other servers expect; both kinds load here.
    """
    method = method_of(drafter.network)
    check_layout(method.name, asdict(drafter.config), hf)
    if folder.exists() and not replace:
        raise InputError(f"{folder} exists already; name a new folder")
    temporary = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    weights = dict(tree_flatten(drafter.network.parameters()))
    if hf:
        weights = published_weights(method.exported, weights)
        weights |= {flag: mx.array(True) for flag in method.flags}
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


def check_layout(method: str, config: Mapping[str, Any], hf: bool) -> None:
    """Raise `InputError` if a drafter with such fields can't be written in that layout."""
    objective, draft_vocab_size = objective_named(method), config.get("draft_vocab_size")
    for name, value in objective.extensions.items():
        if hf and config.get(name) == value:
            raise InputError(
                f"{name} is {value}, which other readers of the hf layout do not know; export in "
                "the mlx layout, or start a run with --export hf"
            )
    if hf and draft_vocab_size is not None and not objective.reduced_in_hf:
        raise InputError(
            f"draft_vocab_size is {draft_vocab_size}, for which {method} has no place in the hf "
            "layout; export in the mlx layout, or leave it out"
        )


def vocabulary_map(ids: mx.array, vocab_size: int) -> dict[str, mx.array]:
    """A reduced draft vocabulary as published: d2t holds offsets from its tokens to the target's
    ids, t2d marks the target's tokens that are in it."""
    known = mx.zeros((vocab_size,), mx.bool_)
    known[ids] = True
    return {"d2t": ids.astype(mx.int64) - mx.arange(ids.size, dtype=mx.int64), "t2d": known}


def checkpoint_config(drafter: Drafter, loss: LossConfig, dtype: mx.Dtype) -> dict[str, Any]:
    """Make config.json with the keys of public checkpoints, and those of ours that carry
    information."""
    defaults = {f.name: f.default for f in fields(drafter.config) if f.name not in STATED}
    flat = {
        k: v for k, v in asdict(drafter.config).items() if k not in defaults or v != defaults[k]
    }
    sections = objective_of(drafter).sections(drafter.config, loss, flat)
    config: dict[str, Any] = {
        "architectures": [f"{type(drafter.network).__name__}DraftModel"],
        "model_type": "qwen3",
        "tie_word_embeddings": False,  # it has no embeddings; some readers want the key
    }
    return config | flat | sections | {"dtype": str(dtype).removeprefix("mlx.core.")}

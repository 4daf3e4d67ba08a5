"""Facts about a target's folder, from its config and the headers of its weights."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_lm.utils import MODEL_REMAPPING

from dspine_mlx.checkpoints.files import read_config, read_json, read_tensors

DRAFTERS_OWN = {"target_layer_ids", "dflash_config", "dspine_config", "speculators_model_type"}
SIZES = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def is_target(config: dict[str, Any]) -> bool:
    """Whether a config.json describes a model that mlx-lm runs."""
    kind = config.get("model_type")
    module = MODEL_REMAPPING.get(kind, kind) if isinstance(kind, str) else ""
    if not module.isidentifier() or DRAFTERS_OWN & config.keys():
        return False
    return find_spec(f"mlx_lm.models.{module}") is not None


def target_facts(folder: Path) -> dict[str, Any]:
    """The facts by name; `problems` is empty, as for a drafter that loads."""
    config = read_config(folder)
    tensors = read_tensors(folder)
    text = config.get("text_config")
    inner = config | (text if isinstance(text, dict) else {})
    packing = config.get("quantization")
    return {
        "kind": "target",
        "model_type": config["model_type"],
        "architectures": config.get("architectures"),
        "layers": inner.get("num_hidden_layers"),
        **{name: inner.get(name) for name in SIZES},
        "context": inner.get("max_position_embeddings"),
        "chat_template": has_chat_template(folder),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "files": sorted({tensor.file.name for tensor in tensors.values()}),
        "dtypes": sorted({str(t.dtype).rpartition(".")[2] for t in tensors.values()}),
        "quantization": packing if isinstance(packing, dict) else None,
        "notes": ["a model to draft for: name it with --model, and its drafter with --draft-model"],
        "problems": [],
    }


def has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and "chat_template" in read_json(path)

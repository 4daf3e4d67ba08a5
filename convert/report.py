"""Facts about a drafter's folder, converted or not."""

from pathlib import Path
from typing import Any, TypeVar

from mlx.utils import tree_flatten

from dspine_mlx.checkpoints.detect import OURS
from dspine_mlx.checkpoints.open import Checkpoint, open_checkpoint
from dspine_mlx.convert.write import sha256
from dspine_mlx.errors import InputError
from dspine_mlx.load import check_finite, quantize_like

Kind = TypeVar("Kind", list[Any], dict[str, Any])
RANKS = ("transfer_rank", "markov_rank", "selector_rank", "emb_dim")


def report(folder: Path, check_weights: bool = False) -> dict[str, Any]:
    """Gather facts about a folder by name; `problems` lists why it would not load.

    check_weights: also read every weight, and compare files with the digests of the conversion.
    """
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    windows = sorted({config.layer_window(i) or 0 for i in range(config.num_hidden_layers)})
    causal = [config.layer_causal(i) for i in range(config.num_hidden_layers)]
    facts: dict[str, Any] = {
        "method": checkpoint.method.name,
        "layout": checkpoint.layout.name,
        "converted": OURS in checkpoint.raw,
        "source": checkpoint.raw.get(OURS, {}).get("source"),
        "target": {
            "hidden_size": config.target_hidden_size or config.hidden_size,
            "vocab_size": config.vocab_size,
            "layers": config.num_target_layers,
            "taps": list(config.target_layer_ids),
        },
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "block_size": config.block_size,
        "first_slot": config.first_slot,
        "proposals": config.num_proposals,
        "causal": causal[0] if len(set(causal)) == 1 else causal,
        "windows": windows if any(windows) else None,
        "mask_token_id": config.mask_token_id,
        "rank": next((vars(config)[name] for name in RANKS if vars(config).get(name)), None),
        "message_size": vars(config).get("message_size"),
        "draft_vocab_size": vars(config).get("draft_vocab_size"),
        "parameters": parameters(checkpoint),
        "bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        "files": sorted({tensor.file.name for tensor in checkpoint.tensors.values()}),
        "dtypes": sorted({str(t.dtype).rpartition(".")[2] for t in checkpoint.tensors.values()}),
        "quantization": checkpoint.raw.get("quantization"),
        "notes": [*checkpoint.notes, *map(str, written(checkpoint, "notes", list))],
    }
    return facts | {"problems": problems(checkpoint, check_weights)}


def written(checkpoint: Checkpoint, name: str, kind: type[Kind]) -> Kind:
    """What the conversion wrote into config.json; empty where there is nothing of that name."""
    value = checkpoint.raw.get(OURS, {}).get(name, kind())
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise InputError(f"{OURS}.{name} is {value!r} in config.json; it must be {wanted}")
    return value


def parameters(checkpoint: Checkpoint) -> int:
    """Parameter count of the unpacked drafter, without ids."""
    numbers = tree_flatten(checkpoint.build().parameters())
    return sum(value.size for name, value in numbers if name != "d2t")


def problems(checkpoint: Checkpoint, check_weights: bool) -> list[str]:
    found = []
    try:
        drafter = checkpoint.build()
        quantize_like(drafter, checkpoint.sources, checkpoint.raw)
        checkpoint.check(drafter)
        if check_weights:
            check_finite(checkpoint.arrays())
    except InputError as error:
        found.append(str(error))
    if check_weights:
        digests = written(checkpoint, "sha256", dict)
        found += [
            f"{name} is not the file that was converted: its SHA-256 differs"
            for name, digest in digests.items()
            if not (checkpoint.folder / name).is_file()
            or sha256(checkpoint.folder / name) != digest
        ]
    return found

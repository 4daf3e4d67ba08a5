"""Loading a rank's part of a target, and refusing what can't be split before anything is loaded."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, _get_classes, load_model, sharded_load

from dspine_mlx.checkpoints.files import read_config
from dspine_mlx.errors import InputError
from dspine_mlx.group.channel import Channel
from dspine_mlx.group.interrupts import uninterrupted
from dspine_mlx.group.target import PartOfTarget, plain_type
from dspine_mlx.group.watchdog import LOADING
from dspine_mlx.load import resolve, same_random_state
from dspine_mlx.models.hub import folder_of
from dspine_mlx.target.model import find_body
from dspine_mlx.target.open import opening
from dspine_mlx.target.rollback import RecurrentMark, Rollback, leaves
from dspine_mlx.verify_length.store import structure

INDEX = "model.safetensors.index.json"
HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
SAMPLES, SAMPLE = 16, 1 << 14  # bytes of each file of weights that ranks compare


def check_split(folder: Path, name: str, size: int, pipeline: bool, group: Any = None) -> None:
    """Raise `InputError` if mlx-lm can't split this model so many ways. Nothing is loaded."""
    config = read_config(folder)
    with opening(name), same_random_state():
        model_class, arguments = _get_classes(config=config)
        model = model_class(arguments.from_dict(config))  # its weights are never made
    kind = config.get("model_type")
    if pipeline:
        check_pipeline(folder, name, kind, model, size)
        return
    if not hasattr(model_class, "shard"):
        raise InputError(
            f"{name} is a {kind}, which mlx-lm can't split into tensors; try --pipeline"
        )
    inner = config | (config.get("text_config") or {})
    uneven = [f"{h} {inner[h]}" for h in HEADS if inner.get(h) and inner[h] % size]
    if uneven:
        raise InputError(f"{name} can't be split {size} ways: it has {', '.join(uneven)}")
    if group is not None:
        try:
            with same_random_state():
                model.shard(group)
        except (ValueError, AssertionError) as error:
            raise InputError(f"{name} can't be split {size} ways: {error}") from error


def check_pipeline(folder: Path, name: str, kind: Any, model: nn.Module, size: int) -> None:
    if "model" not in model and not hasattr(model, "model") or not hasattr(model.model, "pipeline"):
        raise InputError(
            f"{name} is a {kind}, which mlx-lm can't split by layers; leave --pipeline out"
        )
    layers = len(model.model.layers)
    if layers < size:
        raise InputError(f"{name} has {layers} layers, too few for a pipeline of {size}")
    if not (folder / INDEX).is_file():
        raise InputError(
            f"{name} has no {INDEX}, which --pipeline reads; mlx_lm.convert writes one"
        )


def fingerprint(folder: Path, name: str, pipeline: bool) -> dict[str, str]:
    """What all ranks must have in common: versions, config.json, and weights as far as each has
    them; of files of weights, samples."""
    packages = ", ".join(f"{p} {version(p)}" for p in ("dspine-mlx", "mlx", "mlx-lm"))
    config = hashlib.sha256((folder / "config.json").read_bytes())
    weights = hashlib.sha256()
    if folder_of(name) is not None or not pipeline:
        for path in sorted(folder.glob("model*.safetensors")):
            size = path.stat().st_size
            weights.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                for i in range(SAMPLES):
                    file.seek(max(0, size - SAMPLE) * i // (SAMPLES - 1))
                    weights.update(file.read(SAMPLE))
    return {
        "versions": packages,
        "settings (config.json)": config.hexdigest()[:16],
        "weights": weights.hexdigest()[:16],
    }


def check_alike(channel: Channel, own: dict[str, str], name: str) -> None:
    """Raise `InputError` on every rank if one has another checkpoint or other packages."""
    words = [json.loads(word) for word in channel.gather(json.dumps(own))]
    for rank, other in enumerate(words):
        for what, value in words[0].items():
            if other[what] == value:
                continue
            if what == "versions":
                channel.refuse(f"rank {rank} has {other[what]}; rank 0 has {value}")
            channel.refuse(
                f"rank {rank} has other {what} of {name} than rank 0; give every machine the same "
                "checkpoint"
            )


def check_part(name: str, channel: Channel, pipeline: bool) -> Path:
    """The target's folder; `InputError` on every rank if one finds that it can't be split, or has
    another checkpoint. For a pipeline, a model from the Hub has no weights yet."""
    problem, own, folder = "", dict[str, str](), Path()
    try:
        folder = resolve(name, patterns=patterns(pipeline))
        check_split(folder, name, channel.size, pipeline, channel.group)
        own = fingerprint(folder, name, pipeline)
    except InputError as error:
        problem = str(error)
    channel.agree(problem, LOADING)
    check_alike(channel, own, name)
    return folder


def load_part(
    name: str, channel: Channel, pipeline: bool, tokenizer_config: dict[str, Any]
) -> tuple[nn.Module, TokenizerWrapper]:
    """This rank's part of a target, checked on all ranks, and the tokenizer.

    The random state stays as it is, so a seed set before gives the text of one set after.
    """
    problem, folder = "", check_part(name, channel, pipeline)
    parts = (channel.group, None) if pipeline else (None, channel.group)
    source = str(folder) if folder_of(name) is not None or not pipeline else name
    try:
        with opening(name), same_random_state(), channel.watchdog.watching(LOADING):
            model, tokenizer = sharded_load(source, *parts, tokenizer_config=tokenizer_config)
    except InputError as error:
        problem = why_not_loaded(error, channel)
    channel.agree(problem, LOADING)
    return model, tokenizer


def why_not_loaded(error: Exception, channel: Channel) -> str:
    """What is wrong, from a rank that can't load its part: it takes part in the sum at the end of
    mlx-lm's `sharded_load`, where the others wait. `LostRank` if another one is gone."""
    cause = error.__cause__ or error
    if isinstance(cause, RuntimeError):
        channel.note(cause)
    with uninterrupted(), channel.watchdog.watching(LOADING):
        channel.settled(mx.distributed.all_sum(mx.array(1.0), stream=mx.cpu))
    return " ".join(str(error).split())


def check_rollback(target: PartOfTarget) -> None:
    """Raise `InputError` on every rank if a recurrent layer of one can't be replayed: rolling back
    by a second forward would need the others in step."""
    cache = make_prompt_cache(target.model)
    recurrent = any(type(c) is ArraysCache for c in leaves(cache))
    if target.channel.agreed(not recurrent):
        return
    tokens = mx.zeros((2,), mx.uint32)
    rollback = Rollback(cache, target.model)
    with rollback.verifying(tokens):
        target.run(tokens, cache, (), verify=True)
    records = [m.record for m in rollback.marks if isinstance(m, RecurrentMark)]
    recorder = rollback.recorder
    holds = recorder is None or recorder.explains(records)
    if not target.channel.agreed(holds):
        target.channel.refuse(
            "this target has recurrent layers that can only be rolled back by a second forward, "
            "which a group can't do; draft for it on one machine"
        )


def see_whole(target: PartOfTarget, name: str) -> None:
    """What rank 0 needs of the whole target: its structure, by which calibrations are known, and
    the whole LM head for the drafter, where mlx-lm has split it by vocabulary. Only the head is
    read once more."""
    with same_random_state():
        folder = resolve(name, patterns=patterns(target.pipelined))
        whole, _ = load_model(folder, lazy=True, strict=False)
    target.group.structure = structure(whole, dtypes=False)
    if not target.split_head:
        return
    target.lm_head = find_body(whole)[0]["lm_head"]
    assert type(target.lm_head) is plain_type(target.lm_head)
    mx.eval(target.lm_head.parameters())


def patterns(pipeline: bool) -> list[str]:
    """What to download of a model; for a pipeline no weights: mlx-lm takes only its own layers'."""
    return [p for p in DEFAULT_ALLOW_PATTERNS if not (pipeline and p.endswith("safetensors"))]

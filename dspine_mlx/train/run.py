"""A training run as a folder: its settings, built into a trainer, new or resumed."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.checkpoints.files import read_config, read_json
from dspine_mlx.checkpoints.names import parameter
from dspine_mlx.checkpoints.open import open_checkpoint
from dspine_mlx.drafters import METHODS
from dspine_mlx.drafters.config import flatten
from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.load import resolve
from dspine_mlx.target.model import Target
from dspine_mlx.target.open import open_target
from dspine_mlx.train.batches import Observe
from dspine_mlx.train.config import LossConfig, TrainConfig, read_loss
from dspine_mlx.train.data import Sequence, read_sequences
from dspine_mlx.train.features import FeatureCache, observe
from dspine_mlx.train.loop import CHECKPOINT, Source, Trainer
from dspine_mlx.train.objectives import objective_named
from dspine_mlx.train.settings import changed, parse_settings
from dspine_mlx.train.start import start_head, start_layers, start_vocabulary

SETTINGS = "run.json"
HELD_OUT = 64  # sequences taken off the end of the data when no held-out file is named
COPIED = (  # keys that a new drafter takes from its target's config.json
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "final_logit_softcapping",
)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Run:
    """All settings of a run; kept in its folder as run.json."""

    model: str
    data: str
    train: TrainConfig
    loss: LossConfig
    method: str = "dspine"
    held_out: str | None = None
    drafter: dict[str, Any] = field(default_factory=dict)  # fields of the drafter's config
    target_layers: tuple[int, ...] | None = None  # the draft layers start as these
    warm_start: str | None = None  # folder of a drafter to start from
    cache: str | None = None  # folder for the target's features
    bidirectional: bool = False  # slots see later slots (ablation)
    strict: bool = False

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        part = folder / f".{SETTINGS}.part"
        part.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        os.replace(part, folder / SETTINGS)

    @classmethod
    def read(cls, folder: Path) -> "Run":
        path = folder / SETTINGS
        if not path.is_file():
            raise InputError(f"{folder} is no training run: it has no {SETTINGS}")
        values = read_json(path)
        try:
            values["train"]["betas"] = tuple(values["train"]["betas"])
            values["train"] = TrainConfig(**values["train"])
            values["loss"] = LossConfig(**read_loss(values["loss"]))
            if values["target_layers"] is not None:
                values["target_layers"] = tuple(values["target_layers"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise InputError(f"{path} was not written by train run: {error}") from error


def new_run(
    method: str, model: str, data: str, settings: list[str], *, published: bool, **options: Any
) -> Run:
    """Make a run with the method's published constants, changed by settings such as
    loss.ce_weight=0.5; unless the drafter is to be as published, with the method's extensions."""
    objective, sections = objective_named(method), parse_settings(settings)
    extensions = {} if published else dict(objective.extensions)
    return Run(
        model,
        data,
        changed(TrainConfig(), sections["train"]),
        changed(objective.loss, read_loss(sections["loss"])),
        method,
        drafter=extensions | sections["drafter"],
        **options,
    )


@dataclass
class Job:
    """A run, loaded."""

    trainer: Trainer
    held_out: Source
    tokenizer: TokenizerWrapper
    skipped: list[str]  # one sentence for each line of the data that can't be used


def build(run: Run, folder: Path, progress: Progress = lambda what, done, total: None) -> Job:
    """Load target, data and drafter, and the last checkpoint if there is one."""
    model, tokenizer = open_target(resolve(run.model), run.model)
    target = Target(model)
    skipped: list[str] = []

    def read(path: str) -> list[Sequence]:
        return read_sequences(
            Path(path),
            tokenizer,
            max_length=run.train.max_length,
            vocab_size=target.vocab_size,
            strict=run.strict,
            warn=skipped.append,
        )

    sequences = read(run.data)
    if run.held_out is not None:
        held_out = read(run.held_out)
    else:
        sequences, held_out = split(sequences)
    mx.random.seed(run.train.seed)
    drafter = new_drafter(run, target, tokenizer, sequences)
    taps = drafter.config.target_layer_ids
    sources = [
        Source(part, features(run, name, target, taps, part, progress))
        for name, part in (("train", sequences), ("held-out", held_out))
    ]
    trainer = Trainer(drafter, sources[0], run.train, run.loss)
    if (folder / CHECKPOINT).exists():
        trainer.restore(folder)
    return Job(trainer, sources[1], tokenizer, skipped)


def split(sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Split into training and held-out sequences. Held out is the end of the data, without turns of
    a chat that is trained on."""
    first = len(sequences) - min(HELD_OUT, len(sequences) // 10)
    while 0 < first < len(sequences) and sequences[first].line == sequences[first - 1].line:
        first += 1
    return sequences[:first], sequences[first:]


def features(
    run: Run,
    name: str,
    target: Target,
    taps: tuple[int, ...],
    sequences: list[Sequence],
    progress: Progress,
) -> Observe:
    if run.cache is None or not sequences:
        return observe(target, taps)
    cache = FeatureCache(Path(run.cache) / name, target, taps, sequences)
    what = f"features ({name}, {cache.size / 1e9:.2f} GB)"
    cache.fill(sequences, lambda done, total: progress(what, done, total))
    return cache


def new_drafter(
    run: Run, target: Target, tokenizer: TokenizerWrapper, sequences: list[Sequence]
) -> Drafter:
    """Make a drafter with its starting weights, in float32, bound to the target."""
    method = METHODS[run.method]
    network = method.network(method.config.from_dict(drafter_config(run, target, tokenizer)))
    network.set_dtype(mx.float32)
    if "d2t" in network:
        start_vocabulary(network, target, sequences)
    objective_named(run.method).start(network, target)
    if run.target_layers is not None:
        start_layers(network, target, run.target_layers)
    if run.warm_start is not None:
        taken = warm_start(network, run.warm_start)
        if "d2t" in taken and "lm_head.weight" not in taken:
            start_head(network, target)
    if run.bidirectional:
        for layer in network.layers:
            layer.self_attn.causal = False
    return network.bind(target)


def drafter_config(run: Run, target: Target, tokenizer: TokenizerWrapper) -> dict[str, Any]:
    """Combine the target's shapes, the method's block size and heads, and then the run's
    settings."""
    source = flatten(read_config(resolve(run.model)))
    source |= flatten(source.get("text_config") or {})
    objective, layers = objective_named(run.method), run.drafter.get("num_hidden_layers", 5)
    config: dict[str, Any] = {name: source[name] for name in COPIED if source.get(name) is not None}
    config |= {
        "num_hidden_layers": layers,
        "vocab_size": target.vocab_size,
        "block_size": objective.block_size,
        "num_target_layers": len(target.layers),
        "target_layer_ids": spread(len(target.layers), min(layers, len(target.layers) - 1)),
        "target_hidden_size": target.hidden_size,
    }
    if tokenizer.mask_token_id is not None:
        config["mask_token_id"] = tokenizer.mask_token_id
    elif "mask_token_id" not in run.drafter:
        raise InputError(
            "the tokenizer has no mask token; name a token that texts never hold with "
            "--set drafter.mask_token_id=ID"
        )
    unknown = run.drafter.keys() - {f.name for f in fields(METHODS[run.method].config)}
    if unknown:
        raise InputError(f"a {run.method} drafter has no setting {', '.join(sorted(unknown))}")
    return config | dict(objective.settings) | run.drafter


def spread(layers: int, taps: int) -> list[int]:
    """Spread taps evenly from the second layer to the third from the end: [1, 9, 17, 25, 33] of
    36."""
    last = max(1, layers - 3)
    return sorted({1 + round(i * (last - 1) / max(1, taps - 1)) for i in range(taps)})


def warm_start(network: DFlash, path: str) -> set[str]:
    """Copy a drafter's tensors: a DFlash checkpoint has the backbone of every method. Returns their
    names."""
    weights = open_checkpoint(resolve(path)).arrays()
    own = dict(tree_flatten(network.parameters()))
    fit = {n: w for n, w in weights.items() if n in own and own[n].shape == w.shape}
    lost = sorted(weights.keys() - fit.keys())
    plain = METHODS["dflash"].converted  # a method's own parts of a layer may be new
    layers = [n for n in own if n.startswith(("layers.", "fc.")) and parameter(plain, n)]
    backbone = [n for n in layers if n not in fit]
    if lost or backbone:
        raise InputError(
            f"{path} can't start this drafter: {', '.join(lost + backbone)} do not fit its shapes"
        )
    network.load_weights([(n, w.astype(own[n].dtype)) for n, w in fit.items()], strict=False)
    return set(fit)

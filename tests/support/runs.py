"""Small runs of dspine-mlx train."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from typer.testing import CliRunner, Result

from dspine_mlx.cli.train import app

SMALL = {
    "train.steps": 4,
    "train.batch_size": 2,
    "train.num_anchors": 3,
    "train.save_every": 2,
    "train.evaluate_every": 2,
    "drafter.num_hidden_layers": 2,
    "drafter.block_size": 5,
    "drafter.target_layer_ids": [0, 2],
}
OWN: dict[str, dict[str, Any]] = {
    "dspine": {"drafter.transfer_rank": 16, "drafter.message_size": 8},
    "dspark": {"drafter.markov_rank": 4},
    "dflash": {},
}


def call(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def start(
    folder: Path, target: Path, data: Path, *extra: Any, method: str = "dspine", **settings: Any
) -> Result:
    chosen: dict[str, Any] = SMALL | OWN.get(method, {})
    chosen |= {name.replace("__", "."): value for name, value in settings.items()}
    sets = [x for n, v in chosen.items() for x in ("--set", f"{n}={json.dumps(v)}")]
    pair = ("--model", target, "--data", data, "--method", method)
    return call("run", folder, *pair, *sets, *extra)


def weights(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / "drafter" / "model.safetensors"))


def vocabulary(folder: Path) -> mx.array:
    """The target's ids of what a drafter can propose: d2t holds offsets to them."""
    saved = weights(folder)["d2t"]
    return saved + mx.arange(saved.size)


def equal(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(mx.array_equal(a[n], b[n]).item() for n in a)

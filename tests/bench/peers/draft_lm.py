"""A small language model for mlx-lm's own speculative decoding, where no published one fits.

    python -m tests.bench.peers.draft_lm runs/peers/small --target TARGET --data train.jsonl \
        --valid held-out.jsonl --layers 2 --steps 400

The target's first layers under its own embedding, final norm and head; mlx-lm's trainer then
teaches these layers the target's answers.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import mlx.core as mx
import typer
from mlx.utils import tree_flatten
from mlx_lm import load


def cut(target: Path, folder: Path, layers: int) -> None:
    """The target with its first layers only, as a folder."""
    model, _ = load(str(target))
    weights = {
        name: w
        for name, w in tree_flatten(model.parameters())
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    }
    folder.mkdir(parents=True)
    for file in target.glob("*.json"):
        shutil.copy(file, folder)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def mlx_lm(command: str, *options: object) -> None:
    subprocess.run([sys.executable, "-m", "mlx_lm", command, *map(str, options)], check=True)


def main(
    folder: Annotated[Path, typer.Argument(help="A new folder for the model.")],
    target: Annotated[Path, typer.Option(help="Folder of the target.")],
    data: Annotated[Path, typer.Option(help="The target's answers: JSONL of chats.")],
    valid: Annotated[Path, typer.Option(help="Answers that are not trained on.")],
    layers: Annotated[int, typer.Option(help="Layers to keep.")] = 2,
    steps: Annotated[int, typer.Option(help="Steps of 4 texts.")] = 400,
    learning_rate: Annotated[float, typer.Option(help="Of mlx-lm's Adam.")] = 1e-3,
) -> None:
    if folder.exists():
        raise typer.BadParameter(f"{folder} exists; name a new folder")
    work = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    cut(target, work / "cut", layers)
    for source, name in ((data, "train"), (valid, "valid")):
        shutil.copy(source, work / f"{name}.jsonl")
    model = ("--model", work / "cut", "--adapter-path", work / "learnt")
    size = ("--batch-size", 4, "--iters", steps, "--learning-rate", learning_rate)
    judge = ("--steps-per-eval", steps, "--val-batches", 10, "--save-every", steps)
    full = ("--fine-tune-type", "full", "--num-layers", -1, "--mask-prompt")
    mlx_lm("lora", "--train", "--data", work, *model, *full, *size, *judge)
    mlx_lm("fuse", *model, "--save-path", work / "fused")
    os.replace(work / "fused", folder)
    shutil.rmtree(work)


if __name__ == "__main__":
    typer.run(main)

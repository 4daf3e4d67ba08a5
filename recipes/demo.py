"""Make the drafter that ships with the package from the demo target alone.

    pip install 'dspine-mlx[train]' && pip install --no-deps reasoning-gym
    python -m recipes.demo runs/demo

Questions are drawn from word-problem templates, the target answers them, and a DSpine drafter
learns the answers. Every step is a `dspine-mlx train` command. It is printed before it runs, and
skipped or resumed if its output exists. On Linux preload a fast BLAS:
LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3 OPENBLAS_NUM_THREADS=1
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import mlx.core as mx
import typer
from mlx.utils import tree_flatten
from mlx_lm import load

from dspine_mlx.load import DEMO
from recipes.word_problems import write_questions

TRAIN_SEED, HELD_OUT_SEED = 11, 7
SETTINGS = {
    "drafter.num_hidden_layers": 3,
    "drafter.target_layer_ids": [1, 3, 5],
    "drafter.transfer_rank": 128,
    "drafter.message_size": 64,
    "drafter.injection_reach": 1,  # as in the pair that ships
    "train.batch_size": 4,
    "train.num_anchors": 24,
    "train.learning_rate": 2e-3,
    "train.short_block_size": 8,  # the first 65 % of the steps train 7 proposals of 15
    "train.short_ratio": 0.65,
    "train.save_every": 50,
    "train.evaluate_every": 100,
    "loss.reference": "distribution",  # CE against the target's: less noise than its tokens
    "loss.ce_start": 1.0,  # CE alone at first, then down to its share of .2
    "loss.ce_weight": 0.2,
    "loss.ce_hold": 0.15,
    "loss.ce_end": 0.7,
    "loss.alignment_weight": 0.1,
    "loss.replacement_layers": 2,
}


def main(
    folder: Annotated[Path, typer.Argument(help="Where everything goes.")],
    count: Annotated[int, typer.Option(help="Questions to train on.")] = 4393,
    held_out: Annotated[int, typer.Option(help="Questions to judge on.")] = 200,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 2400,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    target, run = wide_target(folder / "target"), folder / "run"
    unseen = write_questions(folder / "held-out.questions.jsonl", held_out, HELD_OUT_SEED, set())
    write_questions(folder / "train.questions.jsonl", count, TRAIN_SEED, unseen)
    for name in ("train", "held-out"):
        source, answers = folder / f"{name}.questions.jsonl", folder / f"{name}.jsonl"
        dspine("regenerate", source, answers, "--model", target, "--max-tokens", 256)
    if (run / "run.json").exists():
        dspine("run", run, "--resume", "--dtype", "float16", "--plot")
    else:
        sets = SETTINGS | {"train.steps": steps}
        options = [part for n, v in sets.items() for part in ("--set", f"{n}={json.dumps(v)}")]
        data = ("--data", folder / "train.jsonl", "--held-out", folder / "held-out.jsonl")
        start = ("--target-layers", "3,4,5", "--cache", folder / "features")
        output = ("--dtype", "float16", "--plot")
        dspine("run", run, "--model", target, *data, *start, *output, *options)
    pair = ("--model", target, "--draft-model", run / "drafter")
    dspine("eval", folder / "held-out.questions.jsonl", *pair, "--prompts", 85, "--json")


def wide_target(folder: Path) -> Path:
    """Write the demo target in float32: the CPU has no fast half precision."""
    if not folder.exists():
        model, _ = load(str(DEMO / "target"))
        part = folder.with_name(".target.part")
        part.mkdir(exist_ok=True)
        for file in (DEMO / "target").glob("*.json"):
            (part / file.name).write_bytes(file.read_bytes())
        weights = {n: w.astype(mx.float32) for n, w in tree_flatten(model.parameters())}
        mx.save_safetensors(str(part / "model.safetensors"), weights)
        part.rename(folder)
    return folder


def dspine(*args: object) -> None:
    command = ["dspine-mlx", "train", *map(str, args)]
    print("$", shlex.join(command), flush=True)
    subprocess.run([sys.executable, "-m", "dspine_mlx.cli", *command[1:]], check=True)


if __name__ == "__main__":
    typer.run(main)

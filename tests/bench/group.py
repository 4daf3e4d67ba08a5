"""Drafting that never pays, against mlx-lm's own decoding in the same group.

    python -m tests.bench.group --make /tmp/target
    mlx.launch -n 2 -- python -m tests.bench.group --model /tmp/target
    mlx.launch -n 2 -- python -m tests.bench.group --model /tmp/target --pipeline

The drafter has random weights, so every drafted token is lost, and decoding should park. Printed:
wall-clock ratios of whole calls, text by text, in which either begins in turn, and their medians:
`auto` (with a measured profile), and decoding that is parked from the start. Both should be at
least .95 on an otherwise idle machine. It takes some three minutes.

A rank that waits keeps a core busy. So on Linux each rank gets a share of the cores to itself, as
if it were a machine of its own; set OPENBLAS_NUM_THREADS to 1 there.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.generate import stream_generate
from dspine_mlx.group.in_step import plain_in_step
from dspine_mlx.group.meet import RANK, meet
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.verify_length.schedule import prepare
from tests.support.families import build, drafter_config
from tests.support.ranks import save_target
from tests.support.tiny import random_prompt

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "head_dim": 64}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def take_own_cores() -> None:
    """Leave the other ranks' cores to them."""
    if not hasattr(os, "sched_setaffinity"):
        return
    hosts = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
    rank, size = int(os.environ[RANK]), len(hosts)
    own = sorted(os.sched_getaffinity(0))[rank::size]
    assert own, f"{size} ranks need as many cores"
    os.sched_setaffinity(0, own)


def seconds(responses: Iterable[Any]) -> float:
    begun = time.perf_counter()
    tokens = sum(1 for _ in responses)
    assert tokens
    return time.perf_counter() - begun


def measure(target: Any, tokenizer: Any, args: argparse.Namespace) -> dict[str, list[float]]:
    """Ratios of whole calls' wall-clock times, plain to ours: as many texts as time allows."""
    begun = time.monotonic()
    config = drafter_config(target.model, target_layer_ids=(0, len(target.layers) - 2))
    drafter = DFlash(config).bind(target)
    mx.eval(drafter.network.parameters())
    prepare(drafter)
    say(f"costs measured in {time.monotonic() - begun:.0f} s")
    ratios: dict[str, list[float]] = {"auto": [], "parked": []}
    lengths: dict[str, int | str] = {"auto": "auto", "parked": 0}
    for seed in range(args.texts + 1):  # the first warms up
        prompt = random_prompt(64, seed)
        options: dict[str, Any] = {"max_tokens": args.tokens}
        for mode, found in ratios.items():
            drafted = {"verify_length": lengths[mode], "lookup": False} | options
            ours = partial(stream_generate, target.model, tokenizer, prompt, drafter, **drafted)
            runs: dict[str, Callable[[], Iterable[Any]]] = {
                "plain": partial(plain_in_step, target, tokenizer, prompt, Sampler(), **options),
                mode: ours,
            }
            order = runs if seed % 2 else reversed(runs)
            taken = {run: seconds(runs[run]()) for run in order}
            found.append(taken["plain"] / taken[mode])
            each = ", ".join(f"{run} {1000 * s / args.tokens:.2f}" for run, s in taken.items())
            say(f"text {seed}: {each} ms per token: {found[-1]:.3f}")
        if time.monotonic() - begun > args.seconds:
            break
    return {mode: found[1:] or found for mode, found in ratios.items()}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", type=Path, help="write a random target here, and do nothing else")
    parser.add_argument("--model")
    parser.add_argument("--pipeline", action="store_true")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--texts", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=150, help="no text begins after these")
    args = parser.parse_args()
    if args.make is not None:
        save_target(
            build("qwen3_moe", **SIZES, **HEADS, mlp_only_layers=list(range(16))), args.make, 2
        )
        path = args.make / "config.json"  # without an end, texts go on to their last token
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [-1]}))
        return
    take_own_cores()
    group = meet(args.pipeline)
    assert group is not None, "start this with mlx.launch -n 2"
    if group.follows:
        group.follow(args.model, {"trust_remote_code": False})
    with group.leading():
        _, tokenizer, none = group.load(args.model, None)
        found = measure(none.verifier, tokenizer, args)
    for mode, ratios in found.items():
        speed = f"{median(ratios):.3f} of the speed of mlx-lm's own decoding in this group"
        print(f"{mode}: {speed} ({len(ratios)} texts, {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()

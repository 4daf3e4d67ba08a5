"""Speed of `verify_length="auto"` against mlx_lm.stream_generate and fixed lengths.

All texts are made side by side, CHUNK tokens of one, then of the next (A B A B ...), so other load
on the machine hits all alike; "auto" starts with nothing learnt unless --warm. Medians over the
sweeps of plain decoding's time over the contestant's, by wall clock and by processor time.

    python -m tests.bench.do_no_harm [--drafter random|random-100m|demo|FOLDER] [--dtype float32]
        [--tokens 512] [--sweeps 5] [--fixed 1 2 3 4 7] [--temp 0]
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import make_sampler

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspine import DSpine, DSpineConfig
from dspine_mlx.load import DEMO, load, load_drafter
from dspine_mlx.target.model import Target
from dspine_mlx.verify_length.costs import Costs
from dspine_mlx.verify_length.schedule import Schedule, pair_costs
from tests.bench.loop import pair

# random-100m: target and drafter of tests.bench.loop, with random weights
PROMPTS = [
    "Mia can peel 12 shrimps a minute and saute 45 shrimps in 14 minutes. How long will it take "
    "her to peel and saute 540 shrimps?",
    "A farmer has 14 cows and sells 5 of them for 300 dollars each. How many cows are left, and "
    "how much money did the farmer get?",
    "Tom reads 20 pages on Monday and twice as many on Tuesday. How many pages did he read?",
    "A shop sells 6 boxes of 24 pencils a day. How many pencils does it sell in a week?",
]
CHUNK = 32


def random_drafter(model: nn.Module) -> Drafter:
    """A drafter of the demo target's size with random weights."""
    mx.random.seed(1)
    config = DSpineConfig.from_dict(
        {
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 2048,
            "block_size": 8,
            "mask_token_id": 3,
            "target_layer_ids": (1, 3, 5),
            "transfer_rank": 64,
            "message_size": 32,
        }
    )
    network = DSpine(config)
    network.set_dtype(Target(model).dtype)
    mx.eval(network.parameters())
    return network.bind(Target(model))


def race(contestants: dict[str, Iterator[Any]]) -> tuple[dict[str, tuple[float, float]], Any]:
    """Wall-clock and processor seconds of each after its first token, clean-up included; and the
    last response of the last."""
    times = dict.fromkeys(contestants, (0.0, 0.0))
    last = [next(c) for c in contestants.values()][-1]
    running = dict(contestants)
    while running:
        for name in list(running):
            mx.synchronize(generation_stream)
            wall, cpu = time.perf_counter(), time.process_time()
            chunk = list(islice(running[name], CHUNK))
            mx.synchronize(generation_stream)
            before = times[name]
            times[name] = (
                before[0] + time.perf_counter() - wall,
                before[1] + time.process_time() - cpu,
            )
            if len(chunk) < CHUNK:
                del running[name]
            if chunk and name == list(contestants)[-1]:
                last = chunk[-1]
    return times, last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", default="random")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--sweeps", type=int, default=5)
    parser.add_argument("--fixed", type=int, nargs="*", default=[])
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--prompts", type=Path, help="a prompt a line, in place of four here")
    parser.add_argument("--ends", action="store_true", help="let texts end where they do")
    parser.add_argument("--warm", action="store_true", help="keep what was learnt in a sweep")
    parser.add_argument("--explain", action="store_true")
    args = parser.parse_args()
    mx.disable_compile()
    model, tokenizer, _ = load(DEMO / "target")
    if args.dtype:
        model.set_dtype(getattr(mx, args.dtype))
    drafter: Drafter
    if args.drafter == "random":
        drafter = random_drafter(model)
    elif args.drafter == "random-100m":
        model, drafter = pair()
    else:
        demo = args.drafter == "demo"
        drafter = load_drafter(DEMO / "drafter" if demo else Path(args.drafter), model)
    if not args.ends:
        tokenizer._eos_token_ids = set()  # every text gets its full length
    curve = pair_costs(drafter)[0]
    row = curve.plain[0]
    print(f"plain token {1e3 * row:.2f} ms; in plain tokens: draft {curve.draft[0] / row:.2f}, ")
    print("verify", [round(v / row, 2) for v in curve.verify[0]])
    ratios: dict[str, list[tuple[float, float]]] = {}
    prompts = args.prompts.read_text(encoding="utf-8").splitlines() if args.prompts else PROMPTS
    for sweep in range(args.sweeps):
        question = [{"role": "user", "content": prompts[sweep % len(prompts)]}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
        plain = make_sampler(temp=args.temp)
        contestants: dict[str, Iterator[Any]] = {
            "plain": mlx_lm.stream_generate(
                model, tokenizer, prompt, max_tokens=args.tokens, sampler=plain
            )
        }
        if sweep == 0 or not args.warm:
            schedule = Schedule(Costs(curve), {}, print if args.explain else None)
            drafter.schedule = schedule
        for length in [*args.fixed, "auto"]:
            contestants[str(length)] = dspine_mlx.stream_generate(
                model,
                tokenizer,
                prompt,
                drafter,
                verify_length=length,
                sampler=dspine_mlx.Sampler(temp=args.temp),
                max_tokens=args.tokens,
            )
        times, last = race(contestants)
        for name, (wall, cpu) in times.items():
            ratios.setdefault(name, []).append((times["plain"][0] / wall, times["plain"][1] / cpu))
        done = last.statistics
        print({name: f"{v[-1][0]:.3f} {v[-1][1]:.3f}" for name, v in ratios.items()}, flush=True)
        print(
            f"  auto: {done.rounds} rounds of {done.acceptance_length:.2f} tokens, "
            f"{done.plain} plain tokens, {done.probes} probes; {done.verdict}"
        )
    for i, clock in enumerate(("wall", "processor")):
        medians = {n: round(statistics.median(v[i] for v in r), 3) for n, r in ratios.items()}
        print(json.dumps({f"speed over plain decoding, {clock} time": medians}))


if __name__ == "__main__":
    main()

"""Tokens per round with and without lookup drafts, as the policy chooses between the chains.

    python -m tests.bench.copies [CHATS.jsonl] [--temps 0 1] [--texts 24] [--tokens 160]

The 24 chats of copies.jsonl, or of a file (tests.bench.copy_chats makes one). Its lines are
{"messages": [..]} or {"prompt": ".."}. Rows cost nothing here, so every round offers all
15 tokens of the chain that is expected to bring more: counts do not depend on the machine. With
--speed it is the policy as users have it, and seconds of whole calls, text by text in turn: for a
quiet machine. float16 becomes float32, as CPUs have no fast half precision. Intervals (95 %) are a
bootstrap over texts.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.verify_length.auto import Auto
from dspine_mlx.verify_length.calibration import mode_of, uncalibrated
from dspine_mlx.verify_length.costs import Costs, Curve
from dspine_mlx.verify_length.store import load_calibrations
from tests.bench.seeded_drafts import interval, ratio, wide


class FreeRows(Costs):
    """All forwards take as long, whatever the clock says."""

    def __init__(self, M: int):
        rows = (1e-3,) * (M + 1)
        super().__init__(Curve((64, 2048), (1e-3, 1e-3), (1e-5, 1e-5), (rows, rows)))
        self.seen = {"plain": 1, "verify": 1, "draft": 1}

    def observe(self, name: str, seconds: float, depth: int, rows: int = 0) -> None: ...


class Attentive(Auto):
    """Reads the evidence of every draft, which does not pay for lengths where rows cost nothing."""

    needs_evidence = True


def count(
    models: tuple[Any, Any, Drafter],
    prompts: list[list[int]],
    sampler: dspine_mlx.Sampler,
    options: dict[str, Any],
    calibrated: bool,
    attentive: bool,
) -> tuple[np.ndarray, int]:
    """Tokens and rounds of each text, and how many rounds looked up."""
    drafter = models[2]
    calibration = load_calibrations(drafter).get(mode_of(sampler)) if calibrated else None
    M = drafter.config.num_proposals
    kind = Attentive if attentive else Auto
    costs, counts, lookups = FreeRows(drafter.most_offered), [], 0
    policy = kind(costs, calibration or uncalibrated(M))
    for seed, prompt in enumerate(prompts):
        mx.random.seed(seed)
        *_, last = dspine_mlx.stream_generate(
            *models[:2], prompt, drafter, sampler=sampler, verify_length=policy, **options
        )
        counts.append([last.statistics.round_tokens, last.statistics.rounds])
        lookups += last.statistics.lookups
    return np.array(counts), lookups


def speed(
    models: tuple[Any, Any, Drafter], prompts: list[list[int]], temp: float, max_tokens: int
) -> dict[str, Any]:
    """How many times as fast the texts come with lookups, each after one run to warm up."""
    drafter, seconds = models[2], np.zeros((len(prompts), 2))
    options: dict[str, Any] = {"max_tokens": max_tokens}
    options["sampler"] = dspine_mlx.Sampler(temp=temp, seeded=True)
    for i, prompt in enumerate([prompts[0], *prompts]):
        for lookup in (False, True):
            mx.random.seed(i)
            started = time.perf_counter()
            for _ in dspine_mlx.stream_generate(
                *models[:2], prompt, drafter, lookup=lookup, **options
            ):
                pass
            seconds[max(i - 1, 0), int(lookup)] = time.perf_counter() - started
    drawn = np.random.default_rng(0).integers(0, len(prompts), (2000, len(prompts)))
    without, with_ = seconds[drawn].sum(axis=1).T
    quantiles = np.quantile(without / with_, (0.025, 0.975)).round(3).tolist()
    without, with_ = seconds.sum(axis=0)
    return {"temperature": temp, "times as fast": round(without / with_, 3), "interval": quantiles}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    suite = Path(__file__).with_name("copies.jsonl")
    parser.add_argument("texts_file", type=Path, nargs="?", default=suite)
    parser.add_argument("--temps", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--uncalibrated", action="store_true")
    parser.add_argument("--speed", action="store_true", help="measure seconds in place of counts")
    parser.add_argument("--seeded", action="store_true", help="the same texts both ways")
    parser.add_argument("--unread", action="store_true", help="the policy may leave drafts unread")
    return parser.parse_args()


def read(path: Path, limit: int, tokenizer: Any) -> list[list[int]]:
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines()[:limit]:
        row = json.loads(line)
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    return prompts


def main() -> None:
    args = parse()
    model, tokenizer, drafter = dspine_mlx.load()
    assert drafter is not None
    model.update(tree_map(wide, model.parameters()))
    drafter.set_dtype(mx.float32)
    models, prompts = (model, tokenizer, drafter), read(args.texts_file, args.texts, tokenizer)
    for temp in args.temps:
        if args.speed:
            print(json.dumps(speed(models, prompts, temp, args.tokens)), flush=True)
            continue
        found, sampler = {}, dspine_mlx.Sampler(temp=temp, seeded=args.seeded)
        calibrated, attentive = not args.uncalibrated, not args.unread
        for lookup in (False, True):
            options = {"max_tokens": args.tokens, "lookup": lookup}
            found[lookup], lookups = count(models, prompts, sampler, options, calibrated, attentive)
        gains = interval(found[True], found[False])
        rounds = int(found[True][:, 1].sum())
        row = {"temperature": temp, "without": ratio(found[False]), "with": ratio(found[True])}
        print(json.dumps(row | {"gain": gains, "lookups": [lookups, rounds]}), flush=True)


if __name__ == "__main__":
    main()

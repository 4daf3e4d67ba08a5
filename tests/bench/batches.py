"""Several requests at once with the pair that ships: a drafting batch against mlx-lm's plain one.

Held-out questions of recipes/demo.py, in turn the plain batch and the drafted one on the same
questions. Seconds are the processor's, of all threads, from the end of the last prompt's prefill to
the last token; a ratio is a median over the turns. Every turn is added to the file as it is done,
and a second run goes on where the first one stopped.

    LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3 OPENBLAS_NUM_THREADS=1 \\
        MLX_DISABLE_COMPILE=1 python -m tests.bench.batches FILE [--requests 1 2 4 8 16] [--turns 5]
        [--tokens 128] [--pair shipped|useless|hopeless] [--modes drafted in-turn]

--pair useless: a drafter with random weights; hopeless: one text of random tokens among easy ones.
Without OpenBLAS rows cost full price, and drafting loses everywhere.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

import dspine_mlx
from dspine_mlx.batch.generation import Generation
from dspine_mlx.load import DEMO, load, load_drafter
from dspine_mlx.round.statistics import Speed, Statistics
from recipes.demo import HELD_OUT_SEED
from recipes.word_problems import questions
from tests.bench.do_no_harm import random_drafter

BARS = {1: 1.8, 2: 1.5, 4: 1.25, 8: 1.05, 16: 0.97}


@dataclass
class Ran:
    """One mode's texts, its seconds, and those after which each text was complete."""

    texts: list[list[int]]
    seconds: float
    done: list[float]
    statistics: list[Statistics] = field(default_factory=list)


class Pair:
    def __init__(self, kind: str):
        self.model, self.tokenizer, _ = load()
        self.model.set_dtype(mx.float32)  # CPUs have no fast half precision
        self.drafter = load_drafter(DEMO / "drafter", self.model)
        if kind == "useless":
            self.drafter = random_drafter(self.model)
        self.hopeless = kind == "hopeless"
        self.questions = list(questions(200, HELD_OUT_SEED))

    def prompts(self, count: int, turn: int) -> list[list[int]]:
        first = turn * count
        chosen = [self.questions[(first + i) % len(self.questions)] for i in range(count)]
        chats = [[{"role": "user", "content": q}] for q in chosen]
        prompts = [self.tokenizer.apply_chat_template(c, add_generation_prompt=True) for c in chats]
        if self.hopeless:
            draw = random.Random(turn)
            prompts[0] = [draw.randrange(10, 2000) for _ in prompts[0]]
        return prompts


def plain(pair: Pair, prompts: list[list[int]], tokens: int) -> Ran:
    stops = [[t] for t in pair.tokenizer.eos_token_ids]
    generator = BatchGenerator(
        pair.model,
        stop_tokens=stops,
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
    )
    uids = generator.insert(prompts, [tokens] * len(prompts))
    texts: dict[int, list[int]] = {uid: [] for uid in uids}
    done, started = dict.fromkeys(uids, 0.0), time.process_time()
    while True:
        before = time.process_time()
        prefilled, generated = generator.next()
        if not prefilled and not generated:
            break
        if any(r.end_of_prompt for r in prefilled):
            started = before
        for r in generated:
            texts[r.uid].append(r.token)
            done[r.uid] = time.process_time() - started
    generator.close()
    return Ran(list(texts.values()), max(done.values()), list(done.values()))


def drafted(pair: Pair, prompts: list[list[int]], tokens: int) -> Ran:
    generation = Generation.of(
        pair.model, pair.tokenizer, prompts, pair.drafter, max_tokens=tokens,
        completion_batch_size=len(prompts),
    )  # fmt: skip
    clock = Clock()
    for entry in generation.entries:
        entry.speed = Speed(clock.progress)
    texts: list[list[int]] = [[] for _ in prompts]
    done = [0.0] * len(prompts)
    for index, (token, *_) in generation.tokens():
        texts[index].append(token)
        done[index] = time.process_time() - clock.started
    return Ran(texts, max(done), done, [entry.statistics for entry in generation.entries])


class Clock:
    """Reads the processor's time when a prompt is in the caches."""

    def __init__(self) -> None:
        self.started = 0.0

    def progress(self, done: int, total: int) -> None:
        if done < total:
            self.started = time.process_time()


def in_turn(pair: Pair, prompts: list[list[int]], tokens: int) -> Ran:
    texts, done, seconds = [], [], 0.0
    for prompt in prompts:
        clock, text = Clock(), []
        for response in dspine_mlx.stream_generate(
            pair.model, pair.tokenizer, prompt, pair.drafter, max_tokens=tokens,
            prompt_progress_callback=clock.progress,
        ):  # fmt: skip
            text.append(response.token)
        seconds += time.process_time() - clock.started
        texts.append(text)
        done.append(seconds)
    return Ran(texts, seconds, done)


MODES: dict[str, Callable[[Pair, list[list[int]], int], Ran]] = {
    "drafted": drafted,
    "in-turn": in_turn,
}


def compare(pair: Pair, mode: str, requests: int, turn: int, tokens: int) -> dict[str, Any]:
    """One turn: the mode's speed over plain batching's, of all texts and of the slowest one."""
    prompts = pair.prompts(requests, turn)
    theirs, ours = plain(pair, prompts, tokens), MODES[mode](pair, prompts, tokens)
    speeds = [speed(ours, i) / speed(theirs, i) for i in range(requests)]
    total = sum(map(len, theirs.texts)) / theirs.seconds
    done = ours.statistics
    return {
        "requests": requests,
        "turn": turn,
        "way": mode,
        "ratio": sum(map(len, ours.texts)) / ours.seconds / total,
        "least": min(speeds),
        "plain": total,
        "same": ours.texts == theirs.texts,
        "rounds": sum(s.rounds for s in done),
        "plain_tokens": sum(s.plain for s in done),
        "tokens_per_round": sum(s.round_tokens for s in done) / max(1, sum(s.rounds for s in done)),
    }


def speed(ran: Ran, text: int) -> float:
    return len(ran.texts[text]) / ran.done[text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=list(BARS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pair", choices=("shipped", "useless", "hopeless"), default="shipped")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["drafted"])
    args = parser.parse_args()
    rows = read(args.file)
    known = {(r["pair"], r["way"], r["requests"], r["turn"]) for r in rows}
    pair = Pair(args.pair)
    for requests in args.requests:
        compare(pair, "drafted", requests, args.turns, args.tokens)  # unrecorded, to warm up
        for turn in range(args.turns):
            for mode in args.modes:
                if (args.pair, mode, requests, turn) in known:
                    continue
                row = {"pair": args.pair} | compare(pair, mode, requests, turn, args.tokens)
                rows.append(row)
                with args.file.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    report(rows)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(rows: list[dict[str, Any]]) -> None:
    """A line per pair, mode and number of requests: medians, and the ranges of the ratios."""
    print("pair      mode     requests  ratio (range)        slowest text  same  bar")
    for key in sorted({(r["pair"], r["way"], r["requests"]) for r in rows}):
        own = [r for r in rows if (r["pair"], r["way"], r["requests"]) == key]
        ratios, least = [r["ratio"] for r in own], [r["least"] for r in own]
        same = sum(r["same"] for r in own)
        bar = BARS.get(key[2], 0.97) if key[0] == "shipped" else 0.97
        print(
            f"{key[0]:9} {key[1]:8} {key[2]:8}  {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})  {statistics.median(least):12.2f}  "
            f"{same:2}/{len(own):<2} {bar}"
        )


if __name__ == "__main__":
    main()

"""Lookup without a drafter against mlx_lm.stream_generate: tokens per forward, and speed.

    LD_PRELOAD=.../libblas.so.3 python -m tests.bench.lookup_alone TARGET
        [--kinds edits json logs prose] [--texts 4] [--tokens 256] [--sweeps 3] [--temp 0]
        [--counts]

TARGET: a chat model's folder, as `python -m recipes.smollm2` makes one. Code, JSON and logs are to
be repeated with a change. Prose, which repeats little, is the counter-test; small models repeat
themselves at temperature 0, so try it at 1. Greedy texts end where they do, sampled ones get their
full length. Both ways take turns, so other load hits both alike. A forward is a round's or a plain
token's. Speeds are medians over the texts of plain decoding's time over lookup's, by wall clock and
by processor time. --counts leaves plain decoding out and takes rows to cost nothing, so that its
counts do not depend on the machine.
"""

import argparse
import inspect
import json
import random
import statistics
from collections.abc import Iterator
from itertools import islice
from typing import Any

import mlx_lm
from mlx_lm.sample_utils import make_sampler

import dspine_mlx
from dspine_mlx.round.lookup import COPIED
from dspine_mlx.verify_length import rules
from dspine_mlx.verify_length.schedule import Schedule, prepare
from tests.bench.copies import FreeRows
from tests.bench.do_no_harm import race

PROSE = [
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a child why the sky is blue and why sunsets are red.",
    "Describe a walk through an old town in autumn, with its smells and sounds.",
    "What should one think about before moving to another country?",
]


def edits() -> Iterator[str]:
    names = ("length_values", "verify_length", "contested", "token_values")
    for name in names:
        code = inspect.getsource(getattr(rules, name))
        yield (
            f"Rename the function {name} to best_{name}. Answer with the whole code and nothing "
            f"else.\n\n```python\n{code}```"
        )


def records(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    cities = ("Lyon", "Porto", "Ghent", "Turin", "Graz")
    return [
        {"id": rng.randrange(1000, 9999), "city": rng.choice(cities), "active": rng.random() < 0.5}
        for _ in range(6)
    ]


def documents() -> Iterator[str]:
    for seed in range(4):
        document = json.dumps({"users": records(seed)}, indent=2)
        yield (
            'Set "active" to true for all users. Answer with the whole JSON and nothing else.\n\n'
            f"{document}"
        )


def logs() -> Iterator[str]:
    for seed in range(4):
        rng = random.Random(seed)
        parts = ("auth", "cache", "disk", "mail")
        lines = "\n".join(
            f"2024-05-{rng.randrange(10, 28)} 12:{rng.randrange(10, 59)} {rng.choice(parts)} "
            f"worker-{rng.randrange(9)}: request finished in {rng.randrange(5, 900)} ms"
            for _ in range(12)
        )
        yield f"Repeat this log with WARN in front of every line.\n\n{lines}"


KINDS = {"edits": edits, "json": documents, "logs": logs, "prose": lambda: iter(PROSE)}


def measure(
    models: tuple[Any, Any, Any], question: str, args: argparse.Namespace
) -> tuple[tuple[float, float], dspine_mlx.GenerationResponse]:
    """How many times as fast the text came, by wall clock and processor; the last response."""
    model, tokenizer, drafter = models
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True
    )
    contestants: dict[str, Iterator[Any]] = {}
    if not args.counts:
        contestants["plain"] = mlx_lm.stream_generate(
            model, tokenizer, prompt, max_tokens=args.tokens, sampler=make_sampler(temp=args.temp)
        )
    contestants["lookup"] = dspine_mlx.stream_generate(
        model,
        tokenizer,
        prompt,
        drafter,
        max_tokens=args.tokens,
        sampler=dspine_mlx.Sampler(temp=args.temp),
    )
    times, last = race(contestants)
    (wall, cpu), (our_wall, our_cpu) = list(times.values())[0], times["lookup"]
    return (wall / our_wall, cpu / our_cpu), last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--sweeps", type=int, default=3)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--texts", type=int, default=4, help="of each kind")
    parser.add_argument("--counts", action="store_true", help="rows cost nothing; no plain text")
    parser.add_argument("--explain", action="store_true")
    args = parser.parse_args()
    models = dspine_mlx.load(args.target, "lookup")
    if args.temp > 0:
        models[1]._eos_token_ids = set()
    assert models[2] is not None
    explain = print if args.explain else None
    if args.counts:
        models[2].schedule = Schedule(FreeRows(COPIED), {}, explain)
    else:
        prepare(models[2], explain=explain)
    for kind in args.kinds:
        speeds, tokens, forwards, rounds = list[tuple[float, float]](), 0, 0, 0
        for _ in range(args.sweeps):
            for question in islice(KINDS[kind](), args.texts):
                speed, last = measure(models, question, args)
                done = last.statistics
                speeds.append(speed)
                tokens += done.plain + done.round_tokens
                forwards, rounds = forwards + done.plain + done.rounds, rounds + done.rounds
        wall, cpu = (round(statistics.median(s[i] for s in speeds), 3) for i in (0, 1))
        row = {"kind": kind, "tokens per forward": round(tokens / forwards, 3)}
        row |= {"rounds": rounds, "forwards": forwards}
        if not args.counts:
            row |= {"times as fast": wall, "by processor time": cpu}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

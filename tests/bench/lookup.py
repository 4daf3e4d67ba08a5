"""What the lookup index costs: seconds to index a prompt, per round, and bytes per token.

    python -m tests.bench.lookup [--tokens 100000]

Three texts: random tokens, tokens with the frequencies of words (Zipf), and one that repeats
itself. A round is `watch` and `add` of 5 tokens, from which chances are learnt. CPU time, so a busy
machine may run it.
"""

import argparse
import json
import statistics
import time
import tracemalloc

import numpy as np

from dspine_mlx.round.lookup import CopyChances, Lookup

ROUNDS, NEW = 400, 5


def text(kind: str, tokens: int) -> list[int]:
    rng = np.random.default_rng(0)
    if kind == "random":
        return rng.integers(0, 150_000, tokens).tolist()
    words = np.minimum(rng.zipf(1.3, tokens), 150_000)
    return words.tolist() if kind == "zipf" else np.resize(words[: tokens // 20], tokens).tolist()


def measure(tokens: list[int]) -> dict[str, float]:
    prompt, rest = tokens[: -ROUNDS * NEW], tokens[-ROUNDS * NEW :]
    started = time.thread_time()
    lookup, chances, rounds = Lookup(), CopyChances(), []
    lookup.chances = chances
    lookup.add(prompt)
    indexed = time.thread_time() - started
    for i in range(0, len(rest), NEW):
        started = time.thread_time()
        copy = lookup.watch()
        if copy is not None:
            chances.of(copy)
        lookup.add(rest[i : i + NEW])
        rounds.append(time.thread_time() - started)
    tracemalloc.start()
    other = Lookup()
    other.add(tokens)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {
        "seconds to index": round(indexed, 4),
        "ms per round": round(1e3 * statistics.mean(rounds), 4),
        "ms of the slowest of 100 rounds": round(1e3 * sorted(rounds)[-ROUNDS // 100], 4),
        "bytes per token": round(memory / len(tokens), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    args = parser.parse_args()
    for kind in ("random", "zipf", "repeating"):
        print(json.dumps({"text": kind} | measure(text(kind, args.tokens))))


if __name__ == "__main__":
    main()

"""What a round costs the host outside the two forwards, for a target of 100M parameters.

    LD_PRELOAD=.../libblas.so.3 python -m tests.bench.loop

The CPU backend evaluates in a thread of its own, so the main thread's CPU time is what Python
spends; of it, building the two forwards' graphs and launching them (mx.eval) are counted apart.
Also prints the operations in a draft's graph (on the CPU, MLX's fast ones are several each).
"""

import io
import statistics
import time
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.round.select import select
from dspine_mlx.round.speculate import speculate
from dspine_mlx.round.text import Text
from dspine_mlx.verify_length.schedule import Fixed
from tests.bench.prefill_memory import SHAPE, random_pair

ROUNDS = 20


class Timed:
    """Main-thread CPU seconds spent in calls of one method."""

    def __init__(self, owner: object, name: str):
        self.seconds, self.call = 0.0, getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: object) -> object:
        start = time.thread_time()
        result = self.call(*args)
        self.seconds += time.thread_time() - start
        return result


def pair() -> tuple[nn.Module, Drafter]:
    shape = SHAPE | {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32000,
    }
    settings = {"num_hidden_layers": 5, "transfer_rank": 256, "message_size": 128}
    return random_pair(shape, 12, settings)


def operations(drafter: Drafter) -> Counter[str]:
    """Operations in the graph of one proposal and its greedy selection."""
    features = mx.zeros((1, 4, drafter.network.feature_size))
    cache = drafter.make_cache()
    drafter.extend(features, cache)
    mx.eval([c.state for c in cache])
    dot = io.StringIO()
    mx.export_to_dot(dot, select(drafter.propose(5, features, cache)).tokens)
    lines = dot.getvalue().splitlines()
    labels = [line.split('label ="')[1].split('"')[0] for line in lines if 'label ="' in line]
    return Counter(labels)


def main() -> None:
    model, drafter = pair()
    counts = operations(drafter)
    print(f"draft graph: {sum(counts.values())} operations: {dict(counts.most_common(12))}")
    text = Text(drafter, make_prompt_cache(model) + drafter.make_cache())
    for _ in text.prefill(mx.random.randint(4, 32000, (128,)), 2048):
        pass
    tokens = speculate(text, Fixed(15), float("inf"))
    forwards = [Timed(drafter, "propose"), Timed(drafter.target, "forward")]
    forwards += [Timed(mx, "eval"), Timed(mx, "async_eval")]
    host, graphs, wall = [], [], []
    while text.statistics.rounds < ROUNDS + 3:
        rounds, cpu, start = text.statistics.rounds, time.thread_time(), time.perf_counter()
        building = sum(f.seconds for f in forwards)
        while text.statistics.rounds == rounds:
            next(tokens)
        graphs.append(sum(f.seconds for f in forwards) - building)
        host.append(time.thread_time() - cpu - graphs[-1])
        wall.append(time.perf_counter() - start)
    round_, loop, build = (1e3 * statistics.median(x[3:]) for x in (wall, host, graphs))
    print(f"median round {round_:.1f} ms; building and launching the forwards {build:.2f} ms")
    print(f"all other host time {loop:.2f} ms, {loop / round_:.2%} of a round")


if __name__ == "__main__":
    main()

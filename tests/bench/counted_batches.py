"""Batches of the shipped pair by counted steps: real texts and drafts, seconds from a table.

No clock is read, so the figures are the same on a busy machine. They show what the schedule makes
of the drafter's chances where steps cost what it believes: the speed over plain batching of the
same texts, how many rows are fed, and what packed rows (each text its own number of them) would
bring.

    python -m tests.bench.counted_batches [--pair shipped|useless|hopeless] [--requests 1 2 4 8 16]
        [--turns 3] [--tokens 128] [--no-lookup]

The table is near the demo pair's on one core: milliseconds of a plain step over 1 to 16 texts, of a
forward by rows, and of a draft by rows.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspine_mlx.batch import generation
from dspine_mlx.batch.costs import BatchCosts, BatchCurve
from dspine_mlx.batch.generation import Generation
from dspine_mlx.batch.scheduled import Scheduled
from dspine_mlx.batch.text import BatchText
from dspine_mlx.round.select import Draft
from dspine_mlx.round.text import Token
from dspine_mlx.verify_length.costs import Curve
from dspine_mlx.verify_length.schedule import prepare
from tests.bench.batches import Pair

TEXTS, PLAIN = (1, 2, 4, 8, 16), (4.1, 4.83, 5.81, 7.97, 11.56)
ROWS, FORWARD = (1, 16, 32, 128, 256), (3.2, 6.5, 10.0, 24.0, 43.0)
DRAFT, DRAFT_ROW = 3.2, 0.147


def plain(texts: int) -> float:
    return float(np.interp(texts, TEXTS, PLAIN))


def forward(texts: int, rows: int) -> float:
    return plain(texts) + float(np.interp(rows, ROWS, FORWARD) - np.interp(texts, ROWS, FORWARD))


def draft(texts: int, slots: int) -> float:
    return DRAFT + DRAFT_ROW * texts * (slots + 1)


def curve(texts: int, slots: int) -> BatchCurve:
    verify = tuple(forward(texts, texts * width) / 1e3 for width in range(1, slots + 2))
    drafts = [draft(texts, width) / 1e3 for width in range(1, slots + 1)]
    step, last = plain(texts) / 1e3, drafts[-1]
    one = Curve((8, 512), (step, step), (last, last), (verify, verify))
    return BatchCurve(texts, one, tuple(seconds / last for seconds in drafts))


class Table(BatchCosts):
    """Costs that no clock corrects."""

    def learn_plain(self, texts: int, seconds: float, depth: int) -> None: ...

    def learn_verify(self, texts: int, width: int, seconds: float, depth: int) -> None: ...

    def learn_draft(self, texts: int, slots: int, seconds: float, depth: int) -> None:
        self.newest = texts


@dataclass
class Round:
    """What a round fed, and what it would have if rows were packed."""

    fed: int
    own: int  # rows of each text's own length
    packed: int  # rows of the best lengths, if each text pays for its own only
    rate: float  # expected tokens per second of those over the round's


class Counting(Scheduled):
    """The schedule, with its time as the table has it."""

    def start(self) -> None:
        self.spent, self.counted, self.plain_steps, self.watches = 0.0, list[Round](), 0, 0

    def plain_step(self, texts: list[BatchText], tokens: list[Token], *rest: Any) -> None:
        self.spent += plain(len(texts))
        self.plain_steps += 1
        super().plain_step(texts, tokens, *rest)

    def watched(self, text: BatchText, draft_: Draft, texts: int, depth: int) -> None:
        self.spent += draft(1, self.widest)
        self.watches += 1
        super().watched(text, draft_, texts, depth)

    def learn(self, texts: list[BatchText], lengths: list[int], *rest: Any) -> None:
        B, drafted = len(texts), sum(self.chosen)
        drafting = draft(drafted, max(map(len, self.known))) if drafted else 0.0
        self.spent += drafting + forward(B, B * (1 + max(lengths)))
        self.counted.append(self.packed(texts, lengths, drafting))
        super().learn(texts, lengths, *rest)

    def packed(self, texts: list[BatchText], lengths: list[int], drafting: float) -> Round:
        """The n likeliest tokens of all texts are the best n that packed rows could offer."""
        B, fed = len(texts), len(texts) * (1 + max(lengths))
        rows = [self.copies.beside(*own) for own in zip(texts, self.own, strict=True)]
        tokens = B + sum(sum(row[: max(lengths)]) for row in rows)
        likeliest = np.cumsum([0.0, *sorted((a for row in rows for a in row), reverse=True)])
        seconds = np.array([forward(B, B + n) for n in range(len(likeliest))])
        value = min(plain(B) / B, (drafting + forward(B, fed)) / tokens)
        n = int((value * likeliest - seconds).argmax())
        rate = (B + likeliest[n]) / (drafting + seconds[n])
        best = float(rate / (tokens / (drafting + forward(B, fed))))
        return Round(fed, B + sum(lengths), B + n, best)


def policy_of(pair: Pair) -> Counting:
    schedule = prepare(pair.drafter, profile=False)
    config = pair.drafter.config
    curves = [curve(texts, config.num_proposals) for texts in TEXTS]
    policy = Counting(schedule, config.num_proposals, curves, config.causal_block)
    policy.costs = policy.trials.costs = policy.times.costs = Table(curves)
    return policy


def run(pair: Pair, policy: Counting, requests: int, turn: int, tokens: int, lookup: bool) -> str:
    """One turn, as a line."""
    prompts = pair.prompts(requests, turn)
    policy.start()
    texts = Generation.of(
        pair.model, pair.tokenizer, prompts, pair.drafter, max_tokens=tokens,
        completion_batch_size=requests, lookup=lookup,
    )  # fmt: skip
    counts, done = [0] * requests, [0.0] * requests
    for index, _ in texts.tokens():
        counts[index] += 1
        done[index] = policy.spent
    active = [sum(n > step for n in counts) for step in range(max(counts))]
    theirs = np.cumsum([plain(n) for n in active])
    ratio = theirs[-1] / policy.spent
    least = min(theirs[n - 1] / own for n, own in zip(counts, done, strict=True))
    rounds = policy.counted
    line = (
        f"{requests:8} {turn:4} {ratio:6.2f} {least:7.2f} {policy.plain_steps:6} {len(rounds):6} "
        f"{policy.watches:7}"
    )
    if not rounds:
        return line
    fed, own, packed = (sum(getattr(r, name) for r in rounds) for name in ("fed", "own", "packed"))
    rate = statistics.mean(r.rate for r in rounds)
    return f"{line} {fed:6} {own / fed:8.0%} {packed / fed:7.0%} {rate:7.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", choices=("shipped", "useless", "hopeless"), default="shipped")
    parser.add_argument("--requests", type=int, nargs="+", default=list(TEXTS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--no-lookup", dest="lookup", action="store_false")
    args = parser.parse_args()
    pair = Pair(args.pair)
    policy = policy_of(pair)
    give: Callable[..., Counting] = lambda *_: policy  # noqa: E731
    generation.batch_policy = give
    print("requests turn  ratio slowest  plain rounds watched   rows own rows  packed    rate")
    for requests in args.requests:
        for turn in range(args.turns):
            print(run(pair, policy, requests, turn, args.tokens, args.lookup), flush=True)


if __name__ == "__main__":
    main()

"""Tokens of drafted texts, compared with plain decoding's one by one, up to a million and more.

    python -m tests.bench.exactness --minutes 30 [--tokens 1000000] [--seed 1]
    python -m tests.bench.exactness --minutes 0            # only the tables

A cell is a family of targets, a kind of cache and a sampler. Each turn of a cell makes texts by
mlx_lm.stream_generate, and compares several drafted ones with them, by the drafters and verify
lengths that the sampler has seen least of. All draws come from --seed and the turn's number. Counts
are kept in runs/exactness.json, and another call goes on where the last one ended. It prints the
tables, and each difference with the turn that repeats it (--repeat). Exit status 1: there are some.

The targets are those of tests/support/families.py, with new random weights in every turn, and the
pair that ships. BLAS must be MLX's own: others round differently for one row and for several.
"""

import argparse
import itertools
import json
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.bench.exact_texts import (
    CACHES,
    FAMILIES,
    LENGTHS,
    SAMPLING,
    Pair,
    Turn,
    drafters,
    possible,
)
from tests.support.drafters import EVERY

Cell = tuple[str, str, str]  # family, caches and sampler
Compared = tuple[Cell, str, str, Pair]  # drafter, length
STATE = Path("runs/exactness.json")
LEAST = 1000  # compared tokens, from which a cell counts
SLOW = {"wrong", *EVERY}
COMPARED = 4  # drafted texts per text of plain decoding


@cache
def cells() -> list[Cell]:
    return [
        (family, caches, sampling)
        for family in FAMILIES
        for caches in CACHES
        if possible(family, caches)
        for sampling in SAMPLING
    ]


@dataclass
class State:
    """What was compared so far."""

    path: Path
    seed: int
    turns: int = 0
    texts: int = 0
    cells: Counter[str] = field(default_factory=Counter)  # tokens by family, caches and sampler
    drafts: Counter[str] = field(default_factory=Counter)  # by drafter, length and sampler
    differences: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, seed: int) -> "State":
        if not path.exists():
            return cls(path, seed)
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["seed"] != seed:
            sys.exit(f"{path} has seed {known['seed']}; give --seed {known['seed']}, or --state")
        counters = {name: Counter(known[name]) for name in ("cells", "drafts")}
        return cls(path, **known | counters)

    def write(self) -> None:
        known = {k: v for k, v in vars(self).items() if k != "path"}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(known, indent=0), encoding="utf-8")
        os.replace(fresh, self.path)

    @property
    def tokens(self) -> int:
        return sum(self.cells.values())

    def turn(self, number: int) -> tuple[Turn, Cell]:
        """The turn of that number, and its cell: every pass takes all cells, in another order."""
        done, place = divmod(number, len(cells()))
        order = random.Random(f"{self.seed} {done}").sample(cells(), len(cells()))
        return Turn(*order[place], random.Random(f"{self.seed} {number}")), order[place]

    def least(self, cell: Cell) -> tuple[str, str]:
        """The drafter and length that were compared least with this sampler. Drafters that are
        nearly always wrong take the most time, and make room once they have enough tokens."""
        family, caches, sampling = cell
        lengths = LENGTHS[:3] if caches == "a batch's" else LENGTHS
        pairs = list(itertools.product(drafters(family), lengths))
        random.Random(self.texts).shuffle(pairs)

        def due(pair: tuple[str, str]) -> tuple[bool, int]:
            compared = self.drafts["|".join((*pair, sampling))]
            return compared >= LEAST and pair[0] in SLOW, compared

        return min(pairs, key=due)

    def add(self, cell: Cell, drafter: str, length: str, pair: Pair) -> None:
        ours, wanted = pair
        self.texts += 1
        self.cells["|".join(cell)] += len(wanted)
        self.drafts["|".join((drafter, length, cell[2]))] += len(wanted)
        if ours != wanted:
            place = next(
                (i for i, (a, b) in enumerate(zip(ours, wanted, strict=False)) if a != b), len(ours)
            )
            own = {"turn": self.turns, "cell": cell, "drafter": drafter, "length": length}
            self.differences.append(own | {"at": place, "ours": ours, "wanted": wanted})
            print(json.dumps(own | {"at": place}), flush=True)


def compare(state: State, number: int, chosen: Sequence[str] | None = None) -> Iterator[Compared]:
    """The texts of a turn, by the drafters and lengths that are due, or by the one chosen."""
    turn, cell = state.turn(number)
    pairs_of = CACHES[cell[1]](turn)
    for _ in range(1 if chosen else COMPARED):
        drafter, length = chosen or state.least(cell)
        turn.rng = random.Random(f"{state.seed} {number} {drafter} {length}")
        for pair in pairs_of(drafter, length):
            yield cell, drafter, length, pair


def run(state: State, minutes: float, tokens: int) -> None:
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and (state.tokens < tokens or lacking(state)):
        for compared in compare(state, state.turns):
            state.add(*compared)
        state.turns += 1
        state.write()


def lacking(state: State) -> int:
    return sum(state.cells["|".join(cell)] < LEAST for cell in cells())


def table(counts: Counter[str], rows: int, columns: int) -> Iterator[str]:
    """Tokens by two parts of the counts' names, and in brackets the fewest of a cell in there."""
    names = [key.split("|") for key in counts]
    heads = list(dict.fromkeys(name[columns] for name in names))
    yield f"| | {' | '.join(heads)} |"
    yield "| --- |" + " --- |" * len(heads)
    for row in dict.fromkeys(name[rows] for name in names):
        line = []
        for head in heads:
            inside = [
                n
                for key, n in counts.items()
                if {(rows, row), (columns, head)} <= {*enumerate(key.split("|"))}
            ]
            line.append(f"{sum(inside):,} ({min(inside):,})" if inside else "")
        yield f"| {row} | {' | '.join(line)} |"


def report(state: State) -> None:
    print(*table(state.cells, 0, 1), "", *table(state.drafts, 0, 1), "", sep="\n")
    print(
        f"{state.tokens:,} tokens of {state.texts:,} texts compared, {len(state.differences)} texts"
        f" differ; {len(cells()) - lacking(state):,} of {len(cells()):,} cells have {LEAST:,} "
        f"tokens; seed {state.seed}, {state.turns:,} turns"
    )


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--minutes", type=float, default=10.0)
    flags.add_argument("--tokens", type=int, default=1_000_000)
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--state", type=Path, default=STATE)
    flags.add_argument("--repeat", nargs=3, metavar=("TURN", "DRAFTER", "LENGTH"))
    args = flags.parse_args()
    mx.disable_compile()
    logging.disable(logging.WARNING)  # of drafters that fit badly, which they should
    state = State.read(args.state, args.seed)
    if args.repeat:
        number, *chosen = args.repeat
        for cell, *_, (ours, wanted) in compare(state, int(number), chosen):
            print(cell, "equal" if ours == wanted else f"differ: {ours} {wanted}")
        return 0
    run(state, args.minutes, args.tokens)
    report(state)
    return int(bool(state.differences))


if __name__ == "__main__":
    sys.exit(main())

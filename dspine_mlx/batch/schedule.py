"""How many tokens to draft for several texts, and how many of them to verify: the rows of one
forward, for the most tokens.

With a_ij the chance that the first j drafted tokens of text i are accepted, and T the seconds of a
forward, a round over B texts should offer the lengths l_i of the greatest

    value (B + sum_i (a_i1 + ... + a_il_i)) - T,

value being the seconds that a token saves. All texts are fed as many rows as the widest, so one
scan over the widths finds the optimum under any cost curve, steps included. Chances are those of
the greedy path, in which no draw has a part; a rule that looked at sampled tokens would bias them.

Drafting is paid for before these chances are known, so for whom it is done and how wide the block
is depend on what the texts' last rounds were like. A text whose tokens would not pay for its share
of the drafter's rows is left out, and fed along with the others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

Survival = Sequence[Sequence[float]]  # a_ij, of each text's tokens that may be offered
Seconds = Callable[[int], float]  # of a forward over so many rows in all
Choice = tuple[list[int], int, float]  # lengths, rows that are fed, expected tokens


def padded(survival: Survival) -> Iterator[Choice]:
    """Every width that all texts can be fed. Each text offers all of its tokens that fit, as the
    rows are paid for anyway."""
    B = len(survival)
    for n in range(1 + max(map(len, survival), default=0)):
        lengths = [min(n, len(row)) for row in survival]
        tokens = B + sum(sum(row[:n]) for row in survival)
        yield lengths, B * (1 + n), tokens


def best(choices: Iterable[Choice], seconds: Seconds, value: float) -> Choice:
    """The choice that saves most, the first of equals; value: seconds that a token saves."""
    return max(choices, key=lambda choice: value * choice[2] - seconds(choice[1]))


class Plan(NamedTuple):
    """A round, as it is expected to be before it is drafted."""

    drafted: np.ndarray  # [B] bool: whom to draft for, at least one text
    slots: int  # tokens to draft for each of them
    tokens: np.ndarray  # [B] of each text
    seconds: float

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / float(self.tokens.sum())


def planned(
    survival: np.ndarray, draft: np.ndarray, verify: np.ndarray, value: float, least: int = 1
) -> Plan:
    """Whom to draft for, and the block, at least so wide: those of the greatest expected value.

    survival: [B, R, M], of R rounds as the next one may be; draft: [B, M] seconds of drafting 1 ..
    M tokens for each of 1 .. B texts; verify: [M + 1] of verifying 1 .. M + 1 rows of every text;
    value: seconds that a token saves. Each of the R rounds would verify its own best length within
    the block. Of the sets of as many texts those are compared that are likeliest to get the most
    tokens of some length, which is exact for R = 1.
    """
    B, R, M = survival.shape
    more = np.zeros((B, R, M + 1))  # tokens past the one that every text gets
    survival.cumsum(axis=-1, out=more[..., 1:])
    orders = np.unique((-more[..., 1:].mean(axis=1)).argsort(axis=0, kind="stable"), axis=1)
    gained = more[orders].cumsum(axis=0)  # [B, orders, R, M + 1] by the first 1 .. B texts
    net = value * (B + gained) - verify
    of_block = np.maximum.accumulate(net, axis=-1)[..., 1:].mean(axis=2) - draft[:, None]
    of_block = of_block[..., least - 1 :]
    last, order, best_block = np.unravel_index(of_block.argmax(), of_block.shape)
    slots, chosen = least + int(best_block), orders[: last + 1, order]
    lengths = net[last, order, :, : slots + 1].argmax(axis=1)
    tokens, drafted = np.ones(B), np.zeros(B, bool)
    tokens[chosen] += more[chosen][:, np.arange(R), lengths].mean(axis=1)
    drafted[chosen] = True
    seconds = float(draft[last, slots - 1] + verify[lengths].mean())
    return Plan(drafted, slots, tokens, seconds)

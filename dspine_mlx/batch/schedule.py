"""How many drafted tokens of each text to verify: the rows of one forward, for the most tokens.

With a_ij the chance that the first j drafted tokens of text i are accepted, and T the seconds of a
forward, a round over B texts should offer the lengths l_i of the greatest

    value (B + sum_i (a_i1 + ... + a_il_i)) - T,

value being the seconds that a token saves. As a_ij falls in j, the best choice of n rows is the n
largest a_ij of all texts: they are prefixes, and swapping a smaller for a larger one never loses.
So one scan over n finds the optimum under any cost curve, steps included. Chances are those of the
greedy path, in which no draw has a part; a rule that looked at sampled tokens would bias them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

Survival = Sequence[Sequence[float]]  # a_ij, of each text's tokens that may be offered
Seconds = Callable[[int], float]  # of a forward over so many rows in all
Choice = tuple[list[int], int, float]  # lengths, rows that are fed, expected tokens


def packed(survival: Survival) -> Iterator[Choice]:
    """The likeliest n drafted tokens for n = 0, 1, ..., where just the wanted rows are fed."""
    lengths, tokens = [0] * len(survival), float(len(survival))
    yield list(lengths), len(lengths), tokens
    pool = sorted(((a, -i) for i, row in enumerate(survival) for a in row), reverse=True)
    for n, (a, i) in enumerate(pool, 1):
        lengths[-i] += 1
        tokens += a
        yield list(lengths), len(lengths) + n, tokens


def padded(survival: Survival) -> Iterator[Choice]:
    """The same where every text is fed as many rows as the one with the most: each then offers
    all that fit, as rows are paid for anyway."""
    B = len(survival)
    for n in range(1 + max(map(len, survival), default=0)):
        lengths = [min(n, len(row)) for row in survival]
        tokens = B + sum(sum(row[:n]) for row in survival)
        yield lengths, B * (1 + n), tokens


def best(choices: Iterable[Choice], seconds: Seconds, value: float) -> Choice:
    """The choice that saves most, the first of equals; value: seconds that a token saves."""
    return max(choices, key=lambda choice: value * choice[2] - seconds(choice[1]))

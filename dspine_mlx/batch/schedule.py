"""How many drafted tokens of each text to verify: the rows of one forward, for the most tokens.

With a_ij the chance that the first j drafted tokens of text i are accepted, and T the seconds of a
forward, a round over B texts should offer the lengths l_i of the greatest

    value (B + sum_i (a_i1 + ... + a_il_i)) - T,

value being the seconds that a token saves. All texts are fed as many rows as the widest, so one
scan over the widths finds the optimum under any cost curve, steps included. Chances are those of
the greedy path, in which no draw has a part; a rule that looked at sampled tokens would bias them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

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

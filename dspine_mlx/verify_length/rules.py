"""How many drafted tokens to verify, from chances and costs: pure rules, all lossless.

With a_j the chance that the first j drafted tokens are accepted, T(k) the seconds of a forward over
k rows and w_j the seconds that token j saves if it is accepted, a round should offer

    argmax_l  a_1 w_1 + ... + a_l w_l - T(1 + l).

`verify_length` is for greedy targets and one-hot drafts, where any rule is lossless;
`sampled_verify_length` for sampled drafts, where row k may depend only on the tokens up to the one
it feeds, because the token after the last row is tested too. `token_values` finds w.

Plain floats throughout: between two forwards the processor's caches are cold, and a call into NumPy
costs more than the arithmetic of a block.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

Floats = Sequence[float]


def length_values(chances: Floats, seconds: Floats, values: Floats) -> list[float]:
    """a_1 w_1 + ... + a_l w_l - seconds[l] for l = 0, 1 .., a the running product of the chances.

    chances: of each drafted token given the ones before; seconds[l]: a forward over 1 + l rows;
    values: seconds that each token saves.
    """
    saved = accumulate(map(mul, accumulate(chances, mul), values), initial=0.0)
    return [gain - s for gain, s in zip(saved, seconds, strict=False)]


def verify_length(chances: Floats, seconds: Floats, values: Floats) -> int:
    """The length of the greatest value, even past steps in the costs."""
    net = length_values(chances, seconds, values)
    return net.index(max(net))


def sampled_verify_length(chances: Floats, greedy: Floats, seconds: Floats, values: Floats) -> int:
    """The length for a sampled draft, decided row by row.

    chances[k] is the chance of drafted token k + 1, known from the tokens before it. Whether row k
    is fed may depend on x_1 .. x_k, so on chances[: k + 1]; later slots are expected to have the
    chances of the `greedy` path. Neither it nor `values` depends on any draw. The first row that
    neither pays for itself nor leads to rows that pay ends the block. Backward induction over the
    whole table gains less than 0.5 % more (`tests/bench/stopping.py`).
    """
    accepted = 1.0
    for k in range(1, len(chances) + 1):
        accepted *= chances[k - 1]
        ahead = [accepted, *chances[k : k + 1], *greedy[k + 1 : len(chances)]]
        if verify_length(ahead, seconds[k - 1 :], values[k - 1 :]) == 0:
            return k - 1
    return len(chances)


def contested(
    copied: Floats, drafted: Floats, agreed: int, share: float | None = None
) -> tuple[list[float], list[float]]:
    """Chances of two chains that share their first `agreed` tokens, each given the other.

    Where they first differ, at most one is right. If independently the copy is right with chance p
    and the draft with chance c, then given that not both are, their chances are
    p (1 - c) / (1 - p c) and c (1 - p) / (1 - p c). Tokens that both propose have the greater of
    the two chances.

    share: the chance that it is the copy, given that one of them is right, where more is known.
    """
    agreed = min(agreed, len(copied), len(drafted))
    shared = [max(pair) for pair in zip(copied[:agreed], drafted[:agreed], strict=False)]
    ours, others = shared + list(copied[agreed:]), shared + list(drafted[agreed:])
    if agreed < min(len(copied), len(drafted)):
        p, c = copied[agreed], drafted[agreed]
        either = max(1 - p * c, 1e-9)
        ours[agreed], others[agreed] = p * (1 - c) / either, c * (1 - p) / either
        if share is not None:
            one = ours[agreed] + others[agreed]
            ours[agreed], others[agreed] = share * one, (1 - share) * one
    return ours, others


def token_values(
    chances: Floats, seconds: Floats, draft: float, plain: float, rate: float
) -> list[float]:
    """Seconds [M] that each drafted token saves if it is accepted.

    On average a token saves 1 / rate. Here it saves the difference in expected remaining time
    between starting the next round one token earlier and starting it here, which is less where the
    text is easy or where the next token is a hard one. With h_j the expected time from j tokens on
    and w_j = h_j - h_{j+1},

        h_j = min_l  draft + T(1 + l) + h_{j+1} - sum_{n <= l} A_{j,n} w_{j+n},

    by induction from the block's end down, A_{j,n} the chance that n tokens after token j are
    accepted (chances: of this block's own tokens), and no token saves more than `plain`, its own
    plain decoding. A block's end is a near horizon, so the result is the mean of this and 1 / rate.
    """
    M, average = len(chances), 1 / rate
    w = [average] * (M + 1)
    for j in range(M - 1, 0, -1):
        best, gain, accepted = -seconds[0], 0.0, 1.0
        for n, chance in enumerate(chances[j:], 1):
            accepted *= chance
            gain += accepted * w[j + n]
            if gain - seconds[n] > best:
                best = gain - seconds[n]
        w[j] = (average + min(plain, draft - best)) / 2
    return w[1:]

"""How many drafted tokens to verify, from chances and costs: pure rules, all lossless.

With a_j the chance that the first j drafted tokens stand, T(k) the seconds of a forward over k rows
and w_j the seconds that token j saves when it stands, a round should offer

    argmax_l  a_1 w_1 + ... + a_l w_l - T(1 + l).

`verify_length` is for greedy targets and one-hot drafts, where any rule is lossless;
`sampled_verify_length` for sampled drafts, where row k may depend on the tokens up to the one it
feeds, because the token after the last row is tested too. `token_values` finds w by backward
induction.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

Floats = Sequence[float]
DAMPING = 0.5  # share of a worth's distance from the average, up or down, that is kept


def length_values(chances: Floats, seconds: Floats, worth: Floats) -> list[float]:
    """a_1 w_1 + ... + a_l w_l - seconds[l] for l = 0, 1 .., a the running product of the chances.

    chances: of each drafted token given the ones before; seconds[l]: a forward over 1 + l rows;
    worth: seconds that each token saves.
    """
    saved = accumulate(map(mul, accumulate(chances, mul), worth), initial=0.0)
    return [gain - s for gain, s in zip(saved, seconds, strict=False)]


def verify_length(chances: Floats, seconds: Floats, worth: Floats) -> int:
    """The length of the greatest value. Steps in the costs are looked across."""
    worths = length_values(chances, seconds, worth)
    return worths.index(max(worths))


def sampled_verify_length(
    chances: Floats, greedy_path: Floats, seconds: Floats, worth: Floats
) -> int:
    """Rows admitted one after another, for a draft that was sampled.

    chances[k] is the chance of drafted token k + 1, known from the tokens before it. Whether row k
    is fed may depend on x_1 .. x_k, so on chances[: k + 1]; slots beyond are expected to have the
    chances of the `greedy_path`, in which no draw has a part, nor in `worth`. The first row that
    neither pays for itself nor leads to rows that pay ends the block. Backward induction over the
    whole table gains less than 0.5 % more (`tests/bench/stopping.py`).
    """
    stands = 1.0
    for k in range(1, len(chances) + 1):
        stands *= chances[k - 1]
        ahead = [stands, *chances[k : k + 1], *greedy_path[k + 1 : len(chances)]]
        if verify_length(ahead, seconds[k - 1 :], worth[k - 1 :]) == 0:
            return k - 1
    return len(chances)


def token_values(
    survival: Sequence[Floats], seconds: Floats, draft: float, plain: float, rate: float
) -> list[float]:
    """Seconds [M] that each drafted token saves if it stands: what the best round after the token
    before it would take more than the best round after it.

    Where the text is easy the next round would bring the tokens just as well, and just before a
    hard token there is nothing to be had: both make tokens there worth less than on average. With
    h_j the expected time from j tokens on and w_j = h_j - h_{j+1},

        h_j = min_l  draft + T(1 + l) + h_{j+1} - sum_{n <= l} A_{j,n} w_{j+n},

    by induction from the block's end down; beyond it a token is worth 1 / rate, and nowhere more
    than a token of plain decoding. A block's end is a near horizon, though: where drafts are dear
    worths would swing from token to token by how many rounds just fit in before it. So each is

        w_j = 1 / rate + DAMPING (min(plain, h_j - h_{j+1}) - 1 / rate),

    and h_j is what it then comes to, h_{j+1} + w_j.

    survival: rows j = 1 .. M - 1 of A_{j,1} .. A_{j,M-j}, the chance that n tokens stand in a block
    drafted after token j.
    """
    M, usual = len(survival) + 1, 1 / rate
    w = [usual] * (M + 1)
    for j in range(M - 1, 0, -1):
        best, gain = -seconds[0], 0.0
        for n, stands in enumerate(survival[j - 1], 1):
            gain += stands * w[j + n]
            if gain - seconds[n] > best:
                best = gain - seconds[n]
        w[j] = usual + DAMPING * (min(plain, draft - best) - usual)
    return w[1:]

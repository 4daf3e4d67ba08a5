"""Drafts for seeded text: the random state is known in advance, so the draw can be foreseen.

A text's slot t is drawn with a known key. For a row of its own, MLX draws by inverse CDF: it takes
the token whose interval of the running sum of p, in the order of ids, holds the key's uniform u. If
the drafter's probabilities q were the target's, the same u would pick the same token. They are only
close, and an error of one token shifts the intervals of all later ones. With c a boundary of q's
intervals, the target's boundary is taken to be normal around it, of deviation s(c):

    P(candidate with interval [a, b] is drawn) = Phi((u - a) / s(a)) - Phi((u - b) / s(b)),
    s(c) = ERROR sqrt(c (1 - c)),

which sums to 1 over the candidates. The most probable one is drafted. As the target's own draw
decides which drafts are accepted, a wrong guess only costs acceptance.
"""

from collections.abc import Callable
from functools import cache

import mlx.core as mx

from dspine_mlx.drafters.proposal import Proposal
from dspine_mlx.round.sampler import Sampler

ERROR = 0.25  # of a boundary that halves the probability, as a share of 1/2
TINY = 1e-7


def foresee(
    proposal: Proposal, sampler: Sampler, state: mx.array, error: float = ERROR
) -> tuple[mx.array, mx.array]:
    """Log chances that each candidate is drawn: of slot 1's [K], and [M - 1, K, K] of slot t's
    after each candidate of slot t - 1. state: `mx.random.state[0]` before the text's next draw."""
    ids, transitions = proposal.candidates, proposal.transitions
    M, K = ids.shape
    rows = mx.concatenate([mx.broadcast_to(proposal.first, (1, K, K)), transitions])  # [M, K, K]
    u, coins = uniforms(sampler, state, M)
    excluded = None
    if coins is not None:
        special = mx.array(sampler.xtc_special_tokens or [-1])
        ordinary = mx.all(ids[..., None] != special, axis=-1)
        excluded = (ordinary & (coins <= sampler.xtc_probability)[:, None])[:, None]
    q = sampler.draft_probs(rows, excluded)
    before = ids[:, None, :] < ids[:, :, None]  # [M, j, k]: k's interval lies before j's
    start = q @ before.astype(q.dtype).swapaxes(-1, -2)
    u = u[:, None, None]
    chances = mx.log(mx.maximum(reached(start, u, error) - reached(start + q, u, error), 0))
    return chances[0, 0], chances[1:]


def foresee_slots(
    tokens: mx.array, sampler: Sampler, state: mx.array, slots: int, error: float = ERROR
) -> Callable[[int, mx.array], mx.array]:
    """Log chances, as in `foresee`, from slots' scores [n, P] of ascending tokens [P]."""
    u, coins = uniforms(sampler, state, slots)
    special = mx.array(sampler.xtc_special_tokens or [-1])
    ordinary = mx.all(tokens[:, None] != special, axis=-1)

    def chances(slot: int, rows: mx.array) -> mx.array:
        excluded = None
        if coins is not None:
            excluded = (ordinary & (coins[slot] <= sampler.xtc_probability))[None]
        q = sampler.draft_probs(rows, excluded)
        end = mx.cumsum(q, axis=-1)
        return mx.log(
            mx.maximum(reached(end - q, u[slot], error) - reached(end, u[slot], error), 0)
        )

    return chances


def reached(boundary: mx.array, u: mx.array, error: float) -> mx.array:
    """The chance that the target's boundary lies below u."""
    c = mx.clip(boundary, TINY, 1 - TINY)
    return 0.5 * (1 + mx.erf((u - c) / (error * mx.sqrt(2 * c * (1 - c)))))


def uniforms(sampler: Sampler, state: mx.array, count: int) -> tuple[mx.array, mx.array | None]:
    """The uniforms [count] behind the sampler's next draws, and those behind XTC's coins.

    Each draw splits the state: the first half is the next state, the second half the draw's key.
    """
    with_coins = sampler.xtc_probability > 0
    keys = []
    for _ in range(count * (2 if with_coins else 1)):
        state, key = mx.random.split(state)
        keys.append(key)
    u = mx.vmap(lambda key: mx.random.uniform(key=key))(mx.stack(keys))
    return (u[1::2], u[::2]) if with_coins else (u, None)


@cache
def draws_by_inverse_cdf() -> bool:
    """Whether this version of MLX draws from a single row as described above."""
    p = mx.softmax(mx.arange(16, dtype=mx.float32) % 5)
    keys = [mx.random.key(i) for i in range(32)]
    drawn = [mx.random.categorical(mx.log(p)[None], key=key) for key in keys]
    wanted = [(mx.cumsum(p) <= mx.random.uniform(key=key)).sum()[None] for key in keys]
    return bool(mx.all(mx.concatenate(drawn) == mx.concatenate(wanted)).item())

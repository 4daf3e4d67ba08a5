"""Verification: which drafted tokens stand, such that the text follows the target's own law.

p is the target's law under the user's sampler and processors, row by row; q is the drafter's.
"""

import mlx.core as mx
from mlx_lm.sample_utils import Sampler as SamplerFunction
from mlx_lm.sample_utils import greedy_sampler

from dspine_mlx.sampling import Sampler
from dspine_mlx.selection import Draft


def accept(draft: Draft, logprobs: mx.array, sampler: SamplerFunction) -> tuple[int, int]:
    """The number n of drafted tokens that stand, and the token that follows them.

    draft: l tokens; logprobs: [l + 1, V], the target's on anchor + tokens. A draft with a law is
    put to the ratio test (Leviathan et al., arXiv:2211.17192), a one-hot draft is compared with
    what the sampler picks from each row. Evaluates once.
    """
    if draft.q is None:
        return match(draft.tokens, logprobs, sampler)
    if not isinstance(sampler, Sampler):
        raise TypeError("a sampled draft needs a Sampler whose law is known")
    p = sampler.law(logprobs)
    uniform = mx.random.uniform(shape=draft.tokens.shape)
    n = accepted(acceptance(draft, p), uniform)
    following = mx.random.categorical(mx.log(residual(draft, p, n)))
    mx.eval(n, following)
    return n.item(), following.item()


def match(tokens: mx.array, logprobs: mx.array, sampler: SamplerFunction) -> tuple[int, int]:
    """Sample every row as plain decoding would and keep the drafted tokens that agree.

    Accepts x with probability p(x), the best any rule can do for a one-hot draft. Each emitted
    token costs one sampler call on its own [1, V] row, and the random state is left as after the
    last emitted token: a seeded run draws what seeded plain decoding draws.
    """
    if sampler is greedy_sampler:
        wanted = mx.argmax(logprobs, axis=-1)
        states: list[mx.array] = []
    else:
        rows, states = [], []
        for i in range(len(logprobs)):
            rows.append(sampler(logprobs[i : i + 1]))
            states.append(mx.array(mx.random.state[0]))
        wanted = mx.concatenate(rows)
    agree = mx.cumprod((tokens == wanted[:-1]).astype(mx.int32)).sum()
    mx.eval(wanted, agree, states)
    n = agree.item()
    if states:
        mx.random.state[0][:] = states[n]
    return n, wanted[n].item()


def acceptance(draft: Draft, p: mx.array) -> mx.array:
    """min(1, p(x)/q(x)) of each drafted token: [l]. A token that q can't produce is never kept."""
    x = draft.tokens[:, None]
    p_x = mx.take_along_axis(p[:-1], x, axis=-1)[:, 0]
    q_x = mx.where(draft.candidates == x, draft.q, 0).sum(axis=-1)
    return mx.where(q_x > 0, mx.minimum(1, p_x / q_x), 0)


def accepted(probabilities: mx.array, uniform: mx.array) -> mx.array:
    """How many tokens stand before the first rejection."""
    return mx.cumprod((uniform < probabilities).astype(mx.int32)).sum()


def residual(draft: Draft, p: mx.array, n: mx.array) -> mx.array:
    """The law of the token after n accepted ones, up to a factor: [V].

    max(p_n - q_n, 0) after a rejection, p itself after all l were accepted or where rounding
    leaves nothing of the difference.
    """
    K = draft.candidates.shape[-1]
    q = mx.concatenate([draft.q, mx.zeros((1, K))])[n]
    candidates = mx.concatenate([draft.candidates, mx.zeros((1, K), draft.candidates.dtype)])[n]
    left = mx.maximum(p[n].at[candidates].add(-q), 0)
    return mx.where(left.sum() > 0, left, p[n])

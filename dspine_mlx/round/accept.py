"""Which drafted tokens are accepted, such that the text has the target's own distribution.

p is the target's distribution under the user's sampler and processors, row by row; q is the
draft's.
"""

import math
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import Sampler as SamplerFunction
from mlx_lm.sample_utils import greedy_sampler

from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft
from dspine_mlx.round.user_code import picked


class TargetLogits:
    """The target's logits [l + 1, V] after the anchor and each of the draft's first l tokens.
    Logprobs are computed only for the rows that are asked for."""

    def __init__(self, logits: mx.array):
        self.logits = logits
        self.known: mx.array | None = None  # logprobs

    def logprobs(self, rows: int) -> mx.array:
        """Logprobs [rows, V] of the first rows, as mlx-lm computes them."""
        if self.known is None or len(self.known) < rows:
            self.known = normalised(self.logits[:rows])
        return self.known[:rows]


def normalised(logits: mx.array) -> mx.array:
    """Logprobs of logits, as mlx-lm computes them."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def accept(draft: Draft, rows: TargetLogits, sampler: SamplerFunction) -> tuple[int, int]:
    """The number n of drafted tokens that are accepted, and the token that follows them.

    rows: the target's, after the anchor and the draft's first l tokens. A one-hot draft is compared
    with what the sampler picks from each row. A sampled draft takes a ratio test, as a block. If it
    has more than l tokens, the last row tests one more, which follows if it is accepted.
    """
    fed = len(rows.logits) - 1
    draft = draft.first(fed if draft.q is None else fed + 1)
    if draft.q is None and sampler is greedy_sampler:
        return match_greedy(draft.tokens, rows)
    logprobs = rows.logprobs(len(rows.logits))
    if draft.q is None:
        return match(draft.tokens, logprobs, sampler)
    if not isinstance(sampler, Sampler):
        raise TypeError("a sampled draft needs a Sampler whose probs are known")
    p, uniform = sampler.probs(logprobs), mx.random.uniform(shape=draft.tokens.shape)
    if sampler.xtc_probability > 0:
        # A block's end depends on rows after it, whose coins will be tossed again next round.
        n, weight = accepted(acceptance(draft, p), uniform), mx.array(1.0)
    else:
        reach, keep = block_chances(draft, p)
        n = longest_accepted(keep, uniform)
        weight = reach[n]
    following = mx.random.categorical(mx.log(residual(draft, p, n, weight)))
    if len(p) == len(draft.tokens):
        following = mx.where(n == len(p), draft.tokens[-1].astype(following.dtype), following)
        n = mx.minimum(n, len(p) - 1)
    mx.eval(n, following)
    return n.item(), following.item()


def match_greedy(tokens: mx.array, rows: TargetLogits) -> tuple[int, int]:
    """`match` for the greedy sampler. It picks from logprobs, which are seldom computed here.

    Subtracting the normaliser L keeps the order of logits, but rounding may make the best of them
    equal, and then the first one wins. The best logprob is above -16 for V < e^15, and numbers
    there are at most 8 eps apart: only logits as close to the best as that can round to it. (Where
    L is so large that its own rounding moves the best logprob beyond, logits are further apart than
    that, and differences of such numbers are exact.) If a row that matters has such logits, or its
    best is not finite, logprobs decide.
    """
    best = best_tokens(rows.logits)
    mx.eval(tokens, best)
    wanted, top, contenders = (x.tolist() for x in best)
    return match_best(tokens.tolist(), wanted, top, contenders, rows)


class Best(NamedTuple):
    """Of rows of logits [..., n, V], each [..., n]."""

    tokens: mx.array  # the first of the largest
    top: mx.array  # the largest
    contenders: mx.array  # how many may come to equal it


def best_tokens(logits: mx.array) -> Best:
    top = logits.max(axis=-1, keepdims=True)
    contenders = (logits >= top - 8 * mx.finfo(logits.dtype).eps).sum(axis=-1)
    return Best(mx.argmax(logits, axis=-1), top[..., 0], contenders)


def match_best(
    tokens: list[int],
    wanted: list[int],
    top: list[float],
    contenders: list[int],
    rows: TargetLogits,
) -> tuple[int, int]:
    """`match_greedy` of tokens [l] once its rows' best [l + 1] are known (see `Best`)."""
    pairs = zip(tokens, wanted, strict=False)
    n = next((i for i, (x, y) in enumerate(pairs) if x != y), len(tokens))
    finite = all(math.isfinite(x) for x in top[: n + 1])
    if not finite or contenders[: n + 1] != [1] * (n + 1):
        return match(mx.array(tokens), rows.logprobs(len(wanted)), greedy_sampler)
    return n, wanted[n]


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
    return n, picked(wanted[n].item(), logprobs.shape[-1])


def ratios(draft: Draft, p: mx.array) -> mx.array:
    """p(x)/q(x) of each drafted token: [l]. A token that q can't produce counts as 0."""
    x = draft.tokens[:, None]
    p_x = mx.take_along_axis(p[: len(x)], x, axis=-1)[:, 0]
    q_x = mx.where(draft.candidates == x, draft.q, 0).sum(axis=-1)
    return mx.where(q_x > 0, p_x / q_x, 0)


def acceptance(draft: Draft, p: mx.array) -> mx.array:
    """Token by token (Leviathan et al., arXiv:2211.17192): accept x with min(1, p(x)/q(x)): [l]."""
    return mx.minimum(1, ratios(draft, p))


def accepted(probabilities: mx.array, uniform: mx.array) -> mx.array:
    """How many tokens are accepted before the first rejection."""
    return mx.cumprod((uniform < probabilities).astype(mx.int32)).sum()


def block_chances(draft: Draft, p: mx.array) -> tuple[mx.array, mx.array]:
    """Block verification (Sun et al., arXiv:2403.10444) of l tokens: P_0 .. P_l and h_1 .. h_l.

    P_i = min(1, P_{i-1} p(x_i)/q(x_i)); with m_i = sum_v max(P_i p_i(v) - q_{i+1}(v), 0), the
    first i tokens are accepted with chance h_i = m_i / (m_i + 1 - P_i) if no longer block is; h_l =
    P_l. More tokens are accepted than one by one, and the text has the same distribution.
    """
    assert draft.q is not None
    reaches = [mx.array(1, p.dtype)]
    for ratio in ratios(draft, p):
        reaches.append(mx.minimum(1, reaches[-1] * ratio))
    reach = mx.stack(reaches)
    # q is 0 outside the candidates, so m_i = P_i - sum over the candidates of min(P_i p_i, q_{i+1})
    covered = mx.take_along_axis(p[1 : len(draft.q)], draft.candidates[1:], axis=-1)
    mass = reach[1:-1] - mx.minimum(reach[1:-1, None] * covered, draft.q[1:]).sum(axis=-1)
    mass = mx.maximum(mass, 0)
    short = mass + 1 - reach[1:-1]
    return reach, mx.concatenate([mx.where(short > 0, mass / short, 1), reach[-1:]])


def longest_accepted(chances: mx.array, uniform: mx.array) -> mx.array:
    """The largest i whose test i = 1 .. l succeeds, or 0."""
    return mx.max(mx.where(uniform < chances, mx.arange(1, len(chances) + 1), 0))


def residual(draft: Draft, p: mx.array, n: mx.array, weight: float | mx.array = 1.0) -> mx.array:
    """Probs of the token after n accepted ones, up to a factor: [V].

    max(weight p - q, 0) after a rejection, where weight is 1 token by token and P_n for a block; p
    itself after the whole draft, or where rounding leaves nothing of the difference.
    """
    assert draft.q is not None
    K, rows = draft.candidates.shape[-1], len(p)
    q = mx.concatenate([draft.q, mx.zeros((1, K), draft.q.dtype)])[n]
    candidates = mx.concatenate([draft.candidates, mx.zeros((1, K), draft.candidates.dtype)])[n]
    p_n = p[mx.minimum(n, rows - 1)]
    left = mx.maximum((weight * p_n).at[candidates].add(-q), 0)
    return mx.where(left.sum() > 0, left, p_n)

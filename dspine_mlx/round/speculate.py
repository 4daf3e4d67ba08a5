"""The round: propose, choose a length, verify, accept, roll back, yield.

A drafter proposes a block of tokens after the anchor x_0, the newest token of the text. One forward
of the target over x_0 and the first l drafted tokens gives logits for each of them. The first n are
accepted, such that the text follows the target's own distribution (arXiv:2211.17192), and the
target's token after them is the next anchor. So a round makes n + 1 tokens.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx

from dspine_mlx.round.accept import accept
from dspine_mlx.round.lookup import Copy
from dspine_mlx.round.policy import Policy
from dspine_mlx.round.select import Draft, select
from dspine_mlx.round.text import Text, Token


def speculate(text: Text, policy: Policy, budget: float) -> Iterator[Token]:
    """The text's tokens by rounds, until at most one of `budget` is left, a stop token has come, or
    the policy parks and no copy is worth a round. The text has a pending token, the first
    anchor."""
    anchor = text.anchor
    start = begin(text, anchor, policy, budget)
    while start is not None:
        limit = int(min(text.drafter.most_offered, budget - 1, text.width_limit() - 1))
        draft, length = choose(text, policy, start, limit)
        length = text.permitted(anchor, draft, length)

        logits = text.verify(anchor, draft.tokens[:length])
        n, following = accept(draft, logits, text.sampler)
        block = text.keep(draft.tokens[:n], following, logits)
        policy.learn(text.statistics.record(length, block, draft.copied is not None), length)

        budget -= len(block)
        anchor = mx.array([following], anchor.dtype)
        # The next draft needs the anchor and its features, but no reader: it is started before the
        # block is yielded, so that the device drafts while the caller reads.
        start = None if text.ends_with(block) else begin(text, anchor, policy, budget)
        yield from text.emit(block)
        if start is not None:
            text.roll_back()


class Start(NamedTuple):
    """How a round begins: with the drafter's draft, or with a copy in its place."""

    draft: Draft
    seconds: float = 0.0  # of the host, for starting the drafter's


def begin(text: Text, anchor: mx.array, policy: Policy, budget: float) -> Start | None:
    """Start a round after the anchor: the drafter's, unless a copy is worth more than that usually
    is. None: at most one token is left, or plain decoding is worth more."""
    if budget < 2:
        return None
    copy = text.lookup.watch() if text.lookup is not None else None
    if copy is not None and policy.copy_pays(copy, text.position):
        return Start(copied(copy))
    if policy.parked:
        return None
    return Start(*propose(text, anchor, policy))


def choose(text: Text, policy: Policy, start: Start, limit: int) -> tuple[Draft, int]:
    """The draft to offer, and how many of its tokens: at most limit."""
    draft, seconds = start
    copy, length = policy.choose(draft, text.lookup, limit, text.position, seconds)
    if copy is not None and draft.copied is None:
        draft = copied(copy, draft)
    return draft, length


def copied(copy: Copy, draft: Draft | None = None) -> Draft:
    """A copy as a draft, after the draft's tokens before it. Copied tokens are one-hot."""
    tokens = mx.array(copy.tokens, mx.uint32)
    if draft is None or not copy.after:
        return Draft(tokens, tokens[:, None], None, copied=copy)
    candidates, q = tokens[:, None], None
    if draft.q is not None:  # of as many candidates as the drafted tokens have
        K = draft.q.shape[1]
        candidates = mx.broadcast_to(candidates, (len(tokens), K))
        one = mx.broadcast_to(mx.arange(K) == 0, candidates.shape).astype(draft.q.dtype)
        candidates = mx.concatenate([draft.candidates, candidates.astype(draft.candidates.dtype)])
        q = mx.concatenate([draft.q, one])
    tokens = mx.concatenate([draft.tokens[: copy.after].astype(mx.uint32), tokens])
    return Draft(tokens, tokens[:, None] if q is None else candidates, q, copied=copy)


def propose(text: Text, anchor: mx.array, policy: Policy) -> tuple[Draft, float]:
    """Start drafting after the anchor, and time how long that takes the host, in seconds. Nothing
    is waited for: the device drafts from here on."""
    started = time.perf_counter()
    proposal = text.context.propose(anchor, text.features)
    kernels, evidence = text.drafter.kernels, policy.needs_evidence
    draft = select(proposal, text.draft_sampler, kernels, text.stops, evidence)
    mx.async_eval(draft.tokens, draft.evidence, draft.greedy_path)
    return draft, time.perf_counter() - started

"""The round: propose, choose a length, verify, accept, roll back, yield.

A drafter proposes a block of tokens after the anchor x_0, the newest token of the text. One forward
of the target over x_0 and the first l drafted tokens gives logits for each of them. The first n are
accepted, such that the text follows the target's own distribution (arXiv:2211.17192), and the
target's token after them is the next anchor. So a round makes n + 1 tokens.
"""

import time
from collections.abc import Iterator

import mlx.core as mx

from dspine_mlx.round.accept import accept
from dspine_mlx.round.lookup import Copy
from dspine_mlx.round.policy import Policy
from dspine_mlx.round.select import Draft, select
from dspine_mlx.round.text import Text, Token


def speculate(text: Text, policy: Policy, budget: float) -> Iterator[Token]:
    """The text's tokens by rounds, until at most one of `budget` is left, a stop token has come, or
    the policy parks. The text has a pending token, its first anchor; budget is at least 2."""
    anchor = text.anchor
    draft, seconds = propose(text, anchor, policy)
    while True:
        limit = int(min(len(draft.tokens), budget - 1, text.width_limit() - 1))
        copy = text.lookup.draft(limit) if text.lookup is not None and policy.copies else None
        draft, length = choose(text, policy, draft, copy, limit, seconds)
        length = text.permitted(anchor, draft, length)

        logits = text.verify(anchor, draft.tokens[:length])
        n, following = accept(draft, logits, text.sampler)
        block = text.keep(draft.tokens[:n], following, logits)
        policy.learn(text.statistics.record(length, block, draft.copied is not None), length)
        if copy is not None and policy.copies is not None:
            policy.copies.learn(copy, [token for token, *_ in block])

        budget -= len(block)
        anchor = mx.array([following], anchor.dtype)
        last = budget < 2 or policy.parked or text.ends_with(block)
        # The next draft needs the anchor and its features, but no reader: it is started before the
        # block is yielded, so that the device drafts while the caller reads.
        if not last:
            draft, seconds = propose(text, anchor, policy)
        yield from text.emit(block)
        if last:
            return
        text.roll_back()


def choose(
    text: Text, policy: Policy, draft: Draft, copy: Copy | None, limit: int, seconds: float
) -> tuple[Draft, int]:
    """The draft to offer, the drafter's or the copy, and how many of its tokens."""
    if copy is not None and policy.copies is not None:
        tokens, chances = mx.array(copy.tokens, mx.uint32), policy.copies.of(copy, text.stops)
        copied = Draft(tokens, tokens[:, None], None, copied=chances)
        length = policy.copied_length(copied, draft, limit, text.position)
        if length:
            return copied, length
    return draft, policy.length(draft, limit, text.position, seconds)


def propose(text: Text, anchor: mx.array, policy: Policy) -> tuple[Draft, float]:
    """Start drafting after the anchor, and time how long that takes the host, in seconds. Nothing
    is waited for: the device drafts from here on."""
    started = time.perf_counter()
    proposal = text.context.propose(anchor, text.features)
    kernels, evidence = text.drafter.kernels, policy.needs_evidence
    draft = select(proposal, text.draft_sampler, kernels, text.stops, evidence)
    mx.async_eval(draft.tokens, draft.evidence, draft.greedy_path)
    return draft, time.perf_counter() - started

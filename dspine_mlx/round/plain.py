"""Decoding while the policy parks, and the draft that is only watched."""

import time
from collections.abc import Iterator

import mlx.core as mx

from dspine_mlx.round.accept import normalised
from dspine_mlx.round.policy import Policy
from dspine_mlx.round.speculate import propose
from dspine_mlx.round.text import Text, Token
from dspine_mlx.round.user_code import picked, within


def decode_plainly(text: Text, policy: Policy, budget: float) -> Iterator[Token]:
    """One token per forward, until `budget` tokens, a stop token, or the policy drafts again or
    wants what follows the newest tokens to be copied.

    As in mlx-lm, the next forward always runs while a token is yielded. A probe's draft runs beside
    it. Features wait in a backlog for the drafter's cache.
    """
    text.roll_back()
    token, logprobs = step(text, text.anchor, more=budget > 1)
    text.fed_pending()
    depth = text.position
    while budget > 0:
        text.advance()
        depth += 1
        text.statistics.plain += 1
        if budget == 1 or not policy.parked or copy_due(text, policy, depth):
            read = picked(token.item(), logprobs.size)
            text.pending = token
            text.ranks.arrived()
            text.note([read])
            yield read, logprobs, False
            return
        if policy.probe_due(depth):
            draft, _ = propose(text, token, policy)
            policy.start_probe(draft)
        started = time.perf_counter()
        following = step(text, token, more=budget > 2)
        read = picked(token.item(), logprobs.size)
        text.ranks.arrived()
        text.note([read])
        policy.plain_token(read, logprobs, started, depth)
        text.rows = 1  # the token's own, as it is yielded
        yield read, logprobs, False
        if read in text.stops:
            return
        budget -= 1
        token, logprobs = following


def copy_due(text: Text, policy: Policy, depth: int) -> bool:
    """Whether a copy pays in place of plain tokens. The forward that makes its first token runs
    already, so the round would start after it."""
    copy = text.lookup.watch() if text.lookup is not None else None
    return copy is not None and policy.copy_pays(copy, depth, running=1)


def step(text: Text, token: mx.array, more: bool) -> tuple[mx.array, mx.array]:
    """A forward over one token [1]: the token after it [1] and its logprobs [V], both started.
    more: the next step feeds that token.

    The features are not started here: their layers are evaluated anyway.
    """
    fed = within(token, text.drafter.target.vocab_size, text.sampler)
    logprobs = normalised(text.processed(text.feed(fed, more=more)))
    sampled, row = text.sampler(logprobs), logprobs.squeeze(0)
    mx.async_eval(sampled, row)
    return sampled, row

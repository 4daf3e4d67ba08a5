"""Plain decoding of several texts: one token for each per forward of the target.

As in mlx-lm's batches, the next forward runs while the tokens of this one are read.
"""

import time
from collections.abc import Sequence

import mlx.core as mx

from dspine_mlx.batch.batch import Ahead, Batch
from dspine_mlx.batch.policy import BatchPolicy
from dspine_mlx.batch.text import BatchText, Sampling
from dspine_mlx.round.accept import normalised
from dspine_mlx.round.text import Token
from dspine_mlx.round.user_code import picked


def decode_plainly(batch: Batch, policy: BatchPolicy) -> list[list[Token]]:
    """One step: a token for each text."""
    texts, depth = list(batch.texts), batch.depth
    waiting, overlapped = time.perf_counter(), batch.ahead is not None
    this = batch.ahead or step(batch, batch.anchors, policy.reads(texts, depth))
    batch.ahead = None
    for i, text in enumerate(texts):
        if text.has_history:
            text.take_rows(this.fed[i : i + 1])
    batch.features = this.features
    batch.accept([1] * len(texts), lambda: policy.keeps_context(texts, depth))
    if policy.stays_plain(texts, depth) and min(text.left for text in texts) > 1:
        batch.ahead = step(batch, this.tokens, policy.reads(texts, depth))
    vocabulary = batch.drafter.target.vocab_size
    tokens = [picked(token, vocabulary) for token in this.tokens.tolist()]
    now = time.perf_counter()
    seconds = now - this.started
    if batch.ahead is not None:
        batch.ahead = batch.ahead._replace(started=now)  # the device begins with it only now
    # Where nothing ran ahead, or the caller was slow, a step's time is not its own.
    timed = overlapped and now - waiting > 0.5 * seconds
    blocks = []
    for text, token, row in zip(texts, tokens, this.logprobs, strict=True):
        text.text.statistics.plain += 1
        text.text.note([token])
        blocks.append(text.go_on([(token, row, False)]))
    made = [block[0] for block in blocks]
    policy.plain_step(texts, made, seconds if timed else None, depth)
    at = policy.watch(texts, depth)
    if at is not None and not texts[at].over:
        policy.watched(texts[at], batch.watch(at), len(texts), depth)
    return blocks


def step(batch: Batch, fed: mx.array, tapped: bool = True) -> Ahead:
    """Start a forward over a token of each text [B], and the choice of the tokens that follow.
    tapped: whether features are read for the drafter."""
    texts, started = batch.texts, time.perf_counter()
    if fed.dtype != mx.uint32:  # a user's sampler picked some, and nobody has read them yet
        fed = mx.clip(fed, 0, batch.drafter.target.vocab_size - 1).astype(mx.uint32)
    keys = [text.key for text in texts]
    logits = batch.feed(fed[:, None], tapped=tapped)[:, 0]
    logprobs = normalised(logits)
    following, rows = choose(texts, fed, logits, logprobs)
    mx.async_eval(following, logprobs, rows)
    return Ahead(fed, following, list(rows), batch.features, keys, started)


def choose(
    texts: list[BatchText], fed: mx.array, logits: mx.array, logprobs: mx.array
) -> tuple[mx.array, Sequence[mx.array]]:
    """The tokens [B] that follow the tokens fed [B], and the logprobs [V] that each text's is
    picked from. Texts that sample alike share a call."""
    kinds: dict[Sampling, list[int]] = {}
    for i, text in enumerate(texts):
        kinds.setdefault(text.sampling, []).append(i)
    if len(kinds) == 1 and None not in kinds:
        return texts[0].text.sampler(logprobs), logprobs
    rows, picks, order = list(logprobs), [], []
    for i in kinds.pop(None, []):
        token, rows[i] = sampled(texts[i], fed[i : i + 1], logits[i : i + 1])
        picks.append(token.astype(mx.int64))
        order.append(i)
    for alike in kinds.values():
        picks.append(texts[alike[0]].text.sampler(logprobs[mx.array(alike)]))
        order += alike
    tokens = mx.concatenate([pick.astype(mx.int64) for pick in picks])
    return tokens[mx.argsort(mx.array(order))], rows


def sampled(text: BatchText, fed: mx.array, logits: mx.array) -> tuple[mx.array, mx.array]:
    """What the text's own sampler picks [1] from logits [1, V], and its logprobs [V]."""
    logprobs = normalised(text.processed(fed, logits).logits)
    return text.sampled(logprobs), logprobs[0]

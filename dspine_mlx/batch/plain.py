"""Plain decoding of several texts: one token for each per forward of the target.

As in mlx-lm's batches, the next forward runs while the tokens of this one are read.
"""

import time

import mlx.core as mx

from dspine_mlx.batch.batch import Ahead, Batch
from dspine_mlx.batch.policy import BatchPolicy
from dspine_mlx.batch.text import BatchText
from dspine_mlx.round.accept import normalised
from dspine_mlx.round.text import Token
from dspine_mlx.round.user_code import picked


def decode_plainly(batch: Batch, policy: BatchPolicy) -> list[list[Token]]:
    """One step: a token for each text."""
    texts, waiting, overlapped = list(batch.texts), time.perf_counter(), batch.ahead is not None
    this, batch.ahead = batch.ahead or step(batch, batch.anchors), None
    for i, text in enumerate(texts):
        if text.has_history:
            text.take_rows(this.fed[i : i + 1])
    batch.features = this.features
    batch.accept([1] * len(texts))
    if policy.stays_plain(texts, batch.depth) and min(text.left for text in texts) > 1:
        batch.ahead = step(batch, this.tokens)
    tokens = [
        picked(token, len(row))
        for token, row in zip(this.tokens.tolist(), this.logprobs, strict=True)
    ]
    now = time.perf_counter()
    seconds = now - this.started
    if batch.ahead is not None:
        batch.ahead = batch.ahead._replace(started=now)  # the device begins with it only now
    # Where nothing ran ahead, or the caller was slow, a step's time is not its own.
    timed = overlapped and now - waiting > 0.5 * seconds
    policy.plain_step(texts, seconds if timed else None, batch.depth)

    blocks = []
    for text, token, row in zip(texts, tokens, this.logprobs, strict=True):
        text.text.statistics.plain += 1
        blocks.append(text.go_on([(token, row, False)]))
    return blocks


def step(batch: Batch, fed: mx.array) -> Ahead:
    """Start a forward over a token of each text [B], and the choice of the tokens that follow."""
    texts, started = batch.texts, time.perf_counter()
    fed = mx.clip(fed, 0, batch.drafter.target.vocab_size - 1).astype(mx.uint32)  # not read yet
    keys = [text.key for text in texts]
    logits = batch.feed(fed[:, None])
    logprobs = normalised(logits[:, 0])
    following, rows = mx.argmax(logprobs, axis=-1).astype(mx.int64), list(logprobs)
    for i, text in enumerate(texts):
        if not text.plainly_greedy:
            token, rows[i] = sampled(text, fed[i : i + 1], logits[i])
            following[i : i + 1] = token.astype(mx.int64)
    mx.async_eval(following, rows)
    return Ahead(fed, following, rows, batch.features, keys, started)


def sampled(text: BatchText, fed: mx.array, logits: mx.array) -> tuple[mx.array, mx.array]:
    """What the text's own sampler picks [1] from logits [1, V], and its logprobs [V]."""
    logprobs = normalised(text.processed(fed, logits).logits)
    return text.sampled(logprobs), logprobs[0]

"""Plain decoding of several texts: one token for each per forward of the target."""

import time

import mlx.core as mx

from dspine_mlx.batch.batch import Batch
from dspine_mlx.batch.policy import BatchPolicy
from dspine_mlx.batch.text import BatchText
from dspine_mlx.round.accept import normalised
from dspine_mlx.round.text import Token


def decode_plainly(batch: Batch, policy: BatchPolicy) -> list[list[Token]]:
    """One step: a token for each text."""
    texts, started = list(batch.texts), time.perf_counter()
    fed = batch.anchors[:, None]
    logits = batch.feed(fed)
    logprobs = normalised(logits[:, 0])
    best = mx.argmax(logprobs, axis=-1)
    tokens, rows = [], []
    for i, text in enumerate(texts):
        if text.plainly_greedy:
            tokens.append(best[i : i + 1])
            rows.append(logprobs[i])
        else:
            token, row = sampled(text, fed[i], logits[i])
            tokens.append(token)
            rows.append(row)
    picked = mx.concatenate(tokens)
    mx.eval(picked, rows)
    policy.plain_step(len(texts), time.perf_counter() - started, batch.depth)

    batch.accept([1] * len(texts))
    blocks = []
    for i, (text, token) in enumerate(zip(texts, picked.tolist(), strict=True)):
        text.text.statistics.plain += 1
        blocks.append(text.go_on(fed[i], [(token, rows[i], False)]))
    return blocks


def sampled(text: BatchText, fed: mx.array, logits: mx.array) -> tuple[mx.array, mx.array]:
    """What the text's own sampler picks [1] from logits [1, V], and its logprobs [V]."""
    logprobs = normalised(text.processed(fed, logits).logits)
    with text.drawing():
        return text.text.sampler(logprobs), logprobs[0]

"""The round over several texts: one forward of the drafter, one of the target, and a block of
tokens for each text.

It is the round of `dspine_mlx.round.speculate` with a text axis. Each text has its own length,
number of accepted tokens and rollback. Lengths come from what is known before any token of a
sampled draft is drawn (the greedy path's chances), so they depend on histories only and every text
follows the target's distribution, whatever the others do.
"""

import time
from typing import Any

import mlx.core as mx

from dspine_mlx.batch.batch import Batch
from dspine_mlx.batch.policy import BatchPolicy
from dspine_mlx.batch.select import nothing
from dspine_mlx.batch.text import BatchText
from dspine_mlx.round.accept import TargetLogits, best_tokens, match_best
from dspine_mlx.round.select import Draft
from dspine_mlx.round.text import Token

Outcome = tuple[int, int]  # accepted tokens, and the one that follows them


def speculate(batch: Batch, policy: BatchPolicy) -> list[list[Token]]:
    """One round: a block of at least one token for each text."""
    texts = list(batch.texts)
    batch.cancel()
    if policy.copies_only:
        drafts, started = [nothing() for _ in texts], time.perf_counter()
    else:
        batch.draft_for(policy.drafted(texts, batch.depth))
        started = time.perf_counter()
        drafts = batch.draft(policy.slots(texts, batch.depth), policy.needs_evidence)
    mx.eval([[draft.tokens, draft.evidence, draft.greedy_path] for draft in drafts])
    drafted = time.perf_counter()

    drafts, lengths = policy.choose(texts, drafts, batch.depth)
    lengths = [
        text.permitted(draft, length)
        for text, draft, length in zip(texts, drafts, lengths, strict=True)
    ]
    fed, logits = batch.verify(drafts, max(lengths))
    rows = [
        text.processed(fed[i, : 1 + n], logits[i, : 1 + n])
        for i, (text, n) in enumerate(zip(texts, lengths, strict=True))
    ]
    outcomes = accept(texts, drafts, rows, logits)

    blocks = []
    for i, (text, draft, (n, following)) in enumerate(zip(texts, drafts, outcomes, strict=True)):
        block = text.text.keep(draft.tokens[:n], following, rows[i])
        text.take_rows(fed[i, : len(block)])
        blocks.append(text.go_on(block))
    batch.accept([len(block) for block in blocks])
    accepted = [
        count(text, length, block, draft)
        for text, length, block, draft in zip(texts, lengths, blocks, drafts, strict=True)
    ]
    policy.learn(texts, lengths, accepted, drafted - started, time.perf_counter() - drafted)
    return blocks


def count(text: BatchText, length: int, block: list[Token], draft: Draft) -> int:
    """Take note of a text's block; how many drafted tokens of it were accepted."""
    if len(draft.tokens):
        return text.text.statistics.record(length, block, draft.copied is not None)
    text.text.statistics.plain += 1
    return 0


def accept(
    texts: list[BatchText], drafts: list[Draft], rows: list[TargetLogits], logits: mx.array
) -> list[Outcome]:
    """Of each text. Those that take the best token of every row share the search for it."""
    best: list[list[Any]] = []
    if any(text.plainly_greedy for text in texts):
        found = best_tokens(logits)
        mx.eval(found)
        best = [x.tolist() for x in found]
    outcomes = []
    for i, (text, draft, own) in enumerate(zip(texts, drafts, rows, strict=True)):
        if text.plainly_greedy:
            width = len(own.logits)
            wanted, top, contenders = (x[i][:width] for x in best)
            tokens = draft.tokens.tolist()[: width - 1]
            outcomes.append(match_best(tokens, wanted, top, contenders, own))
        else:
            outcomes.append(text.accept(draft, own))
    return outcomes

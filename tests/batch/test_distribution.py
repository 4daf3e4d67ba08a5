"""Sampled texts of a batch follow the target's distribution, whatever the schedule couples."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generation_stream
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.batch.decode import Decoding
from dspine_mlx.batch.draft_rows import DraftRows
from dspine_mlx.batch.generation import Generation
from dspine_mlx.batch.policy import BatchPolicy, FixedLength
from dspine_mlx.batch.scheduled import Scheduled
from dspine_mlx.batch.select import select_texts
from dspine_mlx.batch.text import BatchText
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.proposal import Proposal
from dspine_mlx.drafters.proposals import Proposals
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft
from dspine_mlx.round.speculate import copied
from dspine_mlx.target.model import Target
from dspine_mlx.verify_length.schedule import prepare, schedule_of
from tests.support.tiny import tiny_dflash, tiny_target

pytestmark = pytest.mark.slow

V, TOKENS, COUNT = 6, 3, 640
STOP = 2  # the tokenizer's end
PROMPTS = ([1, 2, 3], [4, 5])
REPEATING = ([1, 2, 3] * 3, [4, 5] * 4)  # of which there is something to copy


class Coupled(FixedLength):
    """A lossless rule in which a text's length depends on the others: the surest greedy path of
    all gets rows, the rest none."""

    def lengths(self, texts: list[BatchText], drafts: list[Draft], depth: int) -> list[int]:
        most = super().lengths(texts, drafts, depth)
        paths = [draft.greedy_path or draft.evidence for draft in drafts]
        odds = [path.log_odds()[0] for path in paths if path is not None]
        return [n if x == max(odds) else 0 for x, n in zip(odds, most, strict=True)]


class Narrow(FixedLength):
    """Blocks of changing widths, by what the texts were."""

    def slots(self, texts: list[BatchText], depth: int) -> int:
        return 1 + int(sum(text.anchor.item() for text in texts)) % 3


class InTurn(FixedLength):
    """It drafts for some of the texts, by what they were; the others get a token each."""

    def drafted(self, texts: list[BatchText], depth: int) -> list[bool]:
        at = sum(text.newest for text in texts)
        return [(at + i) % 3 > 0 for i in range(len(texts))]


class Biased(FixedLength):
    """It looks at what was drawn: a draft is offered if its second token is the likeliest one."""

    def lengths(self, texts: list[BatchText], drafts: list[Draft], depth: int) -> list[int]:
        most = super().lengths(texts, drafts, depth)
        drawn = [draft.tokens[1].item() for draft in drafts]
        best = [draft.q[1].argmax() for draft in drafts if draft.q is not None]
        likeliest = [draft.candidates[1, at].item() for draft, at in zip(drafts, best, strict=True)]
        return [n if x == y else 0 for n, x, y in zip(most, drawn, likeliest, strict=True)]


def wanted(model: nn.Module, prompt: list[int]) -> dict[tuple[int, ...], Any]:
    """The chance of each text, from the target's logits after every prefix."""
    over: dict[tuple[int, ...], float] = {}
    going: dict[tuple[int, ...], Any] = {(): 1.0}
    for _ in range(TOKENS):
        logits = model(mx.array([prompt + list(prefix) for prefix in going]))[:, -1]
        probs = np.array(mx.softmax(logits.astype(mx.float32), axis=-1), np.float64)
        texts = {
            (*prefix, x): going[prefix] * row[x]
            for prefix, row in zip(going, probs, strict=True)
            for x in range(V)
        }
        over |= {text: p for text, p in texts.items() if text[-1] == STOP}
        going = {text: p for text, p in texts.items() if text[-1] != STOP}
    return over | going


def surprise(counts: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], Any]) -> float:
    """Pearson's chi-square of counts, in standard deviations; rare texts are taken together."""
    total = sum(counts.values())
    common = [text for text, p in chances.items() if p * total >= 5]
    seen = [counts[text] for text in common]
    due: list[float] = [chances[text] * total for text in common]
    seen.append(total - sum(seen))
    due.append(max(total - sum(due), 1e-9))
    if due[-1] < 5:
        seen[-2], due[-2] = seen[-2] + seen.pop(), due[-2] + due.pop()
    free = len(due) - 1
    square = sum((a - b) ** 2 / b for a, b in zip(seen, due, strict=True))
    return (square - free) / math.sqrt(2 * free)


def sample(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    drafter: Drafter,
    policy: BatchPolicy,
    given: tuple[list[int], list[int]] = PROMPTS,
) -> list[float]:
    """The surprise of texts decoded eight at a time, and of their second tokens, by prompt."""
    prompts = [given[i % 2] for i in range(COUNT)]
    assert set(tokenizer.eos_token_ids) == {STOP}
    batch = Generation.of(
        model, tokenizer, prompts, drafter, max_tokens=TOKENS, sampler=Sampler(temp=1.0)
    )
    requests = [batch.request(entry) for entry in batch.entries]
    texts: dict[int, list[int]] = {id(request): [] for request in requests}
    for request, (token, *_) in Decoding(drafter, policy, 8, generation_stream).run(requests):
        texts[id(request)].append(token)
    results = []
    for i, prompt in enumerate(given):
        counts = Counter(tuple(texts[id(request)]) for request in requests[i::2])
        due = Counter(wanted(model, prompt))
        results += [surprise(counts, due), surprise(seconds(counts), seconds(due))]
    return results


def seconds(texts: Counter[tuple[int, ...]]) -> Counter[tuple[int, ...]]:
    """By the second token only, where bias of a round's length shows most."""
    by_token: Counter[tuple[int, ...]] = Counter()
    for text, weight in texts.items():
        by_token[text[1:2]] += weight
    return by_token


@dataclass(eq=False)
class OneTokenBack(Drafter):
    """It knows what the target says after each single token, which is often nearly right."""

    table: mx.array = field(default_factory=lambda: mx.zeros((V, V)))

    def propose_texts(
        self,
        anchors: mx.array,
        features: mx.array,
        cache: list[DraftRows],
        slots: int | None = None,
    ) -> Proposals:
        M, tokens = slots or self.config.num_proposals, mx.arange(V, dtype=mx.uint32)
        candidates = mx.broadcast_to(tokens, (M, V))
        later = mx.broadcast_to(self.table, (M - 1, V, V))
        B = anchors.size
        candidates, later = (mx.broadcast_to(x, (B, *x.shape)) for x in (candidates, later))
        return Proposals(Proposal(candidates, self.table[anchors], later))


def pair(attention: float) -> tuple[nn.Module, Drafter]:
    """attention: how much what comes before the newest token matters."""
    model = tiny_target(seed=3, vocab_size=V, scale=0.5, layers=2)
    for layer in model.layers:
        layer.self_attn.o_proj.weight = attention * layer.self_attn.o_proj.weight
    network = tiny_dflash(
        model, vocab_size=V, top_k=V, block_size=4, target_layer_ids=(0, 1)
    ).network
    target = Target(model)
    table = model(mx.arange(V)[:, None])[:, -1].astype(mx.float32)
    drafter = OneTokenBack(network, target, target, table=table)
    prepare(drafter, profile=False)
    return model, drafter


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, Drafter]:
    return pair(attention=0.1)


@dataclass
class Copying(FixedLength):
    """Every other round of a text offers a copy, whatever it is worth."""

    rounds: int = 0
    offered: int = 0

    def join(self, text: BatchText, texts: int, depth: int) -> None: ...

    def choose(
        self, texts: list[BatchText], drafts: list[Draft], depth: int
    ) -> tuple[list[Draft], list[int]]:
        drafts, lengths = list(drafts), self.lengths(texts, drafts, depth)
        for i, text in enumerate(texts):
            self.rounds += 1
            assert text.text.lookup is not None
            copy = text.text.lookup.draft(2)
            if copy is not None and self.rounds % 2:
                drafts[i], self.offered = copied(copy), self.offered + 1
                lengths[i] = max(0, min(2, text.limit(drafts[i])))
        return drafts, lengths


def test_copies_leave_the_targets_distribution(
    small: tuple[nn.Module, Drafter], tokenizer: TokenizerWrapper
) -> None:
    (model, drafter), policy = small, Copying(2)
    mx.random.seed(9)
    assert max(map(abs, sample(model, tokenizer, drafter, policy, REPEATING))) < 4
    assert policy.offered > policy.rounds / 4


@pytest.mark.parametrize("rule", ["scheduled", "coupled", "narrow", "in turn"])
def test_texts_follow_the_targets_distribution(
    small: tuple[nn.Module, Drafter], tokenizer: TokenizerWrapper, rule: str
) -> None:
    model, drafter = small
    policies: dict[str, BatchPolicy] = {
        "scheduled": Scheduled(schedule_of(drafter), drafter.config.num_proposals),
        "coupled": Coupled(2, needs_evidence=True),
        "narrow": Narrow(2),
        "in turn": InTurn(2),
    }
    mx.random.seed(9)
    assert max(map(abs, sample(model, tokenizer, drafter, policies[rule]))) < 4


def test_a_test_by_other_probs_than_those_drawn_from_is_caught(
    small: tuple[nn.Module, Drafter],
    tokenizer: TokenizerWrapper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*args: Any) -> list[Draft]:
        """q is uniform, and no draft was drawn from that."""
        drafts = select_texts(*args)
        return [draft._replace(q=mx.full(draft.candidates.shape, 1 / V)) for draft in drafts]

    monkeypatch.setattr("dspine_mlx.batch.batch.select_texts", wrong)
    mx.random.seed(9)
    model, drafter = small
    assert max(sample(model, tokenizer, drafter, FixedLength(2))) > 6


def test_a_length_by_what_was_drawn_is_caught(tokenizer: TokenizerWrapper) -> None:
    """Even of a drafter that is always right."""
    model, drafter = pair(attention=0.0)
    mx.random.seed(9)
    assert max(map(abs, sample(model, tokenizer, drafter, FixedLength(2)))) < 4
    mx.random.seed(9)
    assert max(sample(model, tokenizer, drafter, Biased(2))) > 6

"""Proposals for several texts at once, bit by bit those of each text alone."""

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from dspine_mlx.batch.draft_rows import DraftLengths, DraftRows
from dspine_mlx.batch.select import select_texts
from dspine_mlx.batch.text import BatchText
from dspine_mlx.drafters import METHODS, method_of
from dspine_mlx.drafters.chain import AnyProposal, ChainProposal
from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspark_gemma4 import Gemma4DSpark, Gemma4DSparkConfig
from dspine_mlx.drafters.proposal import SlotwiseProposal
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import select
from dspine_mlx.round.text import Text
from dspine_mlx.target.model import Target
from tests.support.drafters import EVERY, kind
from tests.support.tiny import (
    VOCABULARY,
    drafter_config,
    randomise,
    tiny_dflash,
    tiny_dspine,
    tiny_target,
)

SLIDING = ("sliding_attention", "full_attention")


def tiny_gemma4(model: Any, **changes: Any) -> Drafter:
    config = Gemma4DSparkConfig.from_dict(drafter_config(markov_rank=6, **changes))
    return randomise(Gemma4DSpark(config), 1).bind(Target(model))


def tiny_reduced(model: Any) -> Drafter:
    """It proposes every fourth token of the vocabulary."""
    config = DrafterConfig.from_dict(drafter_config(draft_vocab_size=VOCABULARY // 4))
    network = randomise(DFlash(config), 1)
    network.d2t = mx.arange(0, VOCABULARY, 4, dtype=mx.uint32)
    return network.bind(Target(model))


WINDOW = {"layer_types": SLIDING, "sliding_window": 6}
KINDS: dict[str, Callable[..., Drafter]] = EVERY | {
    "dspark, gemma 4": tiny_gemma4,
    "dflash, windowed": kind(tiny_dflash, **WINDOW, is_causal=False),
    "dflash, windowed, causal": kind(tiny_dflash, **WINDOW),
    "dflash, window from the anchor": kind(
        tiny_dflash, **WINDOW, window_from_anchor=True, is_causal=False
    ),
    "dflash, causal": kind(tiny_dflash, is_causal=True),
    "dflash, sinks": kind(tiny_dflash, attention_sink_bias=True),
    "dflash, reduced vocabulary": tiny_reduced,
    "dspine, windowed": kind(tiny_dspine, **WINDOW),
    "dspine, from two slots back": kind(tiny_dspine, injection_reach=2),
}


def arrays(proposal: AnyProposal) -> list[mx.array]:
    """All that selection reads of a proposal."""
    if isinstance(proposal, ChainProposal):
        path = proposal.paths([mx.zeros(proposal.candidates.shape)], 1.0)[0]
        known = proposal.confidence_on(path[0])
        return [*path, *([] if known is None else [known])]
    if isinstance(proposal, SlotwiseProposal):
        proposal = proposal.ranked()
    return [x for x in proposal if x is not None]


@pytest.mark.parametrize("name", KINDS)
def test_proposals_are_those_of_each_text_alone(name: str) -> None:
    """Texts of different lengths take in different numbers of context rows, some of them none."""
    model, draw = tiny_target(), random.Random(name)
    drafter = KINDS[name](model)
    lengths = DraftLengths()
    rows = [DraftRows(lengths) for _ in drafter.layers]
    own = [drafter.make_cache() for _ in range(3)]
    size = drafter.network.feature_size
    for cache, context in zip(own, (0, 3, 11), strict=True):
        if context:
            drafter.extend(mx.random.normal((1, context, size), key=mx.random.key(context)), cache)
        for c, mine in zip(cache, rows, strict=True):
            mine.join(c)
        lengths.replace([*lengths.host, context])
    for turn in range(3):
        anchors = [draw.randrange(4, VOCABULARY) for _ in own]
        counts = [draw.randint(0, 4) for _ in own]
        features = mx.random.normal((3, 4, size), key=mx.random.key(turn))
        lengths.take_in(counts)
        together = drafter.propose_texts(mx.array(anchors, mx.uint32), features, rows)
        lengths.taken()
        for i, cache in enumerate(own):
            alone = drafter.propose(
                mx.array(anchors[i], mx.uint32), features[i : i + 1, : counts[i]], cache
            )
            pairs = zip(arrays(together[i]), arrays(alone), strict=True)
            assert all(mx.array_equal(a, b) for a, b in pairs), (turn, i)
    assert lengths.host == [cache[0].offset for cache in own]


def test_a_proposal_for_several_texts_is_sampled_like_one_alone() -> None:
    model = tiny_target()
    drafter = tiny_dspine(model)
    lengths = DraftLengths()
    rows = [DraftRows(lengths) for _ in drafter.layers]
    lengths.replace([0, 0])
    lengths.take_in([2, 3])
    features = mx.random.normal((2, 3, drafter.network.feature_size))
    together = drafter.propose_texts(mx.array([5, 9], mx.uint32), features, rows)[1]
    alone = drafter.propose(9, features[1:], drafter.make_cache())
    sampler = Sampler(temp=0.8, top_p=0.9)
    for proposal in (together, alone):
        mx.random.seed(4)
        draft = select(proposal, sampler)
        mx.eval(draft.tokens, draft.q)
        if proposal is together:
            first = draft
    assert mx.array_equal(first.tokens, draft.tokens)
    assert mx.array_equal(first.q, draft.q)


@pytest.mark.parametrize("with_evidence", [False, True])
@pytest.mark.parametrize("name", ["dspine", "dflash", "dflash2", "domino", "dspark"])
def test_texts_that_share_a_walk_draft_as_each_would_alone(name: str, with_evidence: bool) -> None:
    """Greedy, tempered, truncating and foreseeing texts in one batch; a tempered one's path is the
    best of its scores and its share of the noise, slot by slot."""
    drafter = KINDS[name](tiny_target())
    rules: list[Any] = [greedy_sampler, Sampler(temp=0.5), Sampler(temp=0.9, top_p=0.8)]
    rules += [Sampler(temp=1.7), Sampler(temp=0.8, seeded=True)]
    texts = [a_text(drafter, rule, i) for i, rule in enumerate(rules)]
    lengths = DraftLengths()
    rows = [DraftRows(lengths) for _ in drafter.layers]
    lengths.replace([0] * len(rules))
    lengths.take_in([2, 3, 1, 3, 2])
    features = mx.random.normal((5, 3, drafter.network.feature_size), key=mx.random.key(3))
    proposals = drafter.propose_texts(mx.array([5, 9, 4, 7, 6], mx.uint32), features, rows)
    assert (proposals.joint is None) == (name in ("domino", "dspark"))
    mx.random.seed(6)
    drafts = select_texts(texts, proposals, drafter.kernels, with_evidence)
    mx.eval([[d.tokens, d.q, d.evidence, d.greedy_path] for d in drafts])
    mx.random.seed(6)
    joint = proposals.joint
    noise = None if joint is None else mx.random.gumbel(joint.ranked().candidates.shape)
    for i, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
        alone = text.select(proposals[i], with_evidence)
        temp = text.draft_temperature
        if noise is not None and temp:
            table = proposals[i].ranked()
            path, row = [], table.first
            for t in range(len(table.candidates)):
                path.append(int(mx.argmax(row + temp * noise[i, t]).item()))
                wanted = mx.softmax(row / temp, axis=-1)
                assert draft.q is not None
                assert mx.allclose(draft.q[t], wanted, atol=1e-6)
                if t + 1 < len(table.candidates):
                    row = table.transitions[t][path[-1]]
            picks = [int(own[k].item()) for own, k in zip(table.candidates, path, strict=True)]
            assert draft.tokens.tolist() == picks
            assert mx.array_equal(draft.candidates, alone.candidates)
            compared = [(draft.greedy_path, alone.greedy_path)]
        else:
            if temp == 0:
                assert draft.tokens.tolist() == alone.tokens.tolist()
                assert draft.q is None
            compared = [(draft.evidence, alone.evidence)] if temp == 0 else []
        for mine, other in compared:
            assert (mine is not None) == with_evidence
            if mine is not None and other is not None:
                assert mine.tokens.tolist() == other.tokens.tolist()
                assert mx.allclose(in_order(mine.chances), in_order(other.chances), atol=1e-6)
                assert mine.stops == other.stops == {i}


def in_order(chances: mx.array) -> mx.array:
    """A slot's probs [M, K] have no order."""
    return mx.sort(chances, axis=-1) if chances.ndim == 2 else chances


def a_text(drafter: Drafter, sampler: Any, number: int) -> BatchText:
    caches = [*make_prompt_cache(drafter.target.model), *drafter.make_cache()]
    text = Text(drafter, caches, sampler, stops=frozenset({number}))
    key = mx.random.key(number) if isinstance(sampler, Sampler) and sampler.seeded else None
    return BatchText(text, 100, key)


def test_context_kept_from_plain_decoding_is_what_each_text_would_keep() -> None:
    drafter = tiny_dflash(tiny_target())
    lengths = DraftLengths()
    rows = [DraftRows(lengths) for _ in drafter.layers]
    lengths.replace([0, 0])
    features = mx.random.normal((2, 3, drafter.network.feature_size))
    lengths.take_in([3, 1])
    drafter.extend(features, rows)
    lengths.taken()
    for i, count in enumerate((3, 1)):
        own = drafter.make_cache()
        drafter.extend(features[i : i + 1, :count], own)
        for mine, cache in zip(rows, own, strict=True):
            assert mx.array_equal(mine.extract(i).keys, cache.keys[..., :count, :])
            assert mx.array_equal(mine.extract(i).values, cache.values[..., :count, :])


def test_every_method_says_whether_it_drafts_for_several_texts() -> None:
    covered = {method_of(make(tiny_target()).network).name for make in KINDS.values()}
    assert {name for name, method in METHODS.items() if method.several_texts} == covered


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_a_short_block_proposes_the_first_tokens(name: str, slots: int, bits: int | None) -> None:
    """The very ones of the full block, where no slot sees a later one."""
    model = tiny_target()
    if bits is not None:
        nn.quantize(model, 32, bits)
    drafter = KINDS[name](model)
    lengths = DraftLengths()
    rows = [DraftRows(lengths) for _ in drafter.layers]
    lengths.replace([0, 0])
    lengths.take_in([2, 3])
    features = mx.random.normal((2, 3, drafter.network.feature_size), key=mx.random.key(3))
    anchors = mx.array([5, 9], mx.uint32)
    short = drafter.propose_texts(anchors, features, rows, slots)
    drafts = [select(proposal) for proposal in short]
    assert [draft.tokens.size for draft in drafts] == [slots] * 2
    assert all(len(d.evidence.log_odds()) == slots for d in drafts if d.evidence is not None)
    if not drafter.config.causal_block:
        return
    full = [select(proposal) for proposal in drafter.propose_texts(anchors, features, rows)]
    for ours, theirs in zip(drafts, full, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()[:slots]
        assert ours.evidence is not None
        assert theirs.evidence is not None
        assert mx.array_equal(ours.evidence.chances, theirs.evidence.chances[:slots])

"""Domino against a float64 evaluation in NumPy, known figures, and the walk over its pool."""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.checkpoints.files import read_tensors
from dspine_mlx.convert.conversion import convert
from dspine_mlx.convert.reference import Config, Head, Tensors, Weights
from dspine_mlx.convert.reference_domino import corrected, domino_round
from dspine_mlx.convert.report import report
from dspine_mlx.drafters import domino
from dspine_mlx.drafters.chain import shared_pool
from dspine_mlx.drafters.domino import Domino, DominoConfig, DominoProposal
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import select
from dspine_mlx.target.model import Target
from tests.support.checkpoints import Shape, random_features, save, tiny_target
from tests.support.dflash2 import LARGE, fill
from tests.support.domino import Sizes, domino_specforge

KNOWN_ANCHOR = 7


def build(config: Config, weights: Weights, model: nn.Module) -> Drafter:
    drafter = Domino(DominoConfig.from_dict(config))
    arrays = {
        name.removeprefix("logit_head."): mx.array(value).astype(mx.float32)
        for name, value in weights.items()
    }
    drafter.load_weights(list(arrays.items()))
    return drafter.bind(Target(model))


def propose(drafter: Drafter, features: np.ndarray, anchor: int, ahead: int = 0) -> DominoProposal:
    cache = drafter.make_cache()
    rows = mx.array(features)[None]
    if ahead:
        drafter.extend(rows[:, :ahead], cache)
    proposal = drafter.propose(anchor, rows[:, ahead:], cache)
    assert isinstance(proposal, DominoProposal)
    assert {c.offset for c in cache} == {len(features)}
    return proposal


def known_head() -> tuple[dict[str, np.ndarray], Head, np.ndarray]:
    weights = {
        "prefix_gru.weight_ih_l0": fill(901, (9, 8), 0.6, 0),
        "prefix_gru.weight_hh_l0": fill(902, (9, 3), 0.6, 0),
        "embed_proj.0.weight": fill(903, (4, 11), 1, 0),
        "embed_proj.2.weight": fill(904, (20, 4), 2, 0),
    }
    head = Head(fill(37, (20, 8), 1, 0), fill(38, (20, 8), 1, 0))
    return weights, head, fill(905, (4, 8), 1, 0)


# tokens, their scores, the best base token of each slot, the state after all of them
KNOWN = {
    True: (
        [16, 4, 18],
        [2.33364, 2.12337, 6.23045],
        {2: 10},
        [-0.342146, -0.432627, -0.102193],
    ),
    False: (
        [4, 18, 14],
        [1.60215, 6.33828, 3.15921],
        {1: 10, 2: 16},
        [0.142823, -0.381999, -0.343925],
    ),
}


@pytest.mark.parametrize("shift", [True, False])
def test_the_known_head(shift: bool) -> None:
    """Figures whose GRU gates agree with mlx.nn.GRU's to 3e-8."""
    weights, head, h = known_head()
    tokens, values, base, state = KNOWN[shift]
    model, _ = tiny_target(Shape(H=8, V=20, taps=(0, 1)))
    model.model.embed_tokens.weight = mx.array(head.embedding).astype(mx.float32)
    model.lm_head.weight = mx.array(head.head).astype(mx.float32)
    shape, first = Shape(H=8, V=20, B=4, taps=(0, 1)), 0 if shift else 1
    config, backbone = domino_specforge(shape, Sizes(F=3, E=4), shift)
    drafter = build(config, backbone | weights, model)
    states = mx.array(h[first : first + 3]).astype(mx.float32)
    assert isinstance(drafter.network, Domino)
    proposal = DominoProposal(drafter.network, states, mx.array(KNOWN_ANCHOR), drafter.target)
    draft = select(proposal)
    assert draft.tokens.tolist() == tokens
    picked = np.array(proposal.scores_on(draft.tokens))[np.arange(3), tokens]
    np.testing.assert_allclose(picked, values, atol=2e-5)
    for slot, token in base.items():
        assert mx.argmax(proposal.base[slot]).item() == token
    final = proposal.start(1)
    for slot in range(3):
        final = proposal.follow(final, draft.tokens[slot : slot + 1])
    np.testing.assert_allclose(np.array(final[0]), state, atol=2e-6)
    chain = corrected(
        Tensors(weights), {"pure_draft_prefix_len": 1}, head, h[first : first + 3], KNOWN_ANCHOR
    )
    assert chain.path == tokens
    np.testing.assert_allclose(chain.scores[np.arange(3), tokens], values, atol=5.1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_the_gru_is_mlxs(size: int) -> None:
    """mlx.nn.GRU orders its gates r, z, n, too, and has biases that are 0 here."""
    config = DominoConfig.from_dict(domino_specforge(sizes=Sizes(F=5))[0])
    ours, theirs = domino.PrefixGRU(config), nn.GRU(32, 5)
    theirs.b, theirs.bhn = mx.zeros_like(theirs.b), mx.zeros_like(theirs.bhn)
    ours.weight_ih_l0, ours.weight_hh_l0 = theirs.Wx, theirs.Wh
    x, state = mx.random.normal((size, 6, 32)), mx.zeros((size, 5))
    for t in range(6):
        state = ours(x[:, t], state)
    assert mx.allclose(state, theirs(x)[:, -1], atol=1e-6)


VARIANTS: dict[str, dict[str, Any]] = {
    "shifted": {},
    "not shifted": {"shift": False},
    "absent: not shifted": {"shift": None},
    "corrected from the first": {"prefix": 0},
    "corrected late, not shifted": {"prefix": 3, "shift": False},
    "older names": {"older": True},
    "softcap": {"final_logit_softcapping": 1.5},
    "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("path", [None, [3, 95, 3, 40]])
def test_domino_equals_numpy(variant: str, path: list[int] | None) -> None:
    """Scores of the whole vocabulary along the greedy path and along another one."""
    shape, features = Shape(), random_features(Shape(), 7)
    config, weights = domino_specforge(shape, **VARIANTS[variant])
    model, head = tiny_target(shape)
    proposal = propose(build(config, weights, model), features, 11, ahead=3)
    wanted = domino_round(weights, config, head, features, 11, path)
    if path is None:
        assert select(proposal).tokens.tolist() == wanted.path
    scores = np.array(proposal.scores_on(mx.array(wanted.path)))
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, wanted.scores, atol=1e-4)


@settings(deadline=None, max_examples=20)
@given(
    shape=st.builds(
        Shape,
        H=st.sampled_from([16, 32]),
        L=st.integers(1, 3),
        taps=st.sampled_from([(0,), (0, 2)]),
        B=st.integers(2, 9),
        seed=st.integers(0, 50),
    ),
    sizes=st.builds(Sizes, F=st.integers(1, 12), E=st.integers(1, 9)),
    shift=st.booleans(),
    prefix=st.integers(0, 3),
)
def test_any_sizes_equal_numpy(shape: Shape, sizes: Sizes, shift: bool, prefix: int) -> None:
    config, weights = domino_specforge(shape, sizes, shift, prefix)
    model, head = tiny_target(shape)
    features = random_features(shape, 5)
    proposal = propose(build(config, weights, model), features, 3)
    wanted = domino_round(weights, config, head, features, 3)
    scores = proposal.scores_on(mx.array(wanted.path))
    np.testing.assert_allclose(np.array(scores), wanted.scores, atol=2e-4)


def small(pool: int, monkeypatch: pytest.MonkeyPatch) -> tuple[DominoProposal, Any]:
    monkeypatch.setattr(domino, "shared_pool", partial(shared_pool, size=pool))
    shape = Shape()
    config, weights = domino_specforge(shape)
    model, head = tiny_target(shape)
    features = random_features(shape, 7)
    drafter = build(config, weights, model)
    return propose(drafter, features, 11), domino_round(weights, config, head, features, 11)


def test_a_pool_leaves_scores_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slot's best base token is in the pool, which has no token twice."""
    proposal, chain = small(20, monkeypatch)
    pool = proposal.tokens.tolist()
    assert len(set(pool)) == 20
    assert set(chain.base.argmax(axis=1).tolist()) <= set(pool)
    tokens = select(proposal).tokens.tolist()
    picks = mx.array([pool.index(token) for token in tokens])
    shape = Shape()
    config, weights = domino_specforge(shape)
    head = tiny_target(shape)[1]
    along = domino_round(weights, config, head, random_features(shape, 7), 11, tokens)
    wanted = along.scores[:, pool]
    np.testing.assert_allclose(np.array(proposal.scores_on(picks)), wanted, atol=1e-4)
    assert [pool[i] for i in wanted.argmax(axis=1)] == tokens


@pytest.mark.parametrize(
    "sampler", [Sampler(temp=0.8), Sampler(temp=1.0, top_p=0.7), Sampler(temp=1.3, top_k=5)]
)
def test_sampled_tokens_follow_the_stated_distribution(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q is what float64 says of the very path that was drawn; over many draws the first token's
    frequencies are q's, and the second's are those after the first."""
    proposal, _ = small(12, monkeypatch)
    pool, mixed = proposal.tokens.tolist(), np.zeros(12)
    counts, pairs = np.zeros(12), np.zeros(12)
    rounds, slot = 1500, 1
    for _ in range(rounds):
        draft = select(proposal, sampler)
        assert draft.q is not None
        picks = [pool.index(token) for token in draft.tokens.tolist()]
        counts[picks[0]] += 1
        pairs[picks[slot]] += 1
        mixed += np.array(draft.q[slot]) / rounds
    scores = proposal.scores_on(mx.array(picks))
    wanted = sampler.draft_probs(scores) if sampler.truncates else mx.softmax(scores / 0.8, -1)
    assert mx.allclose(draft.q, wanted, atol=1e-5)
    for seen, chance in ((counts / rounds, np.array(wanted[0])), (pairs / rounds, mixed)):
        assert (seen[chance == 0] == 0).all()
        error = (chance * (1 - chance) / rounds) ** 0.5
        assert (np.abs(seen - chance) <= 4.5 * error + 1e-9).all()


def test_evidence_is_of_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sampled draft: the top entry's odds along it, and along the greedy path beside it."""
    for pool in (12, 90):
        proposal, _ = small(pool, monkeypatch)
        draft, greedy = select(proposal, Sampler(temp=0.7)), select(proposal)
        assert draft.q is not None
        assert draft.evidence is not None
        assert draft.greedy_path is not None
        assert greedy.evidence is not None
        q = np.array(draft.q, np.float64)
        wanted = np.log(q.max(axis=1)) - np.log(q.sum(axis=1) - q.max(axis=1))
        np.testing.assert_allclose(draft.evidence.log_odds(), wanted, rtol=1e-3)
        assert draft.greedy_path.tokens.tolist() == greedy.tokens.tolist()
        scores = proposal.scores_on(
            mx.array([proposal.tokens.tolist().index(t) for t in greedy.tokens.tolist()])
        )
        probs = np.array(mx.softmax(scores / 0.7, axis=-1), np.float64)
        wanted = np.log(probs.max(axis=1)) - np.log(probs.sum(axis=1) - probs.max(axis=1))
        np.testing.assert_allclose(draft.greedy_path.log_odds(), wanted, rtol=1e-3)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"shift_label": "yes"}, "shift_label is 'yes' in the drafter's config.json; it must be bool"),
    ({"shift_label": 1}, "shift_label is 1"),
    ({"gru_hidden_dim": 0}, "gru_hidden_dim is 0; it must be 1 or above"),
    ({"pure_draft_prefix_len": -1}, "pure_draft_prefix_len is -1"),
    ({"block_size": 1}, "block_size"),
    ({"draft_vocab_size": 40}, "draft_vocab_size is 40; Domino drafters propose from the whole"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    config = domino_specforge()[0]
    config["dflash_config"] |= changes
    with pytest.raises(InputError, match=message):
        DominoConfig.from_dict(config)


def test_a_width_stated_twice_must_agree(tmp_path: Path) -> None:
    config, weights = domino_specforge(emb_dim=7)
    with pytest.raises(InputError, match="emb_dim is 7 in config.json but 6 in its dflash_config"):
        convert(save(tmp_path / "source", config, weights), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("shift", "told"), [(None, True), (False, False), (True, False)])
def test_an_absent_shift_is_told(shift: bool | None, told: bool, tmp_path: Path) -> None:
    folder = save(tmp_path / "source", *domino_specforge(shift=shift))
    facts = report(folder)
    assert facts["first_slot"] == (0 if shift else 1)
    assert facts["proposals"] == Shape().B - 1
    assert any("shift_label is absent" in note for note in facts["notes"]) == told
    convert(folder, tmp_path / "out")
    assert report(tmp_path / "out")["first_slot"] == facts["first_slot"]


def test_only_the_large_matrices_are_packed(tmp_path: Path) -> None:
    shape = Shape(H=64, I=64, hd=16)
    source = save(tmp_path / "source", *domino_specforge(shape))
    convert(source, tmp_path / "out", quantize=True)
    packed = {n.removesuffix(".scales") for n in read_tensors(tmp_path / "out") if "scales" in n}
    assert packed == {"fc", *(f"layers.{i}.{name}" for i in range(2) for name in LARGE)}
    model, _ = tiny_target(shape)
    drafter = load_drafter(tmp_path / "out", model)
    assert len(select(propose(drafter, random_features(shape, 4), 3)).tokens) == shape.B - 1

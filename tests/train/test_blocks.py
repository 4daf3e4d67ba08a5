"""The training forward against one block at a time through the drafters' own forward."""

from typing import Any

import mlx.core as mx
import pytest

from dspine_mlx.drafters import METHODS
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspine import DSpine
from dspine_mlx.target.model import Target
from dspine_mlx.train.blocks import Batch
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.step import forward
from tests.support.checkpoints import Shape, tiny_target
from tests.support.tiny import randomise
from tests.support.training import SHAPE, random_batch

PLAIN = LossConfig(replacement_layers=0)
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
SELECTOR = {
    "conv_kernel_size": 2,
    "conv_group_size": 4,
    "selector_rank": 5,
    "selector_top_k": 4,
}
PREFIX = {"gru_hidden_dim": 6, "emb_dim": 4, "shift_label": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DFlash": ("dflash", {}),
    "DFlash, causal": ("dflash", {"is_causal": True}),
    "DFlash, sliding window": ("dflash", SLIDING),
    "DFlash, window from the anchor": ("dflash", SLIDING | {"window_from_anchor": True}),
    "DFlash, sinks and scaled values": (
        "dflash",
        {"attention_sink_bias": True, "attention_value_scale": 0.7, "input_embedding_scale": 3.0},
    ),
    "DFlash, YaRN": ("dflash", {"rope_scaling": YARN}),
    "DSpark": ("dspark", {"markov_rank": 4}),
    "DFlash2": ("dflash2", SELECTOR),
    "DFlash2, three taps, sliding": ("dflash2", SELECTOR | SLIDING | {"conv_kernel_size": 3}),
    "Domino": ("domino", PREFIX),
    "Domino, not shifted": ("domino", PREFIX | {"shift_label": False}),
    "DSpine": ("dspine", {"transfer_rank": 12, "message_size": 6}),
    "DSpine, from two slots back": (
        "dspine",
        {"transfer_rank": 12, "message_size": 6, "layers": 3, "injection_reach": 2},
    ),
    "DSpine, three layers": ("dspine", {"transfer_rank": 12, "message_size": 6, "layers": 3}),
}


def fresh(method: str, changes: dict[str, Any], shape: Shape) -> Drafter:
    known = METHODS[method]
    fields = {
        "hidden_size": shape.H,
        "intermediate_size": shape.I,
        "num_hidden_layers": changes.pop("layers", shape.L),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv,
        "head_dim": 8,
        "vocab_size": shape.V,
        "block_size": shape.B,
        "mask_token_id": 3,
        "target_layer_ids": list(shape.taps),
        "top_k": 4,
    }
    return known.network(known.config.from_dict(fields | changes)).bind(
        Target(tiny_target(shape)[0])
    )


def build(method: str, changes: dict[str, Any]) -> Drafter:
    """With all parameters drawn, so that nothing is masked by a zero or a one."""
    drafter = fresh(method, changes, SHAPE)
    randomise(drafter.network, 1, 0.4)
    return drafter


def one_block(drafter: Drafter, batch: Batch, s: int, a: int) -> mx.array:
    """The normalised states [M, d] of one block, by the drafter's own forward."""
    anchor = batch.anchors[s, a].item()
    token, features = batch.tokens[s, anchor], batch.features[s : s + 1, :anchor]
    network, cache = drafter.network, drafter.make_cache()
    if isinstance(network, DSpine):
        return network.injected_backbone(token, features, cache, drafter.target)[0]
    states = network.backbone(token, features, cache, drafter.target)
    return states[: drafter.config.num_proposals]


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_equals_one_block_at_a_time(variant: str) -> None:
    method, changes = VARIANTS[variant]
    drafter = build(method, dict(changes))
    batch = random_batch(SHAPE, drafter.config.num_proposals, n=20, anchors=5)
    states = forward(drafter, batch, PLAIN).base
    for s in range(2):
        for a in range(5):
            wanted = one_block(drafter, batch, s, a)
            assert mx.allclose(states[s, a], wanted, rtol=1e-4, atol=1e-5).item()


@pytest.mark.parametrize("reach", [1, 2])
def test_refined_states_are_the_transition_table(reach: int) -> None:
    """With the true predecessor among the candidates, its row is what the refined state scores."""
    sizes = {"transfer_rank": 12, "message_size": 6, "injection_reach": reach}
    drafter = build("dspine", sizes | {"top_k": SHAPE.V})
    batch = random_batch(SHAPE, drafter.config.num_proposals, n=20)
    states = forward(drafter, batch, PLAIN)
    for s in range(2):
        anchor = batch.anchors[s, 0].item()
        features = batch.features[s : s + 1, :anchor]
        cache = drafter.make_cache()
        proposal = drafter.propose(batch.tokens[s, anchor], features, cache).ranked()
        assert states.refined is not None
        scores = drafter.target.head(states.refined[s, 0])
        for t in range(1, drafter.config.num_proposals):
            true = batch.tokens[s, anchor + t].item()
            row = proposal.candidates[t - 1].tolist().index(true)
            wanted = scores[t][proposal.candidates[t]]
            assert mx.allclose(
                proposal.transitions[t - 1, row], wanted, rtol=1e-3, atol=1e-4
            ).item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_block_sees_its_context_and_its_anchor_only(variant: str) -> None:
    method, changes = VARIANTS[variant]
    drafter = build(method, dict(changes))
    batch = random_batch(SHAPE, drafter.config.num_proposals, n=20)
    before = forward(drafter, batch, PLAIN)
    anchor = batch.anchors[0, 1].item()
    positions = mx.arange(20)[None]
    later = batch._replace(
        features=mx.where((positions >= anchor)[..., None], 9.0, batch.features),
        tokens=mx.where(positions > anchor, 7, batch.tokens),
    )
    after = forward(drafter, later, PLAIN)
    assert mx.array_equal(before.base[0, 1], after.base[0, 1]).item()
    earlier = batch._replace(features=batch.features.at[0, anchor - 1].add(5.0))
    assert not mx.array_equal(before.base[0, 1], forward(drafter, earlier, PLAIN).base[0, 1]).item()


def test_the_curriculum_shows_the_true_predecessor_to_the_first_layers_only() -> None:
    drafter = build("dspine", {"transfer_rank": 12, "message_size": 6, "layers": 3})
    batch = random_batch(SHAPE, drafter.config.num_proposals, n=20)
    batch = batch._replace(replaced=mx.array([[True, False, True], [False, True, False]]))
    plain, shown = (forward(drafter, batch, LossConfig(replacement_layers=n)) for n in (0, 3))
    same = mx.all(mx.isclose(plain.base, shown.base), axis=(2, 3))
    assert same.tolist() == mx.logical_not(batch.replaced).tolist()
    last = forward(drafter, batch, LossConfig(replacement_layers=2))
    assert mx.array_equal(shown.base, last.base).item()  # the last layer is never shown it
    assert mx.array_equal(plain.base[:, :, 0], shown.base[:, :, 0]).item()  # it always knows it


def test_without_injection_dspine_is_a_causal_dflash() -> None:
    drafter = build("dspine", {"transfer_rank": 12, "message_size": 6})
    batch = random_batch(SHAPE, drafter.config.num_proposals)
    states = forward(drafter, batch, LossConfig(injection=False))
    for write in drafter.network.injection.writes:
        write.weight = mx.zeros_like(write.weight)
    zero = forward(drafter, batch, PLAIN)
    assert mx.allclose(states.base, zero.base, atol=1e-6).item()
    assert not mx.allclose(states.refined, zero.refined, atol=1e-3).item()


def test_a_short_block_is_the_beginning_of_a_whole_one() -> None:
    drafter = build("dspine", {"transfer_rank": 12, "message_size": 6})
    batch = random_batch(SHAPE, drafter.config.num_proposals)
    short = batch._replace(weights=batch.weights[..., :2])
    whole, part = forward(drafter, batch, PLAIN), forward(drafter, short, PLAIN)
    assert mx.allclose(whole.base[:, :, :2], part.base, atol=1e-5).item()

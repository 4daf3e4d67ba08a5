"""DSpark against its equations in float64 NumPy."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspark import DSpark, DSparkConfig
from dspine_mlx.drafters.proposal import Proposal
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter
from dspine_mlx.round.select import select
from dspine_mlx.target.model import Target
from tests.support.checkpoints import offsets

V, D, B, R, K = 47, 32, 5, 6, 4
Arrays = dict[str, np.ndarray]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "hidden_size": D,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": V,
    "block_size": B,
    "mask_token_id": 46,
    "target_layer_ids": [0, 2],
    "num_target_layers": 3,
    "layer_types": ["full_attention"] * 2,
    "partial_rotary_factor": 0.25,  # inherited noise
    "rope_theta": 1e4,
    "markov_rank": R,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "top_k": K,
    "candidate_pool": 0,  # the table of top_k
}


@pytest.fixture(scope="module")
def model() -> qwen3.Model:
    mx.random.seed(0)
    return qwen3.Model(
        qwen3.ModelArgs(
            model_type="qwen3",
            hidden_size=D,
            num_hidden_layers=3,
            intermediate_size=48,
            num_attention_heads=4,
            rms_norm_eps=1e-6,
            vocab_size=V,
            num_key_value_heads=2,
            max_position_embeddings=128,
            rope_theta=1e4,
            head_dim=8,
            tie_word_embeddings=True,
        )
    )


def write(folder: Path, weights: dict[str, mx.array], **changes: Any) -> Path:
    """A checkpoint in DeepSpec's layout."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def backbone_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, 2 * D)}
    shapes |= {f"{name}.weight": (D,) for name in ("hidden_norm", "norm")}
    for i in range(2):
        at = f"layers.{i}."
        shapes |= {f"{at}{n}.weight": (D,) for n in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}self_attn.{n}_norm.weight": (8,) for n in "qk"}
        shapes |= {f"{at}self_attn.{n}_proj.weight": (16, D) for n in "kv"}
        shapes |= {f"{at}self_attn.{n}_proj.weight": (32, 32) for n in "qo"}
        shapes |= {f"{at}mlp.{n}_proj.weight": (40, D) for n in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (D, 40)
    return shapes


def tensors(kind: str = "vanilla", with_markov: bool = True, draft: int = V) -> dict[str, mx.array]:
    """Random tensors under DeepSpec's names."""
    shapes = backbone_shapes() | {
        "markov_head.markov_w1.weight": (V, R),
        "markov_head.markov_w2.weight": (draft, R),
        "confidence_head.proj.weight": (1, D + R if with_markov else D),
        "confidence_head.proj.bias": (1,),
    }
    extra: dict[str, dict[str, tuple[int, ...]]] = {
        "vanilla": {},
        "gated": {"gate_proj.weight": (R, D + R), "gate_proj.bias": (R,)},
        "rnn": {"joint_proj.weight": (3 * R, 2 * R + D), "joint_proj.bias": (3 * R,)},
    }
    shapes |= {f"markov_head.{name}": shape for name, shape in extra[kind].items()}
    rng = np.random.default_rng(1)
    out = {}
    for name, shape in shapes.items():
        scale = 1.5 if "markov_w" in name else 0.3
        center = 1.0 if "norm" in name else 0.0
        out[name] = mx.array((center + scale * rng.standard_normal(shape)).astype(np.float32))
    return out


# The reference: every line an equation.


def rms(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rope(x: np.ndarray, start: int) -> np.ndarray:
    """x: [n, heads, 8], halves rotated; row i is at position start + i."""
    angle = (start + np.arange(len(x)))[:, None, None] * 1e4 ** (-np.arange(4) / 4)
    a, b = x[..., :4], x[..., 4:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def reference_states(w: Arrays, embed: np.ndarray, anchor: int, features: np.ndarray) -> np.ndarray:
    """Normalised states [B, D] of the block [anchor, mask, ...] after n context rows."""
    n = len(features)
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    h = embed[[anchor] + [CONFIG["mask_token_id"]] * (B - 1)]
    for i in range(2):
        at = f"layers.{i}."
        p = {name.removeprefix(at): value for name, value in w.items() if name.startswith(at)}
        x = rms(h, p["input_layernorm.weight"])
        rows = np.concatenate([context, x])
        q = rms((x @ p["self_attn.q_proj.weight"].T).reshape(B, 4, 8), p["self_attn.q_norm.weight"])
        k = rms(
            (rows @ p["self_attn.k_proj.weight"].T).reshape(-1, 2, 8), p["self_attn.k_norm.weight"]
        )
        v = (rows @ p["self_attn.v_proj.weight"].T).reshape(-1, 2, 8)
        q, k = rope(q, n), rope(k, 0)
        k, v = k.repeat(2, axis=1), v.repeat(2, axis=1)
        s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(8)  # no mask: the block is bidirectional
        s = np.exp(s - s.max(-1, keepdims=True))
        o = np.einsum("hqk,khd->qhd", s / s.sum(-1, keepdims=True), v).reshape(B, -1)
        h = h + o @ p["self_attn.o_proj.weight"].T
        x = rms(h, p["post_attention_layernorm.weight"])
        gate = x @ p["mlp.gate_proj.weight"].T
        h = (
            h
            + (gate * sigmoid(gate) * (x @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
        )
    return rms(h, w["norm.weight"])


def reference_bias(w: Arrays, kind: str, h: np.ndarray, path: list[int]) -> np.ndarray:
    """The bias over the draft vocabulary after the tokens of path, which starts with the anchor."""
    w1, w2 = w["markov_head.markov_w1.weight"], w["markov_head.markov_w2.weight"]
    t, e = len(path) - 1, w1[path[-1]]
    if kind == "gated":
        g = w["markov_head.gate_proj.weight"] @ np.concatenate([h[t], e])
        e = sigmoid(g + w["markov_head.gate_proj.bias"]) * e
    if kind == "rnn":
        state = np.zeros(R)
        for k, token in enumerate(path):
            z = np.concatenate([state, w1[token], h[k]])
            z = w["markov_head.joint_proj.weight"] @ z + w["markov_head.joint_proj.bias"]
            g = sigmoid(z[:R])
            state, e = g * state + (1 - g) * np.tanh(z[R : 2 * R]), np.tanh(z[2 * R :])
    return w2 @ e


def reference_confidence(w: Arrays, h: np.ndarray, token: int, with_markov: bool) -> float:
    e = w["markov_head.markov_w1.weight"][token] if with_markov else np.zeros(0)
    logit = w["confidence_head.proj.weight"][0] @ np.concatenate([h, e])
    return float(sigmoid(logit + w["confidence_head.proj.bias"][0]))


def as_float64(weights: dict[str, mx.array]) -> Arrays:
    return {name: np.array(value).astype(np.float64) for name, value in weights.items()}


def proposal_of(drafter: Drafter, features: np.ndarray, anchor: int) -> Proposal:
    """A proposal after the features came in two pieces, the first ahead of the block."""
    cache = drafter.make_cache()
    rows = mx.array(features.astype(np.float32))[None]
    drafter.extend(rows[:, :4], cache)
    return drafter.propose(anchor, rows[:, 4:], cache).ranked()


FEATURES = np.random.default_rng(2).standard_normal((7, 2 * D))


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_table_and_confidence(
    kind: str, with_markov: bool, model: qwen3.Model, tmp_path: Path
) -> None:
    weights = tensors(kind, with_markov)
    changes = {"markov_head_type": kind, "confidence_head_with_markov": with_markov}
    drafter = load_drafter(write(tmp_path / "d", weights, **changes), model)
    assert isinstance(drafter.network, DSpark)
    assert drafter.config.num_proposals == B
    proposal = proposal_of(drafter, FEATURES, anchor=11)
    assert proposal.confidence is not None
    w = as_float64(weights)
    embed = np.array(model.model.embed_tokens.weight).astype(np.float64)
    h = reference_states(w, embed, 11, FEATURES)
    base = h @ embed.T  # the tied target head
    ids = np.array(proposal.candidates)
    np.testing.assert_array_equal(ids, np.argsort(-base, axis=-1)[:, :K])
    path = [11]
    for t in range(B):
        predecessors = [11] if t == 0 else ids[t - 1].tolist()
        for i, token in enumerate(predecessors):
            before = [*path[:-1], token]  # exact after the greedy path and any last predecessor
            want = (base[t] + reference_bias(w, kind, h, before))[ids[t]]
            row = proposal.first if t == 0 else proposal.transitions[t - 1, i]
            np.testing.assert_allclose(np.array(row), want, rtol=1e-4, atol=1e-4)
            c = reference_confidence(w, h[t], token, with_markov)
            assert proposal.confidence[t, i].item() == pytest.approx(c, abs=1e-5)
        greedy = (base[t] + reference_bias(w, kind, h, path))[ids[t]]
        path.append(int(ids[t][greedy.argmax()]))
    assert select(proposal).tokens.tolist() == path[1:]
    assert path[1:] != ids[:, 0].tolist()  # the bias matters in this test


def test_first_slot_one_skips_the_anchor(model: qwen3.Model, tmp_path: Path) -> None:
    weights = tensors()
    drafter = load_drafter(write(tmp_path / "d", weights, sample_from_anchor=False), model)
    ids = np.array(proposal_of(drafter, FEATURES, 11).candidates)
    embed = np.array(model.model.embed_tokens.weight).astype(np.float64)
    base = reference_states(as_float64(weights), embed, 11, FEATURES) @ embed.T
    np.testing.assert_array_equal(ids, np.argsort(-base[1:], axis=-1)[:, :K])


def test_own_embedding_and_head(model: qwen3.Model, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    weights = tensors()
    for name in ("embed_tokens", "lm_head"):
        weights[f"{name}.weight"] = mx.array(rng.standard_normal((V, D)).astype(np.float32))
    drafter = load_drafter(write(tmp_path / "own", weights), model)
    w = as_float64(weights)
    base = reference_states(w, w["embed_tokens.weight"], 3, FEATURES) @ w["lm_head.weight"].T
    ids = np.array(proposal_of(drafter, FEATURES, 3).candidates)
    np.testing.assert_array_equal(ids, np.argsort(-base, axis=-1)[:, :K])
    assert "embed_tokens.weight" in dict(tree_flatten(drafter.network.parameters()))


def test_ends_equal_to_the_targets_are_shared(model: qwen3.Model, tmp_path: Path) -> None:
    weights = tensors()
    shared = proposal_of(load_drafter(write(tmp_path / "none", weights), model), FEATURES, 3)
    for name in ("embed_tokens", "lm_head"):
        weights[f"{name}.weight"] = model.model.embed_tokens.weight
    drafter = load_drafter(write(tmp_path / "same", weights), model)
    names = dict(tree_flatten(drafter.network.parameters()))
    assert not {"embed_tokens.weight", "lm_head.weight"} & names.keys()
    own = proposal_of(drafter, FEATURES, 3)
    assert mx.array_equal(own.transitions, shared.transitions)


def test_reduced_vocabulary(model: qwen3.Model, tmp_path: Path) -> None:
    ids = np.sort(np.random.default_rng(4).permutation(V)[:20])
    weights = tensors(draft=20)
    weights["lm_head.weight"] = model.model.embed_tokens.weight[mx.array(ids)]
    weights["d2t"] = mx.array(offsets(ids))
    weights["t2d"] = mx.array(np.isin(np.arange(V), ids))
    drafter = load_drafter(write(tmp_path / "d", weights, draft_vocab_size=20), model)
    proposal = proposal_of(drafter, FEATURES, 9)
    w = as_float64(weights)
    embed = np.array(model.model.embed_tokens.weight).astype(np.float64)
    h = reference_states(w, embed, 9, FEATURES)
    base = h @ w["lm_head.weight"].T
    order = np.argsort(-base, axis=-1)[:, :K]
    np.testing.assert_array_equal(np.array(proposal.candidates), ids[order])
    after = reference_bias(w, "vanilla", h, [9, int(ids[order[0, 2]])])
    want = (base[1] + after)[order[1]]
    np.testing.assert_allclose(np.array(proposal.transitions[0, 2]), want, rtol=1e-4, atol=1e-4)


def test_ids_in_place_of_offsets_are_refused(model: qwen3.Model, tmp_path: Path) -> None:
    ids = np.sort(np.random.default_rng(4).permutation(V)[:20])
    weights = tensors(draft=20)
    weights["lm_head.weight"] = mx.zeros((20, D))
    weights["d2t"] = mx.array(ids)
    with pytest.raises(InputError, match="it must hold offsets"):
        load_drafter(write(tmp_path / "d", weights, draft_vocab_size=20), model)


def test_ids_that_could_be_offsets_are_seen_by_t2d(model: qwen3.Model, tmp_path: Path) -> None:
    weights = tensors(draft=3)
    weights |= {"lm_head.weight": mx.zeros((3, D)), "d2t": mx.array([1, 2, 5])}
    weights["t2d"] = mx.array(np.isin(np.arange(V), [1, 2, 5]))
    with pytest.raises(InputError, match="other tokens than t2d marks"):
        load_drafter(write(tmp_path / "d", weights, draft_vocab_size=3), model)


def test_shipped_temperatures_divide_the_logit(model: qwen3.Model, tmp_path: Path) -> None:
    weights, temperatures = tensors(), [0.5, 1, 2, 3, 4]
    plain = load_drafter(write(tmp_path / "plain", weights), model)
    scaled = load_drafter(
        write(tmp_path / "scaled", weights, confidence_temperatures=temperatures), model
    )
    c = np.array(proposal_of(plain, FEATURES, 5).confidence).astype(np.float64)
    want = sigmoid(np.log(c / (1 - c)) / np.array(temperatures)[:, None])
    got = np.array(proposal_of(scaled, FEATURES, 5).confidence)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_without_heads(model: qwen3.Model, tmp_path: Path) -> None:
    changes = {"markov_rank": 0, "enable_confidence_head": False}
    weights = {k: v for k, v in tensors().items() if "head" not in k}
    drafter = load_drafter(write(tmp_path / "d", weights, **changes), model)
    # named by its architecture: anchor first, B proposals
    assert isinstance(drafter.network, DSpark)
    proposal = proposal_of(drafter, FEATURES, 5)
    assert proposal.confidence is None
    assert mx.array_equal(proposal.transitions[0, 0], proposal.transitions[0, K - 1])


def test_older_saves_nest_the_heads(model: qwen3.Model, tmp_path: Path) -> None:
    weights = tensors()
    flat = proposal_of(load_drafter(write(tmp_path / "flat", weights), model), FEATURES, 5)
    nested = {f"logit_head.{k}" if "_head." in k else k: v for k, v in weights.items()}
    deep = proposal_of(load_drafter(write(tmp_path / "deep", nested), model), FEATURES, 5)
    assert mx.array_equal(flat.confidence, deep.confidence)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_head_type": "lstm"}, "markov_head_type is 'lstm'"),
        ({"markov_rank": 0}, "confidence_head_with_markov is true"),
        ({"confidence_temperatures": [1.0]}, "confidence_temperatures has 1 values"),
        ({"confidence_temperatures": [1, 1, 1, 1, 0]}, "must be above 0"),
        ({"draft_vocab_size": V + 1}, "draft_vocab_size is 48"),
    ],
)
def test_bad_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DSparkConfig.from_dict(CONFIG | changes)


def test_a_wrong_head_type_is_named(model: qwen3.Model, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", tensors("gated"), markov_head_type="vanilla")
    with pytest.raises(InputError, match="unexpected: markov_head.gate_proj.bias"):
        load_drafter(folder, model)


def test_bind_leaves_the_target_alone(model: qwen3.Model, tmp_path: Path) -> None:
    target = Target(model)
    weights = tensors() | {"lm_head.weight": mx.ones((V, D))}
    network = DSpark(DSparkConfig.from_dict(CONFIG))
    network.add_own_embeddings(weights)
    network.load_weights(list(weights.items()))
    drafter = network.bind(target)
    states = mx.ones((1, D))
    assert mx.allclose(drafter.target.head(states), mx.full((1, V), D))
    assert mx.array_equal(target.head(states), model.model.embed_tokens.as_linear(states))

"""DSpark for Gemma 4: its layer is Gemma's, and a drafter decodes what the target decodes."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text
from mlx_lm.models.cache import KVCache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import Gemma4TextConfig

import dspine_mlx
from dspine_mlx.checkpoints.open import open_checkpoint
from dspine_mlx.drafters.dspark_gemma4 import GEMMA4_ROPE, Gemma4DSparkConfig, Gemma4Layer
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter
from tests.support.checkpoints import Shape, Weights, dspark_gemma4, offsets, save
from tests.support.families import SIZES, build
from tests.support.tiny import VOCABULARY, drafter_config, plain_steps, random_prompt, randomise

SHAPE = Shape(H=64, V=VOCABULARY, taps=(0, 2, 3), rank=64)  # fits build("gemma4_text")
ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0}


@pytest.mark.parametrize("k_eq_v", [True, False])
def test_a_causal_layer_without_context_is_the_targets_own(k_eq_v: bool) -> None:
    """mlx-lm's layer of a target, with the same weights, over the same rows."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    theirs = gemma4_text.DecoderLayer(
        gemma4_text.ModelArgs(
            **sizes,
            num_hidden_layers=1,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            num_key_value_heads=2,
            num_global_key_value_heads=1,
            global_head_dim=16,
            attention_k_eq_v=k_eq_v,
            layer_types=["full_attention"],
            rope_parameters={"full_attention": ROPE},
        ),
        0,
    )
    config = Gemma4DSparkConfig.from_dict(
        drafter_config(
            **sizes,
            head_dim=16,
            num_key_value_heads=1 if k_eq_v else 2,
            attention_k_eq_v=k_eq_v,
            rope_parameters=ROPE,
            is_causal=True,
        )
    )
    assert isinstance(config, Gemma4DSparkConfig)
    ours = Gemma4Layer(config, 0)
    randomise(theirs, seed=1)
    weights = tree_flatten(theirs.parameters())
    assert {name for name, _ in weights} == dict(tree_flatten(ours.parameters())).keys()
    ours.load_weights(weights)
    x = mx.random.normal((1, 6, 32))
    wanted, *_ = theirs(x, "causal", KVCache())
    got = ours(x, ours.input_layernorm(x), mx.zeros((1, 0, 32)), KVCache())
    np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=1e-5, atol=1e-6)


def knowing(weights: Weights, text: list[int]) -> Weights:
    """A draft vocabulary of the text's tokens, and Markov weights that put every token's most
    frequent successor in the text first."""
    tokens = sorted(set(text))
    w1, w2 = np.zeros((VOCABULARY, SHAPE.rank)), np.zeros((len(tokens), SHAPE.rank))
    for i, token in enumerate(tokens):
        w1[token, i] = 1
        after = Counter(b for a, b in pairwise(text) if a == token)
        for successor, _ in after.most_common(1):
            w2[tokens.index(successor), i] = 50
    return weights | {
        "markov_head.markov_w1.weight": w1.astype(np.float32),
        "markov_head.markov_w2.weight": w2.astype(np.float32),
        "lm_head.weight": weights["lm_head.weight"][tokens],
        "d2t": offsets(tokens),
    }


@pytest.mark.parametrize("kind", ["random", "knowing"])
def test_greedy_text_is_the_targets(kind: str, tokenizer: TokenizerWrapper, tmp_path: Path) -> None:
    model, prompt = build("gemma4_text"), random_prompt(9)
    plain = [t for t, _ in plain_steps(model, tokenizer, prompt, max_tokens=40)]
    config, weights = dspark_gemma4(SHAPE, num_target_layers=SIZES["num_hidden_layers"])
    if kind == "knowing":
        weights = knowing(weights, [prompt[-1], *plain])
    drafter = load_drafter(save(tmp_path / "drafter", config, weights), model)
    responses = list(dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, max_tokens=40))
    assert [r.token for r in responses] == plain
    done = responses[-1].statistics
    assert done.rounds > 3
    if kind == "knowing":
        assert done.accepted > done.rounds  # more than one drafted token a round


def test_absent_rope_parameters_mean_transformers_defaults(tmp_path: Path) -> None:
    assert Gemma4TextConfig().to_dict()["rope_parameters"]["full_attention"] == GEMMA4_ROPE
    config, weights = dspark_gemma4()
    del config["rope_parameters"]
    opened = open_checkpoint(save(tmp_path, config, weights)).config
    assert opened.rope_theta == 1e6
    assert opened.rope_scaling == {"rope_type": "proportional", "partial_rotary_factor": 0.25}


def test_settings_are_those_of_global_layers(tmp_path: Path) -> None:
    config = open_checkpoint(save(tmp_path, *dspark_gemma4())).config
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (32, 1, 5000)
    assert (config.first_slot, config.num_proposals, config.layer_causal(0)) == (0, 5, False)
    assert config.input_embedding_scale == pytest.approx(32**0.5)
    assert config.final_logit_softcapping == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"enable_moe_block": True}, "enable_moe_block is True"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input is 8"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types is .*sliding"),
        ({"global_head_dim": None}, "states no global_head_dim"),
        ({"global_head_dim": 12}, "of global_head_dim 12 is no number of pairs"),
        ({"global_head_dim": "512"}, "of global_head_dim '512' is no number of pairs"),
        ({"num_global_key_value_heads": None}, "states no num_global_key_value_heads"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters is 3"),
    ],
)
def test_other_layers_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config, weights = dspark_gemma4()
    with pytest.raises(InputError, match=message):
        open_checkpoint(save(tmp_path, config | changes, weights))

"""draft_quant: what is packed, and that drafts are those of weights packed by hand."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO, load_drafter
from tests.support.tiny import random_prompt


@pytest.fixture(scope="module")
def target() -> nn.Module:
    return dspine_mlx.load()[0]


def candidates(drafter: Drafter) -> mx.array:
    size = len(drafter.config.target_layer_ids) * drafter.target.hidden_size
    features = mx.random.normal((1, 9, size), key=mx.random.key(4))
    return drafter.propose(mx.array(5), features, drafter.make_cache()).ranked().candidates


@pytest.mark.parametrize("bits", [4, 8])
def test_large_matrices_are_packed_and_small_ones_are_not(bits: int, target: nn.Module) -> None:
    exact = dict(tree_flatten(load_drafter(DEMO / "drafter", target).network.parameters()))
    drafter = load_drafter(DEMO / "drafter", target, draft_quant=bits)
    packed = dict(tree_flatten(drafter.network.parameters()))
    scaled = {name.removesuffix(".scales") for name in packed if name.endswith(".scales")}
    assert "layers.0.mlp.up_proj" in scaled
    assert "norm" not in scaled
    for name in scaled:
        weight = exact[f"{name}.weight"]
        wq, scales, biases = mx.quantize(weight, group_size=64, bits=bits)
        assert mx.array_equal(packed[f"{name}.weight"], wq).item()
        assert mx.array_equal(packed[f"{name}.scales"], scales).item()
        assert mx.array_equal(packed[f"{name}.biases"], biases).item()
    same = {n for n in exact if n.rpartition(".")[0] not in scaled}
    assert all(mx.array_equal(exact[n], packed[n]).item() for n in same)
    assert candidates(drafter).shape == candidates(load_drafter(DEMO / "drafter", target)).shape


def test_the_text_stays_the_targets() -> None:
    prompt, texts = random_prompt(6), []
    for bits in (None, 4):
        model, tokenizer, drafter = dspine_mlx.load(draft_quant=bits)
        options: dict[str, Any] = {"max_tokens": 24, "verify_length": 4}
        texts.append(dspine_mlx.generate(model, tokenizer, prompt, drafter, **options))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("bits", [0, 3, 16, True, 4.0, "4"], ids=repr)
def test_other_widths_are_refused(bits: Any, target: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it must be 4 or 8 bits, or left out"):
        load_drafter(tmp_path, target, draft_quant=bits)

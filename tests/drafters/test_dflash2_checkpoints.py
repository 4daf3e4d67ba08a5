"""DFlash2's checkpoints: settings, what is packed, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspine_mlx.checkpoints.files import read_tensors
from dspine_mlx.checkpoints.open import open_checkpoint
from dspine_mlx.convert.conversion import convert
from dspine_mlx.drafters.dflash2 import DFlash2Config
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter
from tests.support.checkpoints import Shape, random_features, save, tiny_target
from tests.support.dflash2 import (
    LARGE,
    Sizes,
    dflash2_speculators,
    dflash2_zlab,
    keys,
    propose,
)

BAD: list[tuple[dict[str, Any], str]] = [
    ({"conv_group_size": None}, "lacks conv_group_size"),
    ({"selector_rank": None, "selector_top_k": None}, "lacks selector_rank, selector_top_k"),
    ({"conv_group_size": 5}, "conv_group_size 5 does not divide hidden_size 32"),
    ({"conv_kernel_size": 0}, "conv_kernel_size is 0; it must be 1 or above"),
    ({"selector_top_k": 97}, "selector_top_k is 97; there are only 96 tokens"),
    ({"selector_vocab_size": 4}, "selector_top_k is 5; there are only 4 tokens"),
    ({"selector_vocab_size": 97}, "selector_vocab_size is 97; the vocabulary has 96"),
    ({"selector_rank": "6"}, "selector_rank is '6'"),
    ({"output_multiplier": 0}, "output_multiplier is 0"),
    ({"draft_vocab_size": 40}, "draft_vocab_size is 40; DFlash2 drafters propose from the whole"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    config = dflash2_zlab()[0]
    config["dflash_config"] |= changes
    with pytest.raises(InputError, match=message):
        DFlash2Config.from_dict(config)


def test_only_the_large_matrices_are_packed(tmp_path: Path) -> None:
    """Codebooks, kernels and their projections stay exact, at 4 and at 8 bits."""
    shape = Shape(H=64, I=64, hd=16)
    source = save(tmp_path / "source", *dflash2_zlab(shape, Sizes(r=64)))
    for bits in (4, 8):
        convert(source, tmp_path / f"out{bits}", quantize=True, q_bits=bits)
        tensors = read_tensors(tmp_path / f"out{bits}")
        packed = {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}
        assert packed == {"fc", *(f"layers.{i}.{name}" for i in range(2) for name in LARGE)}
        drafter = load_drafter(tmp_path / f"out{bits}", tiny_target(shape)[0])
        assert propose(drafter, random_features(shape, 4), 3).candidates.shape == (4, 5)


def codebook_of(vocabulary: int) -> np.ndarray:
    return np.ones((vocabulary, 6), np.float32)


WRONG: dict[str, tuple[dict[str, Any], dict[str, np.ndarray | None], str]] = {
    "half a selector": (
        {"selector_top_k": None},
        {},
        "config.json lacks selector_top_k; a DFlash2Config needs them",
    ),
    "a convolution without its group size": ({"conv_group_size": None}, {}, "conv_group_size"),
    "half a selector's tensors": (
        {},
        {"candidate_selector.successor_codebook": None},
        r"missing: candidate_selector.successor_codebook \[96, 6\]",
    ),
    "no selector": (
        {},
        {
            f"candidate_selector.{name}": None
            for name in (
                "predecessor_codebook",
                "successor_codebook",
                "hidden_projection.weight",
            )
        },
        "no tensor is named candidate_selector",
    ),
    "codebooks of another vocabulary": (
        {},
        {"candidate_selector.predecessor_codebook": codebook_of(97)},
        r"candidate_selector.predecessor_codebook is \[97, 6\], not \[96, 6\]",
    ),
    "too many candidates": ({"selector_top_k": 97}, {}, "selector_top_k is 97"),
    "kernels of another size": (
        {"conv_kernel_size": 3},
        {},
        r"layers.0.attention_conv.base_kernel is \[2, 2, 32\], not \[2, 3, 32\]",
    ),
    "MiniMax's activation": ({"hidden_act": "swigluoai"}, {}, "hidden_act is 'swigluoai'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_checkpoints_are_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    changes, tensors, message = WRONG[name]
    config, weights = dflash2_zlab()
    config["dflash_config"] |= changes
    weights |= {name: value for name, value in tensors.items() if value is not None}
    kept = {n: value for n, value in weights.items() if n not in tensors or tensors[n] is not None}
    with pytest.raises(InputError, match=message):
        convert(save(tmp_path / "source", config, kept), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_speculators_defaults_are_its_classes(tmp_path: Path) -> None:
    """An absent size means 2, 16, 256 and 16; bidirectional sliding layers; a stated vocabulary
    must be the whole one."""
    shape, sizes = Shape(H=32, V=300), Sizes(C=2, g=16, r=256, K=16)
    config, weights = dflash2_speculators(shape, sizes)
    for name in keys(sizes):
        del config[name]
    opened = open_checkpoint(save(tmp_path / "a", config, weights))
    assert {name: vars(opened.config)[name] for name in keys(sizes)} == keys(sizes)
    assert not opened.config.layer_causal(0)
    assert opened.config.window_from_anchor
    config["sliding_window_non_causal"] = False
    assert open_checkpoint(save(tmp_path / "b", config, weights)).config.layer_causal(0)
    config["draft_vocab_size"] = 200
    with pytest.raises(InputError, match="draft_vocab_size is 200"):
        open_checkpoint(save(tmp_path / "c", config, weights))

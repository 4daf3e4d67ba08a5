"""Every published layout converts, and its round equals NumPy's on the source's own tensors."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspine_mlx.checkpoints.open import open_checkpoint
from dspine_mlx.convert.conversion import convert
from dspine_mlx.convert.reference import dflash_round, dspark_round, dspine_round
from dspine_mlx.convert.reference_dflash2 import dflash2_round
from dspine_mlx.convert.reference_domino import domino_round
from dspine_mlx.convert.verify import verify
from dspine_mlx.load import load_drafter
from tests.support.checkpoints import (
    Checkpoint,
    Shape,
    dflash_block7,
    dflash_zlab,
    dspark_deepspec,
    dspark_gemma4,
    dspark_specforge,
    dspine_reference,
    dspine_specforge,
    dspine_tencent,
    save,
    speculators,
    tiny_target,
)
from tests.support.dflash2 import Sizes, dflash2_speculators, dflash2_zlab
from tests.support.domino import domino_specforge
from tests.support.same_round import assert_same_round

SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 128,
}
YARN_FACTOR = YARN | {"attention_factor": 1.7}
WINDOWED = speculators()[0]["transformer_layer_config"] | SLIDING
Maker = Callable[[Shape], Checkpoint]


def weighted(checkpoint: Checkpoint) -> Checkpoint:
    """As others' converted copies name the codebooks."""
    config, weights = checkpoint
    named = {f"{n}.weight" if n.endswith("codebook") else n: v for n, v in weights.items()}
    return config, named


DFLASH: dict[str, Maker] = {
    "z-lab": dflash_zlab,
    "z-lab, block size nested": partial(dflash_zlab, nested_block=True),
    "z-lab, sliding": partial(dflash_zlab, **SLIDING),
    "z-lab, sliding, not causal": partial(dflash_zlab, is_causal=False, **SLIDING),
    "z-lab, yarn": partial(dflash_zlab, rope_scaling=YARN, max_position_embeddings=4096),
    "z-lab, yarn with a factor": partial(dflash_zlab, rope_parameters=YARN_FACTOR),
    "z-lab, linear rope": partial(dflash_zlab, rope_scaling={"type": "linear", "factor": 4.0}),
    "z-lab, scaled and capped": partial(
        dflash_zlab, input_embedding_scale=3.0, output_multiplier=0.5, final_logit_softcapping=2.0
    ),
    "speculators": partial(speculators, method="dflash"),
    "speculators, sliding": partial(
        speculators, method="dflash", transformer_layer_config=WINDOWED
    ),
    "speculators, sliding, not causal": partial(
        speculators,
        method="dflash",
        transformer_layer_config=WINDOWED,
        sliding_window_non_causal=True,
    ),
    "speculators, reduced": partial(speculators, method="dflash", reduced=True),
}
DSPARK: dict[str, Maker] = {
    "DeepSpec": dspark_deepspec,
    "DeepSpec, gated": partial(dspark_deepspec, kind="gated"),
    "DeepSpec, rnn": partial(dspark_deepspec, kind="rnn"),
    "DeepSpec, Gemma 4": dspark_gemma4,
    "DeepSpec, Gemma 4, own values": partial(dspark_gemma4, k_eq_v=False),
    "DeepSpec, Gemma 4, gated": partial(dspark_gemma4, kind="gated"),
    "dflash_*_block7": dflash_block7,
    "SpecForge": dspark_specforge,
    "SpecForge, gated": partial(dspark_specforge, kind="gated"),
    "SpecForge, nested heads": partial(dspark_specforge, nested=True),
    "SpecForge, interleaved": partial(dspark_specforge, rope_is_neox_style=False),
    "SpecForge, yarn": partial(dspark_specforge, rope_scaling=YARN),
    "speculators": speculators,
    "speculators, reduced": partial(speculators, reduced=True),
    "speculators, mask first": partial(speculators, sample_from_anchor=False),
}
CHANNELS = Sizes(g=1)  # divides any width
DFLASH2: dict[str, Maker] = {
    "z-lab": partial(dflash2_zlab, sizes=CHANNELS),
    "z-lab, sliding and full": partial(dflash2_zlab, **SLIDING),
    "z-lab, sliding, causality unstated": partial(dflash2_zlab, is_causal=None, **SLIDING),
    "z-lab, some tokens": partial(dflash2_zlab, sizes=CHANNELS, selector_vocab_size=40),
    "z-lab, codebooks are weights": lambda shape: weighted(dflash2_zlab(shape, CHANNELS)),
    "speculators": partial(dflash2_speculators, sizes=CHANNELS),
    "speculators, sliding, causal": partial(dflash2_speculators, sliding_window_non_causal=False),
}
DOMINO: dict[str, Maker] = {
    "SpecForge": domino_specforge,
    "SpecForge, not shifted": partial(domino_specforge, shift=False),
    "SpecForge, shift unstated": partial(domino_specforge, shift=None),
    "SpecForge, older names": partial(domino_specforge, older=True),
    "SpecForge, corrected from the first": partial(domino_specforge, prefix=0),
}
DSPINE: dict[str, Maker] = {
    "SpecForge": dspine_specforge,
    "SpecForge, causality unstated": partial(dspine_specforge, is_causal=None),
    "SpecForge, from two slots back": lambda shape: dspine_specforge(replace(shape, reach=2)),
    "reference": dspine_reference,
    "Tencent": dspine_tencent,
}
LAYOUTS = {f"{method}, {name}": (maker, score) for method, makers, score in (
    ("DFlash", DFLASH, dflash_round),
    ("DSpark", DSPARK, dspark_round),
    ("DSpine", DSPINE, dspine_round),
    ("DFlash2", DFLASH2, dflash2_round),
    ("Domino", DOMINO, domino_round),
) for name, maker in makers.items()}  # fmt: skip


@pytest.mark.parametrize(("maker", "score"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_converts_and_keeps_its_round(
    tmp_path: Path, maker: Maker, score: Callable[..., Any]
) -> None:
    shape = Shape()
    checkpoint = maker(shape)
    model, head = tiny_target(shape)
    source = save(tmp_path / "source", *checkpoint, shards=2)
    assert_same_round(load_drafter(source, model), score, checkpoint, head, shape)
    convert(source, tmp_path / "out")
    assert_same_round(load_drafter(tmp_path / "out", model), score, checkpoint, head, shape)
    found = verify(open_checkpoint(source), tmp_path / "out")
    assert found.passed
    assert found.exact


shapes = st.builds(
    lambda kv, groups, hd, taps, **rest: Shape(
        kv=kv, heads=kv * groups, hd=2 * hd, taps=tuple(sorted(taps)), **rest
    ),
    kv=st.integers(1, 3),
    groups=st.integers(1, 3),
    hd=st.integers(2, 6),
    taps=st.sets(st.integers(0, 5), min_size=1, max_size=4),
    H=st.integers(5, 40),
    I=st.integers(4, 50),
    L=st.integers(1, 3),
    V=st.integers(41, 130),
    B=st.integers(2, 7),
    r=st.integers(2, 30),
    a=st.integers(1, 20),
    rank=st.integers(1, 12),
    seed=st.integers(0, 9),
)
PLAIN = [name for name in LAYOUTS if "sliding" not in name]  # windows name two layers


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shape=shapes, name=st.sampled_from(PLAIN), tied=st.booleans(), shards=st.integers(1, 3))
def test_any_shape_converts(shape: Shape, name: str, tied: bool, shards: int) -> None:
    maker, score = LAYOUTS[name]
    checkpoint = maker(shape)
    model, head = tiny_target(shape, tied)
    with TemporaryDirectory() as folder:
        source = save(Path(folder) / "source", *checkpoint, shards=shards)
        convert(source, Path(folder) / "out")
        drafter = load_drafter(Path(folder) / "out", model)
    assert_same_round(drafter, score, checkpoint, head, shape)


# --- what a wrong reading would give: the comparison above must be able to fail ------------------


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("DFlash, z-lab", {"is_causal": True}),
        ("DFlash, z-lab", {"rope_theta": 1e6}),
        ("DFlash, z-lab", {"rms_norm_eps": 1e-2}),
        ("DFlash, z-lab", {"block_size": 4}),
        ("DSpark, DeepSpec", {"sample_from_anchor": False}),
        ("DSpark, SpecForge", {"rope_is_neox_style": False}),
    ],
)
def test_another_reading_of_the_config_is_noticed(
    tmp_path: Path, name: str, change: dict[str, Any]
) -> None:
    maker, score = LAYOUTS[name]
    config, weights = maker(Shape())
    model, head = tiny_target(Shape())
    drafter = load_drafter(save(tmp_path, config | change, weights), model)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        assert_same_round(drafter, score, (config, weights), head, Shape())


def test_verify_notices_a_changed_tensor(tmp_path: Path) -> None:
    source = save(tmp_path / "source", *dspine_specforge())
    convert(source, tmp_path / "out")
    weights = mx.load(str(tmp_path / "out" / "model.safetensors"))
    gates = weights["injection.gates.weight"]
    weights["injection.gates.weight"] = mx.concatenate([gates[12:24], gates[:12], gates[24:]])
    mx.eval(weights)
    mx.save_safetensors(str(tmp_path / "out" / "model.safetensors"), weights)
    assert not verify(open_checkpoint(source), tmp_path / "out").passed

"""Whole targets of every packing, and of experts: what a race chooses runs, from its own text.

MLX's kernel for one row runs from its text, too.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.metal.experts import EXPERTS_EXACT, ExactExperts
from dspine_mlx.metal.rows import ROWS_TILE, Tile
from dspine_mlx.metal.rows_exact import ROWS_EXACT, Exact
from dspine_mlx.target.model import Target
from dspine_mlx.target.row_kernels import RowKernels
from dspine_mlx.target.verdicts import ExpertShape
from tests.support import mlx_one_row
from tests.support.families import build
from tests.support.metal_device import emulator, needs_emulator
from tests.support.racing import Track, quick

pytestmark = [pytest.mark.slow, needs_emulator]

ROWS = 3
SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64,
         "num_hidden_layers": 2, "vocab_size": 64, "tie_word_embeddings": True}  # fmt: skip
PACKINGS: dict[str, dict[str, Any]] = {
    "8 bits": {"group_size": 64, "bits": 8},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "bfloat16": {},
    "float16": {},
}
DENSE = ("bfloat16", "float16")


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Track:
    """Kernels run in the emulator, and are faster than stock by the clock."""
    monkeypatch.setattr(mx, "quantized_matmul", mlx_one_row.on_a_gpu)
    monkeypatch.setattr(mx, "gather_qmm", mlx_one_row.gather_qmm)
    quick(monkeypatch)
    track = Track(monkeypatch)
    track.tile.spoil = lambda y, _: y
    track.tile.device, track.exact.device = emulator(ROWS_TILE), emulator(ROWS_EXACT)
    for device in (track.tile.device, track.exact.device, emulator(EXPERTS_EXACT)):
        device.check, device.order = False, 0
    track.experts.real = True
    monkeypatch.setattr(EXPERTS_EXACT, "function", emulator(EXPERTS_EXACT))
    return track


def packed(family: str, packing: str, **changes: Any) -> Target:
    model = build(family, None, **SIZES | changes)
    if packing in DENSE:
        model.set_dtype(getattr(mx, packing))
    else:
        nn.quantize(model, **PACKINGS[packing])
    return Target(model)


def settled(track: Track, target: Target, mode: str) -> RowKernels:
    kernels = RowKernels(target, track.race(mode))
    kernels.settle([ROWS], seconds=1e9)
    return kernels


def chosen(track: Track, kernels: RowKernels) -> set[type]:
    return {type(v.product) for v in track.products(kernels).values()}


def forward(target: Target) -> mx.array:
    ids = mx.array([[5, 9, 2]])
    logits: mx.array = target.model(ids, cache=make_prompt_cache(target.model))
    return logits.astype(mx.float32)


@pytest.mark.parametrize("packing", PACKINGS)
def test_tiles_of_every_packing(track: Track, packing: str) -> None:
    target = packed("qwen3", packing)
    kernels = settled(track, target, "auto")
    assert chosen(track, kernels) == {Tile}
    plain, before = forward(target), track.tile.calls
    with kernels.verifying(ROWS):
        ours = forward(target)
    assert track.tile.calls - before == 7 * len(target.layers) + 1  # the tied head
    allowed = {"bfloat16": 0.06, "float16": 0.01}.get(packing, 1e-4) * mx.abs(plain).max()
    assert mx.abs(ours - plain).max().item() <= allowed.item()


@pytest.mark.parametrize("packing", [p for p in PACKINGS if p not in DENSE])
def test_exact_rows_of_every_packing(track: Track, packing: str) -> None:
    """Every linear layer has the bits of MLX's one-row kernel, and so has the target."""
    target = packed("qwen3", packing)
    kernels = settled(track, target, "exact")
    assert chosen(track, kernels) == {Exact}
    before = track.exact.calls
    kernels.check([ROWS], depths=(6,))
    assert track.exact.calls > before
    assert (kernels.unequal, kernels.width_limit) == ({}, 1)  # 2 rows were not asked for
    assert kernels.checked == {ROWS}


@pytest.mark.parametrize("packing", ["8 bits", "mxfp4"])
def test_experts_that_rows_share(track: Track, packing: str) -> None:
    """Together with the other layers; a last bit of theirs is found."""
    target = packed("qwen3_moe", packing, num_hidden_layers=1)
    kernels = settled(track, target, "exact")
    experts = {type(v.product) for (s, _), v in kernels.verdicts.items() if type(s) is ExpertShape}
    assert experts == {ExactExperts}
    before = track.experts.calls
    kernels.check([ROWS], depths=(6,))
    assert track.experts.calls > before
    assert kernels.unequal == {}
    track.experts.spoil = lambda cut, y, _: y * (1 + 2**-23)
    kernels.checked.clear()
    kernels.check([ROWS], depths=(6,))
    assert list(kernels.unequal) == [ROWS]

"""The whole-model check: it passes what is equal, and refuses a last bit anywhere."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from dspine_mlx.target.equal_rows import Packing, differing_widths, unequal_widths
from dspine_mlx.target.model import Target
from tests.support.each_family import EVERY_FAMILY
from tests.support.families import WINDOW, build

WIDTHS = (2, 3, 5)


# Those whose several rows are computed otherwise than one, on any backend: Mamba-2's states in
# chunks, and Kimi's latent attention.
UNEQUAL = {"kimi_linear", "nemotron_h", "falcon_h1", "granitemoehybrid", "mamba2"}
WINDOWED = {"llama_sliding", "olmo3", "gemma3_text", "gemma3", "gemma4_text", "gemma4", "gpt_oss",
            "recurrent_gemma"}  # fmt: skip


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_the_wheels_own_backend_is_equal(family: str) -> None:
    """MLX's CPU wheel gives a row the same bits whatever rides along: experts, hybrids, and windows
    as long as they are not full."""
    target = Target(build(family, 4))
    found = unequal_widths(target, WIDTHS, depths=(10, WINDOW - WIDTHS[-1]))
    assert set(found) == (set(WIDTHS) if family in UNEQUAL else set())


@pytest.mark.parametrize("family", sorted(WINDOWED))
def test_a_full_window_adds_in_another_order(family: str) -> None:
    """One row is written over the oldest; several are appended, oldest first."""
    target = Target(build(family, 4))
    found = unequal_widths(target, WIDTHS, depths=(2 * WINDOW,))
    assert found == dict.fromkeys(WIDTHS, f"logits differ after {2 * WINDOW} positions")


def test_each_position_of_the_contexts_is_fed_once() -> None:
    """Deeper contexts go on from the others, and no width feeds them again."""
    target, fed = Target(build("qwen3", 4)), 0
    model = target.model

    class Counting:
        def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
            nonlocal fed
            fed += tokens.size if tokens.size > max(WIDTHS) else 0
            logits: mx.array = model(tokens, **options)
            return logits

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    target.model = Counting()
    assert unequal_widths(target, WIDTHS, depths=(30, 90)) == {}
    assert fed == 90


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_quantised_caches_are_equal_on_the_wheels_backend(family: str) -> None:
    target = Target(build(family, 4, head_dim=32))
    assert unequal_widths(target, WIDTHS, depths=(40,), packing=Packing(8, 32)) == {}


def faulty(module: nn.Module, only: int, spoil: Any) -> Any:
    """A context of verify forwards: at `only` rows the module's output is spoiled."""
    cls = type(module)

    @contextmanager
    def verifying(rows: int) -> Iterator[None]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = cls.__call__(self, *args, **kwargs)
            return spoil(output) if rows == only else output

        module.__class__ = type(cls.__name__, (cls,), {"__call__": call})
        try:
            yield
        finally:
            module.__class__ = cls

    return verifying


def last_bits(y: mx.array) -> mx.array:
    """Flipped in the last row."""
    last = mx.arange(y.shape[1])[:, None] == y.shape[1] - 1
    return (y.view(mx.uint32) ^ last.astype(mx.uint32)).view(y.dtype)


@pytest.mark.parametrize("layer", ["lm_head", "down_proj", "k_proj"])
def test_last_bits_are_found(layer: str) -> None:
    """Of the head, within a layer and in what a cache keeps."""
    target = Target(build("qwen3", 4))
    last = target.layers[-1]
    module = {
        "lm_head": target.lm_head,
        "down_proj": last.mlp.down_proj,
        "k_proj": last.self_attn.k_proj,
    }[layer]
    found = unequal_widths(target, WIDTHS, faulty(module, 3, last_bits), depths=(20,))
    assert list(found) == [3]
    assert found[3] in ("logits differ after 20 positions", "caches differ after 20 positions")


def test_a_cache_is_looked_at_where_no_row_sees_it() -> None:
    """The last row's value of the last layer is spoiled after its attention: no logits show it."""
    target = Target(build("qwen3", 4))
    layer = target.layers[-1].self_attn
    cls = type(layer)

    @contextmanager
    def verifying(rows: int) -> Iterator[None]:
        def call(self: nn.Module, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            output: mx.array = cls.__call__(self, x, mask, cache)
            at = cache.offset - 1
            cache.values[0, 0, at, 0] = cache.values[0, 0, at, 0] * 1.001
            return output

        layer.__class__ = type(cls.__name__, (cls,), {"__call__": call})
        try:
            yield
        finally:
            layer.__class__ = cls

    found = unequal_widths(target, (4,), verifying, depths=(20,))
    assert found == {4: "caches differ after 20 positions"}


def test_a_rollback_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from dspine_mlx.target import rollback

    def wrong(self: rollback.KVMark, rows: int) -> None:
        self.cache.trim(self.cache.offset - self.offset - rows - 1)

    monkeypatch.setattr(rollback.KVMark, "keep_first", wrong)
    found = unequal_widths(Target(build("qwen3", 4)), (4,), depths=(20,))
    assert found == {4: "logits after a rollback differ after 20 positions"}


@pytest.mark.parametrize("family", ["qwen3", "mamba2"])
def test_no_width_differs_by_the_wheels_blas(family: str) -> None:
    """Though rows of Mamba-2 do."""
    assert differing_widths(Target(build(family, 4)), WIDTHS) == frozenset()


OPENBLAS = Path("/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3")
WITH_OPENBLAS = """
from dspine_mlx.target.equal_rows import differing_widths
from dspine_mlx.target.model import Target
from tests.support.families import build
target = Target(build("qwen3", None))
print(sorted(differing_widths(target, (2, 16))))
"""


@pytest.mark.skipif(not OPENBLAS.exists(), reason="needs Debian's libopenblas0-pthread")
def test_widths_differ_by_an_optimised_blas() -> None:
    environment = os.environ | {"LD_PRELOAD": str(OPENBLAS), "MLX_DISABLE_COMPILE": "1"}
    command = [sys.executable, "-c", WITH_OPENBLAS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "16" in result.stdout


def test_the_callers_random_state_is_left_alone() -> None:
    target = Target(build("qwen3", None))
    mx.random.seed(7)
    wanted = mx.random.normal((3,)).tolist()
    mx.random.seed(7)
    unequal_widths(target, (2,), depths=(8,))
    differing_widths(target, (2,))
    assert mx.random.normal((3,)).tolist() == wanted

"""End to end: a 4-bit target decodes with the kernels that a race chose, run from their own text.

MLX's kernels for one row, product and attention, run from their own text, too; what it does with
several rows stands for a GPU's: another order of summation.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.metal.attention import ROWS_ATTENTION, ROWS_MERGE, Parts
from dspine_mlx.metal.exact_attention import EXACT_ATTENTION, EXACT_MERGE, ExactAttention
from dspine_mlx.metal.rows import ROWS_TILE
from dspine_mlx.metal.rows_exact import ROWS_EXACT
from dspine_mlx.target import attention_race
from dspine_mlx.target.row_kernels import RowKernels, prepare
from tests.msl import Emulator
from tests.support import mlx_attention, mlx_one_row
from tests.support.families import build, scripted_drafter
from tests.support.metal_device import emulator, needs_emulator, needs_metal
from tests.support.racing import Track, quick
from tests.support.tiny import plain_steps, random_prompt, same_steps

SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "tie_word_embeddings": True,
         "num_hidden_layers": 2}  # fmt: skip
FAMILIES = ("qwen3", "qwen3_5")  # attention; gated delta in every other layer
WIDTHS, TOKENS = range(2, 6), 12
TWO_PASSES = 16  # keys past which a row attends in two passes


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Track:
    """Kernels run in the emulator, and are faster than stock by the clock."""

    several = mx.fast.scaled_dot_product_attention

    def attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float, **rest: Any) -> mx.array:
        """One pass up to 16 keys, then two."""
        if q.shape[2] > 1:
            return several(q, k, v, scale=scale, **rest)
        if k.shape[2] <= TWO_PASSES:
            return mlx_attention.one_pass(q, k, v, scale)
        return mlx_attention.two_pass(q, k, v, scale, blocks=64)

    monkeypatch.setattr(mx, "quantized_matmul", mlx_one_row.on_a_gpu)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(attention_race, "parts_of", lambda keys: (Parts(2),))
    quick(monkeypatch)
    track = Track(monkeypatch)
    track.tile.spoil = lambda y, _: y
    track.tile.device = Emulator(ROWS_TILE.definition)
    track.exact.device = Emulator(ROWS_EXACT.definition)
    track.parts.real = track.exact_attention.real = True
    track.parts.spoil = lambda cut, y, _: y
    for kernel in (ROWS_ATTENTION, ROWS_MERGE, EXACT_ATTENTION, EXACT_MERGE):
        monkeypatch.setattr(kernel, "function", emulator(kernel))
    monkeypatch.setattr(attention_race, "LONG", (10, 16))
    monkeypatch.setattr(attention_race, "EXACT", (1, TWO_PASSES, 64))
    return track


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    made = {}
    for family in FAMILIES:
        model = build(family, None, **SIZES)
        nn.quantize(model, group_size=64, bits=4)
        made[family] = model
    return made


def steps(model: nn.Module, tokenizer: TokenizerWrapper, drafter: Any, prompt: list[int]) -> Any:
    """At most 5 rows per round."""
    responses = dspine_mlx.stream_generate(
        model, tokenizer, prompt, drafter, max_tokens=TOKENS, verify_length=4
    )
    return [(r.token, r.logprobs) for r in responses]


@needs_emulator
@pytest.mark.parametrize("mode", ["auto", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding(
    track: Track, models: dict[str, nn.Module], tokenizer: TokenizerWrapper, family: str, mode: str
) -> None:
    model, prompt = models[family], random_prompt(9)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=TOKENS)
    text = prompt + [token for token, _ in plain]
    drafter = scripted_drafter(model, text, "now and then")
    kernels = RowKernels(drafter.target, track.race(mode))
    kernels.settle(WIDTHS, seconds=1e9)
    kernels.check(WIDTHS, depths=(12,))
    drafter.target.verify_kernels = kernels
    kernel = track.tile if mode == "auto" else track.exact
    before, others = kernel.calls, track.tile.calls + track.exact.calls
    attended = track.parts.calls, track.exact_attention.calls
    ours = steps(model, tokenizer, drafter, prompt)
    assert [token for token, _ in ours] == [token for token, _ in plain]
    assert (track.parts.calls > attended[0]) == (mode == "auto")
    assert (track.exact_attention.calls > attended[1]) == (mode == "exact")
    launched = kernel.calls - before
    assert launched >= drafter.rounds * len(model.layers) * 5
    assert track.tile.calls + track.exact.calls - others == launched
    attention = {
        v.product for (shape, _), v in kernels.verdicts.items() if "heads" in shape._fields
    }
    if mode == "exact":
        assert {(p.passes, p.blocks) for p in attention if isinstance(p, ExactAttention)} == {
            (1, 32), (2, 64)}  # fmt: skip
        assert kernels.unequal == {}
        assert kernels.width_limit == 5
        assert same_steps(ours, plain)
    else:
        assert attention == {Parts(2)}
        assert all(mx.allclose(a, b, atol=1e-3) for (_, a), (_, b) in zip(ours, plain, strict=True))
        assert not same_steps(ours, plain)


@needs_emulator
def test_the_whole_model_check_refuses_a_last_bit(
    track: Track, models: dict[str, nn.Module], tokenizer: TokenizerWrapper
) -> None:
    """At one width, in one layer's kernel, past the race: only narrower ones are verified."""
    model, prompt = models["qwen3"], random_prompt(9)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=TOKENS)
    drafter = scripted_drafter(model, prompt + [token for token, _ in plain], "right")
    kernels = RowKernels(drafter.target, track.race("exact"))
    kernels.settle(WIDTHS, seconds=1e9)
    track.exact.spoil = lambda y, _: flipped(y) if len(y) == 4 else y
    kernels.check(WIDTHS, depths=(12,))
    assert kernels.unequal == {4: "logits differ after 12 positions"}
    assert kernels.width_limit == 3
    assert kernels.promise().endswith("for this target, up to 3 rows, as checked.")
    drafter.target.verify_kernels = kernels
    assert same_steps(steps(model, tokenizer, drafter, prompt), plain)
    assert drafter.rounds >= TOKENS / 3


def flipped(y: mx.array) -> mx.array:
    """The last bit of every value of the last row."""
    last = mx.arange(len(y)).reshape(-1, *[1] * (y.ndim - 1)) == len(y) - 1
    return (y.view(mx.uint32) ^ last.astype(mx.uint32)).view(y.dtype)


@needs_emulator
def test_the_whole_model_check_refuses_a_last_bit_of_attention(
    track: Track, models: dict[str, nn.Module], tokenizer: TokenizerWrapper
) -> None:
    """In two passes at width 3, past the race."""
    model, prompt = models["qwen3"], random_prompt(20)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=TOKENS)
    drafter = scripted_drafter(model, prompt + [token for token, _ in plain], "right")
    kernels = RowKernels(drafter.target, track.race("exact"))
    kernels.settle(WIDTHS, seconds=1e9)
    track.exact_attention.spoil = lambda cut, y, to: (
        flipped(y.swapaxes(0, 2)).swapaxes(0, 2) if y.shape[2] == 3 and cut.passes == 2 else y
    )
    kernels.check(WIDTHS, depths=(20,))
    assert kernels.unequal == {3: "logits differ after 20 positions"}
    assert kernels.width_limit == 2
    drafter.target.verify_kernels = kernels
    assert same_steps(steps(model, tokenizer, drafter, prompt), plain)


@needs_emulator
def test_no_width_is_verified_before_the_check(
    track: Track, models: dict[str, nn.Module], tokenizer: TokenizerWrapper
) -> None:
    model, prompt = models["qwen3"], random_prompt(9)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=6)
    drafter = scripted_drafter(model, prompt + [token for token, _ in plain], "right")
    kernels = RowKernels(drafter.target, track.race("exact"))
    assert kernels.width_limit == 1
    assert kernels.promise() == (
        "No width has been checked against plain decoding yet, so none is verified."
    )
    drafter.target.verify_kernels = kernels
    responses = dspine_mlx.stream_generate(
        model, tokenizer, prompt, drafter, max_tokens=6, verify_length=7
    )
    assert [r.token for r in responses] == [token for token, _ in plain]
    assert track.exact.calls == 0


@needs_metal
def test_on_metal_an_exact_target_decodes_as_it_does_alone(
    models: dict[str, nn.Module], tokenizer: TokenizerWrapper
) -> None:
    """On the GPU at hand, at whatever widths have passed the check."""
    model, prompt = models["qwen3"], random_prompt(9)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=TOKENS)
    drafter = scripted_drafter(model, prompt + [token for token, _ in plain], "right")
    kernels = prepare(drafter.target, "exact", WIDTHS, None)
    print("\n".join(kernels.explain()))
    assert kernels.width_limit > 1
    drafter.target.verify_kernels = kernels
    ours = steps(model, tokenizer, drafter, prompt)
    assert [token for token, _ in ours] == [token for token, _ in plain]

"""Texts of every family decoded row by row, and rounds that roll back."""

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    make_prompt_cache,
)

from dspine_mlx.target.rollback import Rollback
from tests.support.families import FAMILIES, WINDOW, build

CONTEXT, LENGTH, VOCABULARY = 5, 2 * WINDOW + 10, 256
MAMBA2 = {"nemotron_h", "falcon_h1", "granitemoehybrid", "mamba2"}
WINDOWED = {
    "llama_sliding",
    "olmo3",
    "gemma3_text",
    "gemma3",
    "gemma4_text",
    "gemma4",
    "gpt_oss",
    "recurrent_gemma",
}
# These don't give the same bits for one row and several: the ring of a window is summed in another
# order once it is wrapped, Mamba-2 and latent attention have other formulas for several rows.
ROUNDED = MAMBA2 | WINDOWED | {"kimi_linear"}
AGAIN = {"jamba", "rwkv7", "recurrent_gemma"}  # go back by a second forward
RECORDED = MAMBA2 | {
    "qwen3_5",
    "qwen3_5_wrapped",
    "qwen3_5_moe",
    "qwen3_next",
    "olmo_hybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
}
WRAPPED = {"gemma3", "gemma4", "qwen3_5_wrapped", "qwen3_tied"}  # bodies that others have, too
DISTINCT = [family for family in FAMILIES if family not in WRAPPED]


class Text(NamedTuple):
    model: nn.Module
    tokens: mx.array  # [LENGTH]
    logits: mx.array  # [LENGTH, V], each row from a forward of its own


@cache
def text(family: str, bits: int | None = None) -> Text:
    model = build(family, bits, vocab_size=VOCABULARY)
    tokens = mx.random.randint(0, VOCABULARY, (LENGTH,), key=mx.random.key(3))
    prompt_cache = make_prompt_cache(model)
    rows = [model(token[None, None], cache=prompt_cache)[0] for token in tokens]
    logits = mx.concatenate(rows)
    mx.eval(logits)
    return Text(model, tokens, logits)


def agree(family: str, ours: mx.array, plain: mx.array) -> bool:
    if family in ROUNDED and len(plain):
        return bool(mx.allclose(ours, plain, rtol=0, atol=2e-5 * mx.abs(plain).max().item()))
    return mx.array_equal(ours, plain)


def start(model: nn.Module, tokens: mx.array) -> tuple[list[Any], Rollback]:
    prompt_cache = make_prompt_cache(model)
    model(tokens[None], cache=prompt_cache)
    return prompt_cache, Rollback(prompt_cache, model)


def verify(model: nn.Module, rollback: Rollback, tokens: mx.array) -> mx.array:
    with rollback.verifying(tokens):
        return model(tokens[None], cache=rollback.cache)[0]


def modules(model: nn.Module) -> list[type]:
    return [type(m) for m in model.modules()]

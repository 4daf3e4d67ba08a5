"""Checks of numbers and token ids before they reach MLX, which checks neither.

MLX divides by a group size of 0, reads outside an embedding, and wraps what does not fit into 32
bits. So Python, command line and server all check here first, and raise `InputError`.
"""

import sys
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from transformers import PreTrainedTokenizerBase

from dspine_mlx.errors import InputError
from dspine_mlx.target.model import EMBEDDINGS, find_body, weight_shape

INT32 = (1 << 31) - 1  # MLX counts an array's rows and columns in 32 bits
SEEDS = (1 << 64) - 1
KV_BITS = (1, 2, 3, 4, 5, 6, 8)  # bits that mx.quantize packs
KV_GROUPS = (32, 64, 128)
KERNEL_MODES = ("auto", "exact", "off")
COLDEST = 1e-30  # logprobs / temp must stay in float32's range, or no token is left to draw


def check_whole(name: str, value: Any, low: int, high: int = INT32) -> None:
    """Require an int from low to high: no bool, float, string or NumPy scalar, whatever its
    value."""
    if type(value) is not int:
        kind = type(value).__name__
        raise InputError(f"{name} is {value!r}, of type {kind}; it must be an int from {low} on")
    if value < low:
        raise InputError(f"{name} is {value}; it must be at least {low}")
    if value > high:
        raise InputError(f"{name} is {value}; it must be at most {high}")


def check_real(name: str, value: Any, low: float, high: float) -> None:
    """Require an int or float from low to high: no bool, no NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        kind = type(value).__name__
        raise InputError(f"{name} is {value!r}, of type {kind}; it must be a number")
    if not low <= value <= high:
        raise InputError(f"{name} is {value}; it must lie in [{low}, {high}]")


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}; it must come from load")


def check_tokenizer(tokenizer: Any) -> None:
    """One of transformers', which mlx-lm's wrapper takes."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InputError(f"the tokenizer is a {type(tokenizer).__name__}; it must come from load")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; it must be True or False")


def check_function(name: str, value: Any) -> None:
    """A function, or None for what happens without one."""
    if value is not None and not callable(value):
        raise InputError(f"{name} is {value!r}; it must be a function, or None")


def check_processors(processors: Any) -> None:
    if processors is None:
        return
    if not isinstance(processors, list | tuple):
        raise InputError(f"logits_processors is {processors!r}; it must be a list of functions")
    for i, processor in enumerate(processors):
        if not callable(processor):
            raise InputError(f"logits_processors[{i}] is {processor!r}; it must be a function")


def check_stream(stream: Any) -> None:
    if not isinstance(stream, mx.Stream | mx.ThreadLocalStream):
        raise InputError(f"stream is {stream!r}; it must be an MLX stream")


def check_kernels(mode: Any) -> None:
    if mode not in KERNEL_MODES:
        raise InputError(f"kernels is {mode!r}; it must be one of {', '.join(KERNEL_MODES)}")


def check_seed(seed: Any) -> None:
    check_whole("seed", seed, 0, SEEDS)


def check_temperature(temp: Any) -> None:
    """Require 0 (greedy), or a temperature whose reciprocal MLX can multiply logprobs by."""
    number = isinstance(temp, int | float) and not isinstance(temp, bool)
    if not number or not (temp == 0 or COLDEST <= temp <= sys.float_info.max):
        raise InputError(
            f"temperature is {temp!r}; it must be 0 (greedy), or a number of at least {COLDEST}"
        )


def check_top_k(top_k: Any, vocabulary: int) -> None:
    """Require k below the vocabulary's size, at which mlx-lm's top-k partitions, or 0 for off."""
    check_whole("top_k", top_k, 0)
    if top_k >= vocabulary:
        raise InputError(
            f"top_k is {top_k}; it must be below the vocabulary's {vocabulary} tokens, or 0 for all"
        )


def check_max_tokens(max_tokens: Any) -> None:
    check_whole("max_tokens", max_tokens, -1)
    if max_tokens == 0:
        raise InputError("max_tokens is 0; it must be at least 1, or -1 for no limit")


def check_cache_sizes(prefill_step_size: Any, max_kv_size: Any) -> None:
    check_whole("prefill_step_size", prefill_step_size, 1)
    if max_kv_size is not None:
        check_whole("max_kv_size", max_kv_size, 8)  # mlx-lm keeps the first 4 and some new ones


def check_kv_quantization(bits: Any, group_size: Any, start: Any) -> None:
    """Check mlx-lm's kv_bits, kv_group_size and quantized_kv_start, even if kv_bits is None."""
    if bits is not None and (type(bits) is not int or bits not in KV_BITS):
        raise InputError(f"kv_bits is {bits!r}; it must be one of {listed(KV_BITS)}, or left out")
    if type(group_size) is not int or group_size not in KV_GROUPS:
        raise InputError(f"kv_group_size is {group_size!r}; it must be one of {listed(KV_GROUPS)}")
    check_whole("quantized_kv_start", start, 0)


def listed(numbers: Iterable[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}"


def check_text(prompt: str) -> None:
    """Refuse halves of surrogate pairs, which stand in for bytes that Python could not decode."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the prompt has {prompt[error.start]!a} at character {error.start}, which is no text; "
            "decode it as UTF-8"
        ) from error


def vocabulary_of(model: nn.Module) -> int | None:
    """Rows of a model's embedding; None where an mlx-lm model keeps it in an unknown place."""
    try:
        _, body = find_body(model)
    except InputError:
        return None
    return weight_shape(next(body[name] for name in EMBEDDINGS if name in body))[0]


def prompt_ids(prompt: Any, vocabulary: int | None) -> mx.array:
    """Check a prompt's token ids and return them as an array [n]; a flat list, or a 1-D integer
    array.

    vocabulary: rows of the target's embedding, past which MLX would read other memory; None: not
    known.
    """
    last = INT32 if vocabulary is None else vocabulary - 1
    check_sequence(prompt)
    if len(prompt) == 0:
        raise InputError("the prompt is empty; give at least one token")
    listed = isinstance(prompt, list | tuple)
    ends = (min(prompt), max(prompt)) if listed else (prompt.min().item(), prompt.max().item())
    for token in ends:
        if not 0 <= token <= last:
            raise InputError(
                f"the prompt has the token id {token}, but the target's embedding has ids from 0 "
                f"to {last}; the ids or the tokenizer are another model's"
            )
    return mx.array(np.ascontiguousarray(prompt) if isinstance(prompt, np.ndarray) else prompt)


def check_sequence(prompt: Any) -> None:
    """Require a flat list or tuple of ints, or a 1-D integer array."""
    if isinstance(prompt, list | tuple):
        wrong = [token for token in prompt if type(token) is not int]
        if wrong:
            raise InputError(
                f"the prompt has {wrong[0]!r} among its token ids; each must be an int"
            )
        return
    if isinstance(prompt, mx.array):
        whole = mx.issubdtype(prompt.dtype, mx.integer)
    elif isinstance(prompt, np.ndarray):
        whole = bool(np.issubdtype(prompt.dtype, np.integer))
    else:
        raise InputError(
            f"the prompt is a {type(prompt).__name__}; it must be a string, a flat list of token "
            "ids, or a 1-D integer array"
        )
    if prompt.ndim != 1 or not whole:
        raise InputError(
            f"the prompt is a {prompt.dtype} array of shape {tuple(prompt.shape)}; token ids must "
            "be a 1-D integer array"
        )

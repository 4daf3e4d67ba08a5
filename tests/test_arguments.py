"""Numbers and ids before MLX gets them; what MLX itself takes is asked of MLX."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx import arguments
from dspine_mlx.arguments import (
    check_kv_quantization,
    check_max_tokens,
    check_real,
    check_seed,
    check_temperature,
    check_top_k,
    check_whole,
    prompt_ids,
    vocabulary_of,
)
from dspine_mlx.errors import InputError
from dspine_mlx.round.policy import Fixed, check_verify_length
from dspine_mlx.round.sampler import Sampler
from tests.support.tiny import tiny_dflash

NO_INTS = [2.0, True, "3", None, [3], np.int64(3), mx.array(3), float("nan"), 3 + 0j]


def refused(check: Any, *values: Any) -> str:
    """The message of the `InputError`: one sentence."""
    with pytest.raises(InputError) as caught:
        check(*values)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("value", NO_INTS, ids=repr)
def test_only_ints_are_whole_numbers(value: Any) -> None:
    for check in (check_max_tokens, check_seed, check_verify_length):
        assert repr(value) in refused(check, value)
    assert repr(value) in refused(check_whole, "max_kv_size", value, 8)


@given(st.integers() | st.integers(-3, 3) | st.integers(2**64 - 3, 2**64 + 3))
def test_seeds_are_those_that_mlx_takes(seed: int) -> None:
    try:
        mx.random.seed(seed)
    except TypeError:
        assert f"seed is {seed}; it must be" in refused(check_seed, seed)
    else:
        check_seed(seed)


def quantised(bits: int, group: int) -> bool:
    """Whether mlx-lm's cache can be quantised so and takes another row."""
    cache, rows = KVCache(), mx.ones((1, 1, 3, 256))
    cache.update_and_fetch(rows, rows)
    try:
        keys, _ = cache.to_quantized(group, bits).update_and_fetch(rows, rows)
        mx.eval(keys)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("bits", range(1, 18))
def test_kv_bits_are_those_that_mlx_lm_quantises_to(bits: int) -> None:
    """With group sizes that don't crash MLX, which divides by them."""
    for group in (1, 8, 16, 32, 64, 128, 256):
        if quantised(bits, group):
            check_kv_quantization(bits, group, 0)
        else:
            refused(check_kv_quantization, bits, group, 0)


@pytest.mark.parametrize("value", [-64, *NO_INTS], ids=repr)
def test_group_sizes_and_starts_are_checked_even_without_bits(value: Any) -> None:
    assert "kv_group_size is" in refused(check_kv_quantization, None, value, 0)
    assert "quantized_kv_start is" in refused(check_kv_quantization, None, 64, value)


def test_bounds_are_named() -> None:
    assert refused(check_whole, "limit", 0, 1) == "limit is 0; it must be at least 1"
    assert refused(check_whole, "limit", 9, 1, 8) == "limit is 9; it must be at most 8"
    check_whole("limit", 1, 1, 1)
    assert "at least 1, or -1" in refused(check_max_tokens, 0)
    assert "max_tokens is -2" in refused(check_max_tokens, -2)
    check_max_tokens(-1)
    for top_k in (2048, 2049, -1, True, 2.0):
        assert f"top_k is {top_k!r}" in refused(check_top_k, top_k, 2048)
    check_top_k(2047, 2048)
    for value in (float("nan"), float("inf"), "1", True, None, -0.1):
        refused(check_real, "top_p", value, 0, 1)
    check_real("top_p", 1, 0, 1)


@pytest.mark.parametrize("value", ["auto", 0, 7, Fixed(3)], ids=str)
def test_verify_lengths(value: Any) -> None:
    check_verify_length(value)


@pytest.mark.parametrize(
    "value", ["Auto", -1, 2**31, pytest.param(object(), id="object"), Fixed], ids=str
)
def test_what_is_no_verify_length(value: Any) -> None:
    assert "must be 'auto', a policy, or an int" in refused(check_verify_length, value)


@given(st.floats(1e-30, 1e30) | st.just(0.0))
@settings(deadline=None)
def test_temperatures_leave_a_token_to_draw(temp: float) -> None:
    check_temperature(temp)
    if temp:
        probs = mx.softmax(mx.array([-1.5, -20.0, -1.5]) * (1 / temp))
        assert mx.isfinite(probs).all().item()


@pytest.mark.parametrize(
    "temp", [1e-40, 5e-324, float("nan"), float("inf"), -1, True, "1", 10**400]
)
def test_other_temperatures_are_refused(temp: Any) -> None:
    assert "temperature is" in refused(check_temperature, temp)


@pytest.mark.parametrize(
    "settings", [{"seeded": 1}, {"seeded": None}, {"xtc_special_tokens": 5},
    {"xtc_special_tokens": "x"}, {"xtc_special_tokens": (1.0,)}, {"xtc_special_tokens": (-1,)}],
)  # fmt: skip
def test_other_settings_of_a_sampler_are_refused(settings: dict[str, Any]) -> None:
    assert next(iter(settings)) in refused(lambda: Sampler(temp=1, **settings))


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6],
        (5, 6),
        np.array([6, 5])[::-1],
        np.array([5, 0, 6])[::2],
        np.array([5, 6]),
        np.array([5, 6], np.uint8),
        mx.array([5, 6], mx.uint32),
    ],
    ids=lambda p: type(p).__name__,
)
def test_flat_ids_are_a_prompt(prompt: Any) -> None:
    ids = prompt_ids(prompt, 7)
    assert ids.tolist() == [5, 6]
    assert mx.issubdtype(ids.dtype, mx.integer)


WRONG_PROMPTS = [
    [[5, 6]],
    [1.5],
    [True],
    [None],
    ["a"],
    [np.int64(5)],
    np.array([[5]]),
    np.array([1.5]),
    np.array([True]),
    np.array(5),
    mx.array([[5]]),
    mx.array([1.5]),
    mx.array([True]),
    mx.array(5),
    {5: 6},
    {5},
    5,
    None,
    b"hi",
    range(3),
    [],
    np.array([], int),
    mx.array([], mx.int32),
]


@pytest.mark.parametrize("prompt", WRONG_PROMPTS, ids=repr)
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert refused(prompt_ids, prompt, 100).startswith("the prompt ")


@given(st.lists(st.integers(-3, 12) | st.integers(), min_size=1, max_size=5), st.booleans())
def test_ids_lie_in_the_vocabulary(ids: list[int], known: bool) -> None:
    vocabulary = 10 if known else None
    if all(0 <= i < (10 if known else 2**31) for i in ids):
        assert prompt_ids(ids, vocabulary).tolist() == ids
        return
    refused(prompt_ids, ids, vocabulary)
    if all(-(2**63) <= i < 2**63 for i in ids):
        refused(prompt_ids, np.array(ids, np.int64), vocabulary)


def test_the_vocabulary_is_the_embeddings(model: nn.Module) -> None:
    assert vocabulary_of(model) == 2048
    assert vocabulary_of(nn.Linear(3, 4)) is None


def test_text_is_text() -> None:
    assert "'\\udcff' at character 2" in refused(arguments.check_text, "ab\udcff")
    arguments.check_text("\N{GRINNING FACE}\0\uffff")


PYTHON: list[Any] = [
    ([5], {"verify_length": 2.0}),
    ([5], {"verify_length": np.int64(3)}),
    ([5, 6, 7], {"verify_length": True}),
    ([-1], {}),
    ([5, 2048], {}),
    ([5, 10**7], {}),
    ([[5, 6]], {}),
    ([1.5], {}),
    ("a\ud800", {}),
    ([5], {"max_tokens": 2.0}),
    ([5], {"max_tokens": True}),
    ([5], {"kv_bits": 4, "kv_group_size": 0, "quantized_kv_start": 0}),
    ([5], {"kv_bits": 7}),
    ([5], {"prefill_step_size": 0}),
    ([5], {"prefill_step_size": 2.5}),
    ([5], {"max_kv_size": 9.0}),
    ([5], {"quantized_kv_start": 2**40}),
    ([5], {"sampler": Sampler(temp=1, top_k=2048)}),
    ([5], {"stream": None}),
    ([5], {"lookup": 1}),
    ([5, 6, 7], {"prompt_checkpoints": 1}),
    ([5, 6, 7], {"prompt_checkpoints": {1: 1}}),
    ([5, 6, 7], {"prompt_checkpoints": {1.0: print}}),
    ([5, 6, 7], {"prompt_checkpoints": {3: print}}),
    ([5], {"prompt_cache": 5}),
    ([5], {"prompt_cache": ()}),
    pytest.param([5], {"prompt_cache": [KVCache()]}, id="one cache"),
    ([5], {"prompt_cache": [1, 2, 3, 4]}),
    ([5], {"logits_processors": [print, 1]}),
]
FUNCTIONS = ("sampler", "logits_processors", "prompt_progress_callback", "draft_filter")
NO_FUNCTIONS: tuple[Any, ...] = (5, "", b"x", {}, mx.array(3))
PYTHON += [([5], {name: value}) for name in FUNCTIONS for value in NO_FUNCTIONS]


@pytest.mark.parametrize(("prompt", "options"), PYTHON, ids=str)
@pytest.mark.parametrize("drafted", [True, False])
def test_generation_refuses_them_before_any_forward(
    prompt: Any,
    options: dict[str, Any],
    drafted: bool,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
) -> None:
    """Before the first token is asked for."""
    drafter = tiny_dflash(model) if drafted else None
    refused(lambda: dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, **options))


@pytest.mark.parametrize("other", [None, 5, "x", {}, mx.array(3), int], ids=repr)
def test_models_and_tokenizers_are_such(
    other: Any, model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    assert "the model is a" in refused(dspine_mlx.stream_generate, other, tokenizer, [5])
    assert "the model is a" in refused(dspine_mlx.load_drafter, ".", other)
    assert "the tokenizer is a" in refused(dspine_mlx.stream_generate, model, other, [5])


def test_listed() -> None:
    assert arguments.listed((1, 2, 8)) == "1, 2 or 8"

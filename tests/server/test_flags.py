"""Numbers that mlx_lm.server would not check."""

from argparse import Namespace
from typing import Any

import pytest

from dspine_mlx.errors import InputError
from dspine_mlx.server.flags import check_flags

ORDINARY: dict[str, Any] = {
    "temp": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_k": 0,
    "max_tokens": 512,
    "num_draft_tokens": 3,
    "decode_concurrency": 32,
    "prompt_concurrency": 8,
    "prefill_step_size": 2048,
    "prompt_cache_size": 10,
    "kv_bits": None,
    "kv_group_size": 64,
    "quantized_kv_start": 5000,
}


@pytest.mark.parametrize("right", [{}, {"kv_bits": 4}, {"temp": 0.7}, {"prompt_cache_size": 0}])
def test_ordinary_numbers_pass(right: dict[str, Any]) -> None:
    check_flags(Namespace(**ORDINARY | right))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temp": float("nan")}, "temperature is nan"),
        ({"top_p": 1.5}, "--top-p is 1.5; it must lie in"),
        ({"min_p": float("inf")}, "--min-p is inf"),
        ({"top_k": -1}, "--top-k is -1; it must be at least 0"),
        ({"max_tokens": 0}, "--max-tokens is 0; it must be at least 1"),
        ({"decode_concurrency": 0}, "--decode-concurrency is 0"),
        ({"prompt_concurrency": -2}, "--prompt-concurrency is -2"),
        ({"prefill_step_size": 0}, "--prefill-step-size is 0"),
        ({"prompt_cache_size": -1}, "--prompt-cache-size is -1"),
        ({"max_tokens": 1 << 40}, "--max-tokens is 1099511627776; it must be at most"),
        ({"kv_bits": 7}, "kv_bits is 7"),
        ({"chat_template_args": [1]}, r"--chat-template-args is \[1\]; it must be a JSON object"),
        ({"chat_template_args": None}, "--chat-template-args is None"),
    ],
)
def test_numbers_that_end_or_stall_generation_are_refused(
    wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        check_flags(Namespace(**ORDINARY | wrong))

"""Numbers on the command line that mlx_lm.server takes as they come."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from dspine_mlx.arguments import (
    check_kv_quantization,
    check_real,
    check_temperature,
    check_whole,
)
from dspine_mlx.errors import InputError

FRACTION = partial(check_real, low=0, high=1)
COUNT = partial(check_whole, low=1)
FROM_ZERO = partial(check_whole, low=0)
CHECKS: dict[str, Callable[[str, Any], None]] = {
    "top_p": FRACTION,
    "min_p": FRACTION,
    "top_k": FROM_ZERO,
    "max_tokens": COUNT,
    "num_draft_tokens": FROM_ZERO,
    "decode_concurrency": COUNT,
    "prompt_concurrency": COUNT,
    "prefill_step_size": COUNT,
    "prompt_cache_size": FROM_ZERO,
}


def check_flags(flags: Namespace) -> None:
    """Refuse a number that would end or stall generation, before a model is loaded."""
    given = vars(flags)
    for name, check in CHECKS.items():
        if name in given:
            check(f"--{name.replace('_', '-')}", given[name])
    if "temp" in given:
        check_temperature(given["temp"])
    options = given.get("chat_template_args", {})
    if not isinstance(options, dict):
        raise InputError(f"--chat-template-args is {options!r}; it must be a JSON object")
    if "kv_bits" in given:
        check_kv_quantization(flags.kv_bits, flags.kv_group_size, flags.quantized_kv_start)

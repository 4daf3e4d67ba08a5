"""Checks of a request's fields: type, size, and magnitude in float32 and float16.

Other fields are ignored, as OpenAI's clients send fields of their own. Bounds are OpenAI's where it
has some. Others keep logits finite in half precision.
"""

import json
from collections.abc import Callable
from typing import Any

from dspine_mlx.errors import InputError

LARGEST = (1 << 31) - 1  # MLX's shapes, slices and indices are 32-bit
BIAS = 100  # OpenAI's largest logit_bias
COLDEST = 1e-4  # a lower temperature overflows half precision and is taken as 0
ROWS = (1 << 30) - 1  # of a verify length; blocks end them much earlier
STOPS, STOP_LENGTH = 32, 256  # stop strings per request, and characters per string
BIASED = 1024  # tokens in a logit_bias, at most
MESSAGES, TOOLS = 4096, 1024
NAME_LENGTH = 512

# What a request may hand on to the chat template: plain values that templates read by these names.
# Everything else (a template, documents, tokenizer options) is up to the server.
TEMPLATE_OPTIONS = (
    "add_vision_id",
    "clear_thinking",
    "custom_instructions",
    "date_string",
    "enable_thinking",
    "keep_past_thinking",
    "model_identity",
    "preserve_thinking",
    "reasoning",
    "reasoning_effort",
    "reasoning_mode",
    "thinking",
    "thinking_budget",
    "thinking_effort",
    "thinking_mode",
)

Check = Callable[[Any], bool]


class FieldError(InputError):
    """A field of a request that can't be used; `param` is its name."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


def wrong_field(param: str, value: Any, wanted: str) -> FieldError:
    text = json.dumps(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return FieldError(param, f"{param} is {shown}; it must be {wanted}")


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def integer(low: int, high: int = LARGEST) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def number(low: float, high: float, smallest: float = 0.0) -> Check:
    """Check for a number from low to high; a magnitude below `smallest` must be 0."""

    def check(value: Any) -> bool:
        if type(value) not in (int, float) or not low <= value <= high:  # NaN is not between
            return False
        return value == 0 or abs(value) >= smallest

    return check


def is_name(value: Any) -> bool:
    """Whether a value can name a model, drafter or adapter: a folder or Hub id."""
    return isinstance(value, str) and 0 < len(value) <= NAME_LENGTH and value.isprintable()


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def is_stop(value: Any) -> bool:
    words = [value] if isinstance(value, str) else value
    return (
        isinstance(words, list)
        and len(words) <= STOPS
        and all(is_text(word) and len(word) <= STOP_LENGTH for word in words)
    )


def is_verify_length(value: Any) -> bool:
    return value == "auto" or integer(0, ROWS)(value)


def is_stream_options(value: Any) -> bool:
    return isinstance(value, dict) and value.get("include_usage") in (None, True, False)


def is_logit_bias(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= BIASED
        and all(k.isascii() and k.isdecimal() and len(k) <= 10 and int(k) <= LARGEST for k in value)
        and all(map(number(-BIAS, BIAS), value.values()))
    )


def is_tools(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= TOOLS and all(map(is_tool, value))


def is_tool(value: Any) -> bool:
    """Whether a value is a tool that templates can show, and whose calls mlx-lm's parsers of
    replies can read: they take its parameters apart without a look."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    parameters = function.get("parameters")
    if not isinstance(parameters, dict):
        return parameters is None
    properties = parameters.get("properties", {})
    return isinstance(properties, dict) and all(isinstance(p, dict) for p in properties.values())


def are_template_options(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(name in TEMPLATE_OPTIONS for name in value)
        and all(map(is_plain, value.values()))
    )


def is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= NAME_LENGTH
    return value is None or is_bool(value) or number(-LARGEST, LARGEST)(value)


def is_role_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


TOKENS = (integer(1), "a whole number of tokens from 1 up")
CONTEXT = (integer(0), "a whole number of tokens from 0 up, below 2**31")
PENALTY = (number(-BIAS, BIAS), f"a number between -{BIAS} and {BIAS}")
NAME = (is_name, f"a folder or a Hub id of up to {NAME_LENGTH} characters")
FLAG = (is_bool, "true or false")

# Field: its check, and what would be right. null means the field's default, as with OpenAI.
FIELDS: dict[str, tuple[Check, str]] = {
    "model": NAME,
    "draft_model": NAME,
    "adapters": NAME,
    "stream": FLAG,
    "stream_options": (is_stream_options, "an object such as {'include_usage': true}"),
    "max_tokens": TOKENS,
    "max_completion_tokens": TOKENS,
    "temperature": (number(0, 100), "a number between 0 and 100"),
    "top_p": (number(0, 1, smallest=1e-6), "0, or a number between 1e-6 and 1"),
    "top_k": (integer(0), "a whole number from 0 up"),
    "min_p": (number(0, 1), "a number between 0 and 1"),
    "num_draft_tokens": (integer(0, ROWS), "a whole number from 0 up"),
    "verify_length": (is_verify_length, "'auto' or a number of tokens from 0 up"),
    "repetition_penalty": (number(0, 100, smallest=0.01), "0, or a number between 0.01 and 100"),
    "repetition_context_size": CONTEXT,
    "presence_penalty": PENALTY,
    "presence_context_size": CONTEXT,
    "frequency_penalty": PENALTY,
    "frequency_context_size": CONTEXT,
    "xtc_probability": (number(0, 1), "a number between 0 and 1"),
    "xtc_threshold": (number(0, 0.5), "a number between 0 and 0.5"),
    "logit_bias": (
        is_logit_bias,
        f"an object of up to {BIASED} token ids, each with a number between -{BIAS} and {BIAS}",
    ),
    "logprobs": FLAG,
    "top_logprobs": (integer(-1, 11), "a whole number up to 11"),
    "seed": (integer(0, (1 << 64) - 1), "a whole number from 0 up to 2**64"),
    "stop": (
        is_stop,
        f"a non-empty string or a list of up to {STOPS}, each of up to {STOP_LENGTH} characters",
    ),
    "tools": (
        is_tools,
        f"a list of up to {TOOLS} {{'type': 'function', 'function': {{...}}}}, each with a name, "
        "and parameters that are a JSON schema of an object",
    ),
    "chat_template_kwargs": (
        are_template_options,
        f"an object of plain values named {', '.join(TEMPLATE_OPTIONS)}",
    ),
    "role_mapping": (is_role_mapping, "an object of strings"),
    "n": (integer(1, 1), "1, the number of choices this server gives"),
}

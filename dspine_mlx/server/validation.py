"""Request bodies: what mlx_lm.server would trip over is refused before it gets there."""

import json
import math
from collections.abc import Callable
from typing import Any

from dspine_mlx.errors import InputError


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request; numbers must be finite, which JSON's own are."""
    try:
        body = json.loads(raw.decode("utf-8"), parse_float=finite, parse_constant=finite)
        json.dumps(body, ensure_ascii=False).encode()  # escapes can name half a surrogate pair
    except RecursionError as error:
        raise InputError("the request body is nested too deeply") from error
    except ValueError as error:  # also JSONDecodeError and UnicodeError
        raise InputError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InputError(f"the request body is a JSON {type(body).__name__}; it must be an object")
    return body


def finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def check_body(body: dict[str, Any], path: str) -> None:
    """Types and ranges beyond mlx_lm's own checks; `InputError` names the first bad field."""
    for name in NUMBERS:
        if isinstance(body.get(name), bool):  # which Python takes for 0 and 1
            raise InputError(f"{name} is {shown(body[name])}; it must be a number")
        if isinstance(body.get(name), int) and abs(body[name]) > LARGEST:
            raise InputError(f"{name} is {shown(body[name])}, which is out of range")
    for name, check, wanted in CHECKS:
        if name in body and not check(body[name]):
            raise InputError(f"{name} is {shown(body[name])}; it must be {wanted}")
    if path.endswith("/chat/completions"):
        check_messages(body.get("messages"))
    elif not is_prompt(body.get("prompt")):
        raise InputError(f"prompt is {shown(body.get('prompt'))}; it must be a non-empty string")


def check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise InputError(f"messages is {shown(messages)}; it must be a non-empty list")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"messages holds {shown(message)}; each needs a role and a content")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or not all(map(is_part, parts)):
            raise InputError(
                f"a message's content is {shown(content)}; it must be a string or a list of parts"
            )


def is_part(part: Any) -> bool:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        return False
    return part["type"] != "text" or isinstance(part.get("text"), str)


def is_prompt(prompt: Any) -> bool:
    return isinstance(prompt, str) and bool(prompt)


def is_seed(seed: Any) -> bool:
    return seed is None or (type(seed) is int and 0 <= seed < 1 << 64)


def is_stop(stop: Any) -> bool:
    words = [stop] if isinstance(stop, str) else stop
    return words is None or (isinstance(words, list) and all(is_prompt(word) for word in words))


def is_verify_length(length: Any) -> bool:
    return length == "auto" or (type(length) is int and length >= 0)


def is_stream_options(options: Any) -> bool:
    return options is None or (
        isinstance(options, dict) and isinstance(options.get("include_usage", False), bool)
    )


def is_tools(tools: Any) -> bool:
    return tools is None or (
        isinstance(tools, list)
        and all(isinstance(t, dict) and isinstance(t.get("function"), dict) for t in tools)
    )


def is_number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and low <= value <= high


def is_object(value: Any) -> bool:
    return value is None or isinstance(value, dict)


LARGEST = 1 << 53  # the whole numbers that JSON's other readers keep exact
NUMBERS = (
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "num_draft_tokens",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "presence_context_size",
    "frequency_penalty",
    "frequency_context_size",
    "xtc_probability",
    "xtc_threshold",
    "top_logprobs",
)

# Field, check, and what would be right.
CHECKS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("seed", is_seed, "null or a whole number from 0 up to 2**64"),
    ("stop", is_stop, "a non-empty string or a list of them"),
    ("verify_length", is_verify_length, "'auto' or a number of tokens from 0 up"),
    ("stream_options", is_stream_options, "an object such as {'include_usage': true}"),
    ("tools", is_tools, "a list of {'type': 'function', 'function': {...}}"),
    ("xtc_threshold", is_number(0, 0.5), "between 0 and 0.5"),
    (
        "draft_model",
        lambda v: v is None or isinstance(v, str),
        "a drafter folder, a Hub id or null",
    ),
    ("chat_template_kwargs", is_object, "an object"),
    ("role_mapping", is_object, "an object"),
    ("n", lambda v: v in (None, 1), "1, the number of choices this server gives"),
)


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

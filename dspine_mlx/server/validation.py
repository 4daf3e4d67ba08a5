"""Validating request bodies: anything that mlx_lm.server or a chat template would fail on is
refused."""

import json
import math
from typing import Any

from dspine_mlx.errors import InputError
from dspine_mlx.server.fields import COLDEST, FIELDS, MESSAGES, is_text, wrong_field

IMAGES = ("image_url", "input_image", "image")  # types of a content part
DEPTH = 64  # of nested lists and objects


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse the JSON object of a request; numbers must be finite, as in standard JSON."""
    try:
        body = json.loads(raw.decode("utf-8"), parse_float=finite, parse_constant=finite)
        json.dumps(body, ensure_ascii=False).encode()  # escapes can name half a surrogate pair
    except RecursionError as error:
        raise InputError("the request body is nested too deeply") from error
    except ValueError as error:  # also JSONDecodeError and UnicodeError
        raise InputError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InputError(f"the request body is a JSON {type(body).__name__}; it must be an object")
    if deeper(body, DEPTH):
        raise InputError(f"the request body is nested more than {DEPTH} levels deep")
    return body


def finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than so many levels deep."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(deeper(item, levels - 1) for item in inner)


def checked(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Check a body and return it without nulls, as mlx_lm.server takes it; `FieldError` for the
    first bad field.

    null is a field's default, except for draft_model, where it means none.
    """
    no_drafter = "draft_model" in body and body["draft_model"] is None
    body = {name: value for name, value in body.items() if value is not None}
    for name, (check, wanted) in FIELDS.items():
        if name in body and not check(body[name]):
            raise wrong_field(name, body[name], wanted)
    if path.endswith("/chat/completions"):
        check_messages(body.get("messages"))
    else:
        body.pop("messages", None)
        if not is_text(body.get("prompt")):
            raise wrong_field("prompt", body.get("prompt"), "a non-empty string")
    if body.get("temperature", 1) < COLDEST:
        body["temperature"] = 0
    for name in ("xtc_probability", "xtc_threshold"):  # mlx_lm takes only floats here
        if name in body:
            body[name] = float(body[name])
    if "stream_options" in body:
        body["stream_options"] = {
            "include_usage": bool(body["stream_options"].get("include_usage"))
        }
    return body | {"draft_model": None} if no_drafter else body


def check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not 0 < len(messages) <= MESSAGES:
        raise wrong_field("messages", messages, f"a list of 1 to {MESSAGES} messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise wrong_field("messages", message, "objects with a role and a content")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or not all(map(is_part, parts)):
            raise wrong_field("messages", content, "of contents that are strings or lists of parts")
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(map(is_call, calls))):
            raise wrong_field(
                "messages", calls, "of tool_calls with a function, its name, and JSON"
            )


def is_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    if part.get("type") == "text":
        return isinstance(part.get("text"), str)
    return part.get("type") in IMAGES and image_url(part) is not None


def image_url(part: dict[str, Any]) -> str | None:
    """The URL of an image part; None of another part."""
    if part["type"] not in IMAGES:
        return None
    url = part.get("image_url", part.get("image"))
    url = url.get("url") if isinstance(url, dict) else url
    return url if isinstance(url, str) else None


def is_call(call: Any) -> bool:
    """Whether a value is an earlier turn's tool call, whose arguments are an object or its JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    arguments = function.get("arguments")
    if not isinstance(arguments, str) or not arguments:
        return isinstance(arguments, dict | str | None)
    try:
        return not deeper(json.loads(arguments, parse_constant=finite), DEPTH)
    except (ValueError, RecursionError):
        return False

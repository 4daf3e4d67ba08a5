"""Hostile requests for the soak: wrong types and sizes, and bytes that aren't HTTP."""

import json
import random
from collections.abc import Callable
from typing import Any

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
NUMBERS = (0, -1, 1e-300, 1e-40, 3.5e38, 1e308, -1e308, 2**31, 2**40, 2**64, 10**30, 0.5)
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    *(None, True, "", "nan", "inf", "x" * 5000, [], [1], {}, {"5": "nan"}, {"a": 1}),
    *({"5": 1e300}, {"99999999999": 1}, {"-1": 1}, [["a"] * 99] * 99, {"type": "x" * 9}),
)
FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop", "logit_bias"),
    *("repetition_penalty", "repetition_context_size", "presence_penalty", "frequency_penalty"),
    *("presence_context_size", "frequency_context_size", "xtc_probability", "xtc_threshold"),
    *("logprobs", "top_logprobs", "stream", "stream_options", "tools", "response_format"),
    *("model", "draft_model", "adapters", "verify_length", "num_draft_tokens", "messages"),
    *("chat_template_kwargs", "role_mapping", "n"),
)
PARTS: tuple[Any, ...] = (
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/admin"}},
    {"type": "image_url", "image_url": "data:image/png;base64,AAAA"},
    {"type": "input_audio", "input_audio": {}},
    {"type": "text"},
    {"type": ["text"]},
    3,
)
BODIES: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_k": 2048},
    {"repetition_penalty": 1.1, "repetition_context_size": 2**40},
    {"chat_template_kwargs": {"chat_template": LOOP}},
    {"chat_template_kwargs": {"padding": "max_length", "max_length": 100}},
    {"chat_template_kwargs": {"return_tensors": "np"}},
    {"chat_template_kwargs": {"tokenize": False}},
    {"stop": ["a" * 200] * 30},
    {"stop": ["x"] * 999},
    {"max_tokens": 10**9},
    {"messages": [{"role": "user", "content": "word " * 3000}]},
    {"messages": [{"role": "user", "content": "x"}] * 5000},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [[]]}}}] * 999},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a"] * 99}}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "string", "pattern": "^(a{1,999}){1,999}$"}},
        }
    },
)
RAW = (
    b"",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /v1/models/../../etc HTTP/1.1\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 50\r\n\r\n{",
    b"POST /v1/chat/completions HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
    b"DELETE /v1/models HTTP/1.1\r\n\r\n",
    b"x" * 70_000,
)


def posted(body: Any, path: str = "/v1/chat/completions") -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


def a_field(rng: random.Random) -> bytes:
    return posted(HELLO | {rng.choice(FIELDS): rng.choice(VALUES)})


def a_body(rng: random.Random) -> bytes:
    return posted(HELLO | rng.choice(BODIES))


def a_part(rng: random.Random) -> bytes:
    return posted(HELLO | {"messages": [{"role": "user", "content": [rng.choice(PARTS)]}]})


def a_prompt(rng: random.Random) -> bytes:
    return posted({"prompt": rng.choice(VALUES), "max_tokens": 3}, "/v1/completions")


def damaged(rng: random.Random) -> bytes:
    raw = bytearray(json.dumps(HELLO).encode())
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return posted(bytes(raw))


def raw_bytes(rng: random.Random) -> bytes:
    return rng.choice(RAW)


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    *(a_field, a_field, a_body, a_part, a_prompt, damaged, raw_bytes),
)


def hostile(rng: random.Random) -> tuple[bytes, bool]:
    """Bytes for a socket, and whether the client then closes its end for writing."""
    content = rng.choice(KINDS)(rng)
    unfinished = content in RAW
    return content, unfinished or rng.random() < 0.2

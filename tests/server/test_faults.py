"""Bad requests, bad clients, and the server's start and end."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.server.call import Call
from dspine_mlx.server.fields import FIELDS as CHECKED
from tests.bench.server_load import expected_replies, terminate_under_load
from tests.support.serving import ALL, UNICODE, Server, start, usage, wait_until_up

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
KEY = "a key of its own"

# ---- bad requests

DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
WRONG: dict[str, tuple[int, str, Any]] = {
    "malformed": (400, COMPLETIONS, b'{"prompt": '),
    "no UTF-8": (400, COMPLETIONS, b'{"prompt": "\xff"}'),
    "nested": (400, COMPLETIONS, DEEP),
    "a list": (400, COMPLETIONS, []),
    "no prompt": (400, COMPLETIONS, {}),
    "an empty prompt": (400, COMPLETIONS, {"prompt": ""}),
    "a number for a prompt": (400, COMPLETIONS, {"prompt": 3}),
    "half a surrogate": (400, COMPLETIONS, b'{"prompt": "\\ud800"}'),
    "half a surrogate to stop at": (400, COMPLETIONS, b'{"prompt": "a", "stop": "\\ud800"}'),
    "no messages": (400, CHAT, {}),
    "empty messages": (400, CHAT, {"messages": []}),
    "messages of strings": (400, CHAT, {"messages": ["hi"]}),
    "a message without a role": (400, CHAT, {"messages": [{"content": "hi"}]}),
    "content of a wrong type": (400, CHAT, {"messages": [{"role": "user", "content": 3}]}),
    "parts without text": (
        400,
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    ),
    "tools of strings": (400, CHAT, {"messages": HELLO, "tools": ["f"]}),
    "stop of numbers": (400, COMPLETIONS, {"prompt": "a", "stop": [1]}),
    "an empty stop": (400, COMPLETIONS, {"prompt": "a", "stop": ""}),
    "negative max_tokens": (400, COMPLETIONS, {"prompt": "a", "max_tokens": -1}),
    "no tokens": (400, COMPLETIONS, {"prompt": "a", "max_tokens": 0}),
    "huge max_tokens": (400, COMPLETIONS, {"prompt": "a", "max_tokens": 10**12}),
    "a huge penalty": (400, COMPLETIONS, {"prompt": "a", "repetition_penalty": 10**30}),
    "max_tokens in words": (400, COMPLETIONS, {"prompt": "a", "max_tokens": "ten"}),
    "max_tokens true": (400, COMPLETIONS, {"prompt": "a", "max_tokens": True}),
    "temperature NaN": (400, COMPLETIONS, b'{"prompt": "a", "temperature": NaN}'),
    "temperature infinite": (400, COMPLETIONS, b'{"prompt": "a", "temperature": 1e999}'),
    "negative temperature": (400, COMPLETIONS, {"prompt": "a", "temperature": -1}),
    "top_p": (400, COMPLETIONS, {"prompt": "a", "top_p": 2}),
    "top_k": (400, COMPLETIONS, {"prompt": "a", "top_k": 10**6, "temperature": 1}),
    "xtc": (400, COMPLETIONS, {"prompt": "a", "xtc_probability": 0.5, "xtc_threshold": 0.9}),
    "seed": (400, COMPLETIONS, {"prompt": "a", "seed": -1}),
    "a biased token": (400, COMPLETIONS, {"prompt": "a", "logit_bias": {"999999": 1}}),
    "a bias of nothing": (400, COMPLETIONS, {"prompt": "a", "logit_bias": {"5": None}}),
    "a bias of words": (400, COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}),
    "verify_length": (400, COMPLETIONS, {"prompt": "a", "verify_length": -1}),
    "stream_options": (400, COMPLETIONS, {"prompt": "a", "stream_options": "usage"}),
    "two choices": (400, COMPLETIONS, {"prompt": "a", "n": 2}),
    "a format": (400, CHAT, {"messages": HELLO, "response_format": {"type": "yaml"}}),
    "no schema": (400, CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}),
    "a wrong schema": (
        400,
        CHAT,
        {
            "messages": HELLO,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "objekt"}},
            },
        },
    ),
    "unknown model": (404, COMPLETIONS, {"prompt": "a", "model": "gpt-9"}),
    "a drafter that isn't": (400, COMPLETIONS, {"prompt": "a", "draft_model": "/nowhere"}),
    "over the context": (400, COMPLETIONS, {"prompt": "word " * 4000}),
    "10 MB": (413, COMPLETIONS, {"prompt": "word " * 2_000_000}),
    "no route": (404, "/v1/embeddings", {"input": "a"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_requests_get_an_error_and_the_server_goes_on(server: Server, name: str) -> None:
    status, path, body = WRONG[name]
    reply = server.request(path, body)
    assert (reply.status, set(reply.body)) == (status, {"error"})
    assert set(reply.body["error"]) == {"message", "type", "param", "code"}
    assert reply.body["error"]["message"]
    assert usage(server)["completion_tokens"] == 12


FIELDS = (*CHECKED, "response_format", "messages", "prompt")
# Finite in JSON, but not in float32 or float16, or not in 32 bits.
EXTREMES = [5e-324, 1e-300, 1e-40, 1e-8, 65505.0, 3.5e38, -1e308, 2**31, 2**40, -(2**31), 10**400]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.integers()
    | st.floats(-2, 2)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(EXTREMES)
    | st.sampled_from(["", "a", "auto", "@long", "\ud800", "\0", "nan", "inf", "x" * 3000]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "function", "5", "-1", "name"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=4,
)


@given(st.sampled_from([COMPLETIONS, CHAT]), st.sampled_from(FIELDS), VALUES)
@settings(max_examples=200, deadline=None)
def test_whatever_a_field_holds_the_reply_is_whole_or_a_4xx(
    server: Server, path: str, field: str, value: Any
) -> None:
    body = {"messages": HELLO, "prompt": "@unicode", "max_tokens": 3} | {field: value}
    reply = server.request(path, body)
    if reply.status == 200:
        assert reply.events or reply.body["choices"]
        assert not any("error" in event for event in reply.events)
    else:
        assert (400 <= reply.status < 500, set(reply.body)) == (True, {"error"})
    assert server.request("/health").status == 200


def test_what_can_not_be_loaded_leaves_the_loaded_target(
    server: Server, scripted: tuple[str, str]
) -> None:
    """An adapter or model that isn't there: mlx_lm's own provider unloads first and asks later."""
    prompt = "Keep this @long"
    usage(server, prompt=prompt)
    for wanted in (
        {"model": scripted[0], "adapters": "/nowhere"},
        {"model": "gpt-9"},
        {"model": "/tmp"},
    ):
        reply = server.request(COMPLETIONS, {"prompt": prompt} | wanted)
        assert (reply.status, set(reply.body)) == (404, {"error"})
    assert usage(server, prompt=prompt)["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (400, b"rubbish\r\n\r\n"),
        (501, b"BREW /v1/completions HTTP/1.1\r\n\r\n"),
        (411, b"POST /v1/completions HTTP/1.1\r\n\r\n"),
        (400, b"POST /v1/completions HTTP/1.1\r\nContent-Length: ten\r\n\r\n"),
        (400, b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n"),
        (400, b'POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"prompt": "a"}'),
    ],
)
def test_bad_bytes_and_half_closed_sockets(server: Server, status: int, content: bytes) -> None:
    head, _, body = server.raw(content, half_close=True).partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/"):
        assert int(head.split()[1]) == status
    else:  # to a request line without a version, HTTP/0.9's answer: no head
        body = head
    assert json.loads(body)["error"]["message"]
    assert usage(server)["completion_tokens"] == 12


def test_a_reader_that_reads_late_holds_up_nobody(server: Server) -> None:
    body = json.dumps({"prompt": "@long", "max_tokens": 1500, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.socket() as late:
        late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        late.connect(("127.0.0.1", server.port))
        late.sendall(head + body)
        for _ in range(3):
            assert usage(server)["completion_tokens"] == 12
        received = b""
        while chunk := late.recv(1 << 16):
            received += chunk
    assert received.endswith(b"data: [DONE]\n\n")
    assert received.count(b"data: {") == 1501


# ---- start and end


def test_an_api_key_guards_all_but_health(scripted: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n", encoding="utf-8")
    flags = (
        "--model",
        scripted[0],
        "--draft-model",
        scripted[1],
        "--api-key",
        f"@{tmp_path / 'key'}",
        *ALL,
    )
    server = wait_until_up(start("dspine_mlx.server", tmp_path, *flags))
    body = {"prompt": "@unicode", "max_tokens": 20}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        for path, content in (
            (COMPLETIONS, body),
            (CHAT, {"messages": HELLO}),
            ("/v1/models", None),
            ("/metrics", None),
        ):
            reply = server.request(path, content, **headers)
            assert (reply.status, "key" in reply.body["error"]["message"]) == (401, True)
    allowed = {"Authorization": f"Bearer {KEY}"}
    assert server.request(COMPLETIONS, body, **allowed).body["choices"][0]["text"] == UNICODE
    assert server.request("/metrics", **allowed).status == 200
    assert server.request("/health").status == 200
    server.process.terminate()
    assert server.process.wait(10) == 0


def test_a_connection_closed_on_either_end_is_seen() -> None:
    for closed in (0, 1):
        ends = socket.socketpair()
        call = Call(ends[0])
        assert not call.disconnected()
        ends[1].send(b"a pipelined request")
        assert not call.disconnected()
        ends[0].recv(100)
        ends[closed].close()
        assert call.disconnected()
        ends[1 - closed].close()


def test_sigterm_under_load_ends_the_process(scripted: tuple[str, str], tmp_path: Path) -> None:
    flags = ("--model", scripted[0], "--draft-model", scripted[1], *ALL)
    server = wait_until_up(start("dspine_mlx.server", tmp_path, *flags))
    _, status = terminate_under_load(server, expected_replies(server))
    assert status == 0
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("missing", ["target", "drafter"])
def test_a_model_that_can_not_be_loaded_ends_the_start(
    scripted: tuple[str, str], tmp_path: Path, missing: str
) -> None:
    paths = {"target": scripted[0], "drafter": scripted[1]} | {missing: str(tmp_path / "nowhere")}
    flags = ("--model", paths["target"], "--draft-model", paths["drafter"])
    server = start("dspine_mlx.server", tmp_path, *flags)
    assert server.process.wait(60) == 2
    *_, last = server.log.read_text().splitlines()
    assert last.startswith("error: there is no folder")

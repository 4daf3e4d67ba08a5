"""The server as clients meet it: official client and curl, bad requests, load, its own routes."""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.bench.server_load import (
    FORMAT,
    Load,
    expected_replies,
    settled,
    terminate_under_load,
)
from tests.serving import TOOL_CALL, UNICODE, Server, scripted_pair, serving, start, wait_until_up

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
ALL = ("--verify-length", "16")  # drafting in every round, whether or not it pays here
KEY = "a key of its own"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, drafter = scripted_pair(tmp_path_factory.mktemp("pair"))
    shutil.copytree(drafter, target.parent / "other drafter")
    return str(target), str(drafter)


@pytest.fixture(scope="module")
def server(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    target, drafter = pair
    folder = tmp_path_factory.mktemp("server")
    flags = ("--model", target, "--draft-model", drafter, "--max-request-mb", "4", *ALL)
    with serving("dspine_mlx.server", folder, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
    )


def usage(server: Server, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    reply = server.request(path, {"prompt": "@long", "max_tokens": 12} | body)
    assert reply.status == 200, reply
    return reply.body["usage"]


# ---- clients


def test_openai_chat_with_logprobs(client: Any) -> None:
    reply = client.chat.completions.create(
        model="default_model", messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2
    )
    choice = reply.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.model_extra == {"reasoning": "hm"}
    content = choice.logprobs.content
    assert [item.token for item in content] == ["<think>", "hm", "</think>"]
    assert all(item.logprob > -0.1 and len(item.top_logprobs) == 2 for item in content)
    assert reply.usage.model_extra["dspine"]["accepted"] > 0


def test_openai_stream_with_usage(client: Any) -> None:
    stream = client.completions.create(
        model="default_model",
        prompt="@unicode",
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == UNICODE
    assert last.usage.completion_tokens == 10
    assert last.usage.model_extra["dspine"]["rounds"] >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_openai_tools(client: Any, stream: bool) -> None:
    reply = client.chat.completions.create(
        model="default_model", messages=HELLO, tools=TOOLS, max_tokens=20, stream=stream
    )
    if stream:
        deltas = [chunk.choices[0] for chunk in reply]
        calls = [call for choice in deltas for call in choice.delta.tool_calls or []]
        reason = deltas[-1].finish_reason
    else:
        calls, reason = reply.choices[0].message.tool_calls, reply.choices[0].finish_reason
    (call,) = calls
    assert reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == json.loads(TOOL_CALL)["arguments"]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 4}, {"temperature": 1.5}])
def test_openai_json_schema(client: Any, options: dict[str, Any]) -> None:
    reply = client.chat.completions.create(
        model="default_model", messages=HELLO, response_format=FORMAT, max_tokens=200, **options
    )
    assert reply.choices[0].finish_reason == "stop"
    value = json.loads(reply.choices[0].message.content)
    assert set(value) == {"city", "n"}
    assert value["city"] in ("Paris", "Rome")
    assert isinstance(value["n"], bool)
    assert reply.usage.model_extra["dspine"]["path"] == "speculative"


def test_masked_tokens_have_logprobs_that_json_can_say(server: Server) -> None:
    body = {"messages": HELLO, "response_format": FORMAT, "max_tokens": 4, "top_logprobs": 5}
    content = server.request(CHAT, body).body["choices"][0]["logprobs"]["content"]
    first = [token["logprob"] for token in content[0]["top_logprobs"]]  # only "{" may come
    assert sorted(first)[:4] == [-9999.0] * 4
    assert max(first) == 0


def test_a_structured_stream(client: Any) -> None:
    stream = client.chat.completions.create(
        model="default_model",
        messages=HELLO,
        response_format={"type": "json_object"},
        max_tokens=6,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text.startswith("{")


def test_structured_replies_are_those_without_a_drafter(server: Server) -> None:
    for seed in range(4):
        body = {"messages": HELLO, "response_format": FORMAT, "max_tokens": 80, "logprobs": True}
        body |= {"seed": seed, "temperature": 2.0}
        drafted = server.request(CHAT, body).body
        plain = server.request(CHAT, body | {"draft_model": None}).body
        assert drafted["choices"] == plain["choices"]
        assert plain["usage"]["dspine"]["path"] == "plain"


def test_curl(server: Server) -> None:
    url = f"http://127.0.0.1:{server.port}{COMPLETIONS}"
    body = json.dumps({"prompt": "@unicode", "max_tokens": 20})
    done = subprocess.run(["curl", "-sS", url, "-d", body], capture_output=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["text"] == UNICODE
    body = json.dumps({"prompt": "@long", "max_tokens": 4, "stream": True})
    done = subprocess.run(["curl", "-sSN", url, "-d", body], capture_output=True, check=True)
    assert done.stdout.endswith(b"data: [DONE]\n\n")
    assert b": keepalive" in done.stdout


# ---- requests choose how they are decoded


def test_a_request_chooses_drafter_and_verify_length(server: Server, pair: tuple[str, str]) -> None:
    assert usage(server)["dspine"]["path"] == "speculative"
    assert usage(server, verify_length=2)["dspine"]["verify_lengths"] == {"2": 4}
    assert usage(server, num_draft_tokens=3)["dspine"]["verify_lengths"] == {"3": 3}
    assert usage(server, verify_length=0)["dspine"]["path"] == "batched"
    assert usage(server, draft_model=None)["dspine"]["path"] == "batched"
    assert usage(server, draft_model=None, seed=1)["dspine"]["path"] == "plain"
    other = str(Path(pair[1]).parent / "other drafter")
    assert usage(server, draft_model=other)["dspine"]["accepted"] > 0
    assert server.request("/health").body["draft_model"] == other
    assert usage(server)["dspine"]["accepted"] > 0
    assert server.request("/health").body["draft_model"] == pair[1]


def test_the_target_is_never_reloaded(server: Server) -> None:
    """The prompt cache dies with a reload, so what one path cached the next must find."""
    prompt = "Say it once more: @long"
    assert usage(server, prompt=prompt)["prompt_tokens_details"]["cached_tokens"] == 0
    for body in ({"draft_model": None}, {"draft_model": None, "seed": 1}, {}, {"verify_length": 1}):
        found = usage(server, prompt=prompt, **body)
        assert found["prompt_tokens_details"]["cached_tokens"] == found["prompt_tokens"] - 1


def test_a_prompt_that_is_all_cached(server: Server) -> None:
    prompt = "Once and again @long"
    text = server.request(COMPLETIONS, {"prompt": prompt, "max_tokens": 3}).body["choices"][0][
        "text"
    ]
    for body in ({}, {"draft_model": None}, {"draft_model": None, "seed": 1}):
        again = server.request(COMPLETIONS, {"prompt": prompt + text, "max_tokens": 3} | body).body
        assert again["choices"][0]["text"] == text
        found = again["usage"]
        assert found["prompt_tokens_details"]["cached_tokens"] >= found["prompt_tokens"] - 2


def test_speculation_gives_way_to_batches_and_comes_back(server: Server) -> None:
    expected = expected_replies(server)
    before, load = settled(server), Load(server, expected, disconnect=0.25)
    load.run(clients=8, requests=6)
    assert load.wrong == []
    assert load.done["batched"] > 0
    assert settled(server)["threads"] <= before["threads"]
    assert usage(server)["dspine"]["path"] == "speculative"
    assert server.request("/health").body["requests"] == 0


def test_a_client_that_goes_away_frees_the_generator(server: Server) -> None:
    prompt = "Never mind, never mind @long"
    body = json.dumps({"prompt": prompt, "max_tokens": 2000, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + body)
        received = b""
        while b"data: " not in received:
            received += connection.recv(1 << 12)
    settled(server)
    assert server.request("/health").body["requests"] == 0
    found = re.search(r'status="499"} (\d+)', server.request("/metrics").body)
    assert found is not None
    again = usage(server, prompt=prompt)  # the prompt that it left behind is in the cache, intact
    assert again["prompt_tokens_details"]["cached_tokens"] >= again["prompt_tokens"] - 2
    text = server.request(COMPLETIONS, {"prompt": prompt, "max_tokens": 3}).body["choices"][0][
        "text"
    ]
    assert text == "@one@two@three"


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
    assert reply.body["error"]
    assert usage(server)["completion_tokens"] == 12


def test_what_can_not_be_had_leaves_the_loaded_target(
    server: Server, pair: tuple[str, str]
) -> None:
    """An adapter or model that isn't there: mlx_lm's own provider unloads first and asks later."""
    prompt = "Keep this @long"
    usage(server, prompt=prompt)
    for wanted in (
        {"model": pair[0], "adapters": "/nowhere"},
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
    assert json.loads(body)["error"]
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


# ---- the server's own routes, start and end


def test_metrics_and_health(server: Server, pair: tuple[str, str]) -> None:
    usage(server, prompt="Count this @long")
    text = server.request("/metrics").body
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    assert values['dspine_requests_total{path="speculative",status="200"}'] >= 1
    assert values['dspine_tokens_total{kind="generated"}'] >= 12
    drafted = values['dspine_draft_tokens_total{kind="drafted"}']
    assert 0 < values['dspine_draft_tokens_total{kind="accepted"}'] <= drafted
    rounds = values["dspine_accepted_tokens_count"]
    assert values['dspine_accepted_tokens_bucket{le="+Inf"}'] == rounds
    assert (
        values["dspine_accepted_tokens_sum"] == values['dspine_draft_tokens_total{kind="accepted"}']
    )
    assert values["dspine_round_seconds_count"] == rounds
    assert values["dspine_memory_active_bytes"] > 0
    health = server.request("/health").body
    assert (health["status"], health["model"], health["drafter"]) == ("ok", pair[0], "DSpark")
    assert health["kernels"]["why"]
    ids = [model["id"] for model in server.request("/v1/models").body["data"]]
    assert str(Path(pair[0]).resolve()) in ids
    assert usage(server, model=ids[-1])["dspine"]["path"] == "speculative"


def test_an_api_key_guards_all_but_health(pair: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n", encoding="utf-8")
    flags = (
        "--model",
        pair[0],
        "--draft-model",
        pair[1],
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
            assert (reply.status, "key" in reply.body["error"]) == (401, True)
    allowed = {"Authorization": f"Bearer {KEY}"}
    assert server.request(COMPLETIONS, body, **allowed).body["choices"][0]["text"] == UNICODE
    assert server.request("/metrics", **allowed).status == 200
    assert server.request("/health").status == 200
    server.process.terminate()
    assert server.process.wait(10) == 0


def test_sigterm_under_load_ends_the_process(pair: tuple[str, str], tmp_path: Path) -> None:
    flags = ("--model", pair[0], "--draft-model", pair[1], *ALL)
    server = wait_until_up(start("dspine_mlx.server", tmp_path, *flags))
    _, status = terminate_under_load(server, expected_replies(server))
    assert status == 0
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("missing", ["target", "drafter"])
def test_a_model_that_can_not_be_loaded_ends_the_start(
    pair: tuple[str, str], tmp_path: Path, missing: str
) -> None:
    paths = {"target": pair[0], "drafter": pair[1]} | {missing: str(tmp_path / "nowhere")}
    flags = ("--model", paths["target"], "--draft-model", paths["drafter"])
    server = start("dspine_mlx.server", tmp_path, *flags)
    assert server.process.wait(60) == 2
    *_, last = server.log.read_text().splitlines()
    assert last.startswith("error: there is no folder")

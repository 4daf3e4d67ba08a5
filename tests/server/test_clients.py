"""The server as clients meet it: the official client, curl, load, statistics."""

import json
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.bench.server_load import FORMAT, Load, expected_replies, settled
from tests.support.metal_device import METAL
from tests.support.serving import TOOL_CALL, UNICODE, Server, usage

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
    )


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
        assert plain["usage"]["dspine"]["drafted"] == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
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


def test_a_request_chooses_drafter_and_verify_length(
    server: Server, scripted: tuple[str, str], tmp_path: Path
) -> None:
    assert usage(server)["dspine"]["path"] == "speculative"
    assert usage(server, verify_length=2)["dspine"]["verify_lengths"] == {"2": 4}
    assert usage(server, num_draft_tokens=3)["dspine"]["verify_lengths"] == {"3": 3}
    assert usage(server, verify_length=0)["dspine"]["path"] == "batched"
    assert usage(server, draft_model=None)["dspine"]["path"] == "batched"
    assert usage(server, draft_model=None, seed=1)["dspine"]["path"] == "batched"
    other = str(tmp_path / "other drafter")
    shutil.copytree(scripted[1], other)
    assert usage(server, draft_model=other)["dspine"]["accepted"] > 0
    assert server.request("/health").body["draft_model"] == other
    assert usage(server)["dspine"]["accepted"] > 0
    assert server.request("/health").body["draft_model"] == scripted[1]


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


# ---- the server's own routes


def test_metrics_and_health(server: Server, scripted: tuple[str, str]) -> None:
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
    assert (health["status"], health["model"], health["drafter"]) == ("ok", scripted[0], "DSpark")
    assert health["kernels"]["why"]
    assert health["verify_rows"].startswith("Verify rows are made by ")
    assert METAL or health["verify_kernels"] == []
    ids = [model["id"] for model in server.request("/v1/models").body["data"]]
    assert str(Path(scripted[0]).resolve()) in ids
    assert usage(server, model=ids[-1])["dspine"]["path"] == "speculative"

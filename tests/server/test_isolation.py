"""One request can't end the others: batches that fail, threads that hang, templates that loop."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from dspine_mlx.errors import InputError
from dspine_mlx.server.prompts import rendering
from tests.bench.server_load import text_of
from tests.support.serving import ALL, Server, start, usage, wait_until_up

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BATCHED: dict[str, Any] = {"draft_model": None, "prompt": "@long"}
LONG = {"prompt": "@long", "max_tokens": 300}
RAISES, HANGS = {"frequency_penalty": 0.125}, {"frequency_penalty": 0.25}
BREAKS = {"frequency_penalty": 0.375}
RESUMED = "its requests go on one by one"


@pytest.fixture(scope="module")
def faulty(scripted: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from drafting(scripted, tmp_path_factory.mktemp("faulty"))


@pytest.fixture(scope="module")
def without_drafter(
    scripted: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server whose batches are mlx-lm's own."""
    yield from running(tmp_path_factory.mktemp("plain"), "--model", scripted[0])


@pytest.fixture
def hanging(
    scripted: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    monkeypatch.setenv("HANGS", str(tmp_path / "hangs"))
    yield from drafting(scripted, tmp_path)


def drafting(pair: tuple[str, str], folder: Path) -> Iterator[Server]:
    return running(folder, "--model", pair[0], "--draft-model", pair[1], *ALL)


def running(folder: Path, *flags: str) -> Iterator[Server]:
    flags = (*flags, "--stall-seconds", "1")
    server = wait_until_up(start("tests.support.faulty_server", folder, *flags))
    yield server
    server.process.kill()
    server.process.wait(20)


def in_turn(server: Server, bodies: list[dict[str, Any]]) -> list[Any]:
    """Replies to requests that are sent one after another, each before the last one's reply."""
    replies: list[Any] = [None] * len(bodies)

    def ask(i: int) -> None:
        replies[i] = server.request(COMPLETIONS, bodies[i])

    threads = [Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for n, thread in enumerate(threads, 1):
        thread.start()
        while server.request("/health").body["requests"] < n and thread.is_alive():
            pass
    for thread in threads:
        thread.join(60)
    return replies


@pytest.mark.parametrize("more", [{}, {"stop": "@three@one@twos"}, {"logprobs": True}])
def test_an_exception_in_a_batch_ends_its_own_request_only(
    faulty: Server, more: dict[str, Any]
) -> None:
    assert RESUMED not in log_of_a_failure(faulty, LONG | more)
    assert usage(faulty)["completion_tokens"] == 12


@pytest.mark.parametrize("more", [{}, {"stop": "@three@one@twos"}, {"logprobs": True}])
def test_an_exception_in_mlx_lms_batch_ends_its_own_request_only(
    without_drafter: Server, more: dict[str, Any]
) -> None:
    assert RESUMED in log_of_a_failure(without_drafter, LONG | more)
    assert usage(without_drafter)["dspine"]["path"] == "batched"


def test_an_exception_among_requests_without_a_drafter_ends_its_own_only(faulty: Server) -> None:
    """They share mlx-lm's own batch, though the server has a drafter."""
    assert RESUMED in log_of_a_failure(faulty, LONG | {"draft_model": None})


def log_of_a_failure(server: Server, long: dict[str, Any]) -> str:
    """What the server logs when one of four requests at once fails. The others are checked."""
    before = server.log.read_text()
    failing = {"prompt": "@long", "max_tokens": 50} | RAISES
    bodies = [long, long | {"stream": True}, failing, long]
    alone = [server.request(COMPLETIONS, body) for body in bodies[:2]]
    replies = in_turn(server, bodies)
    assert replies[2].status == 500
    assert "the sixth token" in replies[2].body["error"]["message"]
    for reply, expected in zip(
        (replies[0], replies[1], replies[3]), (*alone, alone[0]), strict=True
    ):
        assert text_of(reply) == text_of(expected)
    for i in (0, 3):
        got, want = replies[i].body, alone[0].body
        assert got["usage"]["completion_tokens"] == long["max_tokens"]
        assert got["choices"][0].get("logprobs") == want["choices"][0].get("logprobs")
    return server.log.read_text().removeprefix(before)


def test_a_batch_that_fails_as_a_whole_goes_on_one_by_one(faulty: Server) -> None:
    """Greedy, seeded and structured replies, each from its last token."""
    seeded = {"prompt": "@long", "max_tokens": 300, "temperature": 3.0, "seed": 7}
    xtc = {"xtc_probability": 0.5, "xtc_threshold": 0.01}
    bodies = [
        {"prompt": "@long", "max_tokens": 300},
        seeded,
        seeded | xtc | {"stream": True},
        {"prompt": "@one", "max_tokens": 200, "temperature": 2.0, "seed": 1}
        | {"response_format": {"type": "json_object"}},
    ]
    alone = [faulty.request(COMPLETIONS, body) for body in bodies]
    before = faulty.log.read_text()
    replies = in_turn(faulty, [*bodies, {"prompt": "@long", "max_tokens": 40} | BREAKS])
    assert RESUMED in faulty.log.read_text().removeprefix(before)
    for reply, expected in zip(replies, alone, strict=False):
        assert text_of(reply) == text_of(expected)
    assert usage(faulty)["completion_tokens"] == 12


def test_a_batch_that_fails_within_a_character_loses_no_byte(without_drafter: Server) -> None:
    text = "".join(chr(0x1F600 + i) for i in range(40))
    body = {"prompt": text, "max_tokens": 60, "logit_bias": {"2": -100}}
    (alone,) = in_turn(without_drafter, [body])
    failing = {"prompt": "@long", "max_tokens": 50} | RAISES
    got, failed = in_turn(without_drafter, [body, failing])
    assert failed.status == 500
    assert text_of(got) == text_of(alone)


def test_a_thread_that_hangs_is_seen_and_does_not_keep_the_process(
    hanging: Server, tmp_path: Path
) -> None:
    hang = tmp_path / "hangs"
    hang.touch()
    asking = Thread(
        target=lambda: hanging.request(COMPLETIONS, BATCHED | {"max_tokens": 5} | HANGS)
    )
    asking.start()
    health = until(hanging, "stalled")
    assert (health.status, health.body["seconds_since_step"] >= 1) == (503, True)
    hang.unlink()
    asking.join(30)
    assert until(hanging, "ok").status == 200
    assert usage(hanging)["completion_tokens"] == 12
    hang.touch()
    Thread(target=quietly, args=(hanging, BATCHED | {"max_tokens": 5} | HANGS), daemon=True).start()
    until(hanging, "stalled")
    hanging.process.terminate()
    assert hanging.process.wait(20) == 1
    assert "does not end" in hanging.log.read_text()


def until(server: Server, status: str) -> Any:
    deadline = time.monotonic() + 30
    while (reply := server.request("/health")).body["status"] != status:
        assert time.monotonic() < deadline, reply
    return reply


def quietly(server: Server, body: dict[str, Any]) -> None:
    with suppress(OSError):
        server.request(COMPLETIONS, body)


# ---- chat templates

QUADRATIC = (
    "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}"
    "{% endfor %}{% endfor %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
)


def test_a_template_that_takes_too_long_is_ended(scripted: tuple[str, str], tmp_path: Path) -> None:
    """The model's own template, with a request that makes it slow, beside another client."""
    target = tmp_path / "target"
    shutil.copytree(scripted[0], target)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    text = json.dumps(settings | {"chat_template": QUADRATIC})
    (target / "tokenizer_config.json").write_text(text)
    server = wait_until_up(start("tests.support.faulty_server", tmp_path, "--model", str(target)))
    try:
        messages = [{"role": "user", "content": "@long"}]
        replies: list[Any] = []
        slow = Thread(
            target=lambda: replies.append(server.request(CHAT, {"messages": messages * 1000}))
        )
        slow.start()
        short = {"messages": messages, "max_tokens": 3}
        asked = 0
        while slow.is_alive():
            assert server.request(CHAT, short).status == 200
            asked += 1
        assert asked > 1
        assert replies[0].status == 400
        assert "chat template takes more than 1 s" in replies[0].body["error"]["message"]
    finally:
        server.process.kill()
        server.process.wait(20)


def test_a_prompt_far_beyond_the_context_is_not_tokenized(server: Server) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "x" * 3_000_000}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 3_000_000}]}),
    ):
        reply = server.request(path, body)
        assert reply.status == 400
        assert "characters; the model's context holds" in reply.body["error"]["message"]


def test_a_time_limit_on_templates(tokenizer: Any) -> None:
    def render(template: str) -> str:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, chat_template=template
        )

    with rendering(0.05), pytest.raises(InputError, match="more than 0.05 s"):
        render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    with rendering(0.05), pytest.raises(InputError, match="more than 0.05 s"):
        render(
            "{% macro f() %}{% for a in range(99999) %}{{ f() }}{% endfor %}{% endmacro %}"
            * 2
            + "{% for a in range(99999) %}{% set x = 'a' * 9 %}{% for b in range(999) %}"
            "{{ x }}{% endfor %}{% endfor %}"
        )
    with rendering(30):
        assert render("{{ messages[0]['content'] }}") == "hi"

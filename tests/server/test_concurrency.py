"""Replies to concurrent requests are those of mlx-lm's plain decoding, one by one."""

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dspine_mlx.load import DEMO
from tests.bench.server_load import text_of
from tests.bench.soak import CHAT, LONGEST, Draw, Reference
from tests.server.test_replies import save_pair
from tests.support.families import build
from tests.support.serving import Server, serving
from tests.support.tiny import plain_steps

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"
CLIENTS = 6


@pytest.fixture(scope="module", params=["auto", "5"])
def shipped(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The pair that ships, whose drafts are mostly right."""
    flags = ["--model", str(DEMO / "target"), "--draft-model", str(DEMO / "drafter")]
    flags += ["--verify-length", request.param, "--no-profile"]
    with serving("dspine_mlx.server", tmp_path_factory.mktemp("shipped"), *flags) as server:
        yield server


def concurrently(server: Server, path: str, bodies: list[dict[str, Any]]) -> list[Any]:
    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(lambda body: server.request(path, body), bodies))


@pytest.fixture(scope="module")
def mixed() -> list[tuple[dict[str, Any], tuple[str, str]]]:
    """Requests with what plain decoding replies: greedy, seeded, penalised, undrafted, with stop
    strings, whole and streamed."""
    draw = Draw(random.Random(3), {}, Reference(DEMO / "target"))
    bodies = [draw.request() for _ in range(18)]
    return [(body, draw.reference.reply(body)) for body in bodies]


def test_mixed_requests_at_once(
    shipped: Server, mixed: list[tuple[dict[str, Any], tuple[str, str]]]
) -> None:
    replies = concurrently(shipped, CHAT, [body for body, _ in mixed])
    for (body, plain), reply in zip(mixed, replies, strict=True):
        assert reply.status == 200
        assert text_of(reply) == plain, body
    told = [reply.body["usage"]["dspine"] for reply in replies if not reply.events]
    assert max(usage["texts_per_step"] or 0 for usage in told) > 2
    assert sum(usage["path"] == "batched" for usage in told) > len(told) / 2


def test_usage_and_metrics_tell_how_requests_shared_steps(shipped: Server) -> None:
    questions = [f"Tom has {n} apples and buys 3 more. How many are there?" for n in range(4, 10)]
    bodies = [
        {"messages": [{"role": "user", "content": text}], "max_tokens": LONGEST, "verify_length": 3}
        for text in questions
    ]
    for reply in concurrently(shipped, CHAT, bodies):
        told = reply.body["usage"]["dspine"]
        assert told["path"] == "batched"
        assert 1 < told["texts_per_step"] <= CLIENTS
        assert told["rounds"] == sum(told["verify_lengths"].values()) > 0
        assert 0 < told["accepted"] <= told["drafted"]
        assert told["tokens_per_second"] > 0
    text = shipped.request("/metrics").body
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['dspine_steps_total{kind="shared"}']) > 0
    assert 1 < float(values["dspine_texts_per_step"]) < CLIENTS
    assert values["dspine_round_seconds_count"] == values["dspine_accepted_tokens_count"]


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3_text"])
def test_targets_with_recurrent_layers_and_windows(tmp_path: Path, family: str) -> None:
    """Two turns each: the second one finds the first one's caches."""
    model = build(family)
    target, drafter, tokenizer = save_pair(tmp_path, family, model)
    flags = ("--model", target, "--draft-model", drafter, "--verify-length", "3")
    prompts = [f"Maria has {n} stamps, and so has Tom" for n in range(CLIENTS)]
    with serving("dspine_mlx.server", tmp_path, *flags) as server:
        for more in (" and", " more, less?"):
            bodies = [{"prompt": text, "max_tokens": 9, "logprobs": True} for text in prompts]
            for i, reply in enumerate(concurrently(server, COMPLETIONS, bodies)):
                ids = [t["id"] for t in reply.body["choices"][0]["logprobs"]["content"]]
                plain = plain_steps(model, tokenizer, tokenizer.encode(prompts[i]), max_tokens=9)
                assert ids == [token for token, _ in plain]
                prompts[i] += reply.body["choices"][0]["text"] + more


def test_a_target_that_can_not_share_forwards_is_drafted_for_in_turn(tmp_path: Path) -> None:
    target, drafter, _ = save_pair(tmp_path, "llama4", build("llama4"))
    check_in_turn(tmp_path, "--model", target, "--draft-model", drafter)


def test_quantised_caches_are_drafted_for_in_turn(tmp_path: Path) -> None:
    check_in_turn(tmp_path, "--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")


def check_in_turn(folder: Path, *flags: str) -> None:
    bodies = [{"prompt": f"Maria has {n} stamps", "max_tokens": 9} for n in range(CLIENTS)]
    with serving("dspine_mlx.server", folder, "--verify-length", "3", *flags) as server:
        alone = [text_of(server.request(COMPLETIONS, body)) for body in bodies]
        replies = concurrently(server, COMPLETIONS, bodies)
    assert [text_of(reply) for reply in replies] == alone
    assert {reply.body["usage"]["dspine"]["path"] for reply in replies} == {"speculative"}


def test_a_request_with_another_drafter_ends_no_other_one(tmp_path: Path) -> None:
    model = build("qwen3")
    target, drafter, tokenizer = save_pair(tmp_path, "qwen3", model)
    other = str(shutil.copytree(drafter, tmp_path / "other"))
    flags = ("--model", target, "--draft-model", drafter, "--verify-length", "3")
    bodies: list[dict[str, Any]] = [
        {"prompt": f"Maria has {n} stamps", "max_tokens": 30, "logprobs": True} for n in range(9)
    ]
    for body in bodies[2::3]:
        body["draft_model"] = other
    with serving("dspine_mlx.server", tmp_path, *flags) as server:
        replies = concurrently(server, COMPLETIONS, bodies)
    for body, reply in zip(bodies, replies, strict=True):
        ids = [t["id"] for t in reply.body["choices"][0]["logprobs"]["content"]]
        plain = plain_steps(model, tokenizer, tokenizer.encode(body["prompt"]), max_tokens=30)
        assert ids == [token for token, _ in plain]
        assert reply.body["usage"]["dspine"]["drafted"] > 0
        assert reply.body["usage"]["dspine"]["path"] != "plain"

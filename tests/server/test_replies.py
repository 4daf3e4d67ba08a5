"""mlx_lm.server with and without drafting give the same replies: separate processes on loopback."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.load import DEMO
from tests.support.families import FAMILIES, SIZES, build, drafter_config
from tests.support.serving import ALL, Reply, Server, serving
from tests.support.tiny import plain_steps

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Body = dict[str, Any]
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
]
PROBLEM = "Tom has 4 apples and buys 3 more. How many apples does he have?"
SAMPLERS: list[Body] = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
]
PROCESSORS: list[Body] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1.2, "repetition_context_size": 3},
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.6, "frequency_context_size": 5},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"logit_bias": {"20": 6.0, "21": 5.5}},
    {"logit_bias": {"2": -100}},
    {"logit_bias": {"300": 3.0}, "frequency_penalty": 1.0, "temperature": 0.8, "seed": 5},
]


def said(text: str, *turns: str) -> Body:
    """A chat of user and assistant messages in turn."""
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate((text, *turns))]
    }


def completions(prompts: list[str]) -> Iterator[tuple[str, Body]]:
    for prompt in prompts:
        for tokens in (1, 2, 7, 24):
            yield COMPLETIONS, {"prompt": f"{prompt}", "max_tokens": tokens, "logprobs": True}
        yield COMPLETIONS, {"prompt": prompt, "max_tokens": 12, "top_logprobs": 3}
        yield COMPLETIONS, {"prompt": prompt, "max_tokens": 12, "stream": True}
    for i, sampler in enumerate(SAMPLERS):
        for prompt in prompts[:2]:
            yield (
                COMPLETIONS,
                {"prompt": prompt, "max_tokens": 14, "seed": 7 + i, "logprobs": True} | sampler,
            )
    for processor in PROCESSORS:
        yield COMPLETIONS, {"prompt": prompts[0], "max_tokens": 16, "top_logprobs": 2} | processor


def chats(texts: list[str], stops: list[Any]) -> Iterator[tuple[str, Body]]:
    for text in texts:
        yield CHAT, said(text) | {"max_tokens": 14, "logprobs": True}
        yield CHAT, said(text, "Well") | {"max_tokens": 9}
        yield CHAT, said(text, "Well.", "Go on") | {"max_tokens": 9, "stream": True}
    for stop in stops:
        for stream in (False, True):
            yield (
                CHAT,
                said(f"{texts[0]} {stop}") | {"max_tokens": 24, "stop": stop, "stream": stream},
            )
    system = [{"role": "system", "content": "Answer in one word."}]
    for text in texts:
        messages = {"messages": system + said(text)["messages"]}
        yield CHAT, messages | {"max_tokens": 11}
        yield CHAT, messages | {"max_tokens": 11, "seed": 3, "temperature": 0.9}
    for stream in (False, True):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        yield CHAT, said(f"the weather? {stream}") | {"tools": TOOLS, "stream": stream} | options


def compared(reply: Reply) -> Any:
    """A reply without what no two replies share."""
    assert reply.status == 200, reply
    parts = json.loads(json.dumps(reply.events or [reply.body]))
    for part in parts:
        for name in ("id", "created", "system_fingerprint"):
            part.pop(name)
        part.get("usage", {}).pop("dspine", None)
        for choice in part["choices"]:
            for call in choice.get("message", choice.get("delta", {})).get("tool_calls", []):
                call.pop("id")
    return parts


def check_same(plain: Server, ours: Server, requests: list[tuple[str, Body]]) -> Counter[str]:
    """Send all requests to both; what our drafter did."""
    done: Counter[str] = Counter()
    for path, body in requests:
        expected, reply = plain.request(path, body), ours.request(path, body)
        assert compared(reply) == compared(expected), body
        usage = reply.body["usage"]["dspine"] if not reply.events else {}
        done.update({name: usage.get(name, 0) for name in ("rounds", "accepted", "drafted")})
        done["requests"] += 1
    return done


def converse(server: Server, opening: str, turns: int) -> list[Any]:
    """A chat whose turns build on the server's own replies."""
    body, replies = said(opening) | {"max_tokens": 10, "top_logprobs": 2}, []
    for turn in range(turns):
        reply = server.request(CHAT, body)
        replies.append(compared(reply))
        content = reply.body["choices"][0]["message"]["content"] or "."
        body["messages"] += said("", content, f"And then? {turn}")["messages"][1:]
    return replies


@pytest.fixture(scope="module")
def servers(
    scripted: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    target, drafter = scripted
    folder = tmp_path_factory.mktemp("servers")
    flags = ("--model", target, "--draft-model", drafter, *ALL)
    with (
        serving("mlx_lm.server", folder, "--model", target) as plain,
        serving("dspine_mlx.server", folder, *flags) as ours,
    ):
        yield plain, ours


def test_replies_are_the_stock_servers(servers: tuple[Server, Server]) -> None:
    prompts = ["@unicode", "@long", "@one", "Say it: @long"]
    stops = ["@three", ["hm", "@two"], [TOOLS[0]["type"], "</think>"], "\n"]
    requests = [*completions(prompts), *chats(["Hello", "@unicode"], stops)]
    done = check_same(*servers, requests)
    assert done["requests"] >= 60
    assert done["accepted"] > 0.5 * done["drafted"] > 0


def test_the_verify_length_of_the_machine_changes_no_reply(servers: tuple[Server, Server]) -> None:
    """Drafting may be parked, in whole or in part: the text stays."""
    plain, ours = servers
    body = {"prompt": "@long", "max_tokens": 60, "logprobs": True}
    for more in ({}, {"seed": 3, "temperature": 1.0}, {"prompt": "@unicode"}):
        reply = ours.request(COMPLETIONS, body | more | {"verify_length": "auto"})
        assert compared(reply) == compared(plain.request(COMPLETIONS, body | more))
        done = reply.body["usage"]["dspine"]
        assert done["parked"] + done["rounds"] > 0
        assert done["verdict"]


def test_conversations_reuse_the_cache_alike(servers: tuple[Server, Server]) -> None:
    plain, ours = servers
    replies = converse(ours, "Once upon a time", 4)
    assert replies == converse(plain, "Once upon a time", 4)
    cached = [parts[0]["usage"]["prompt_tokens_details"]["cached_tokens"] for parts in replies]
    assert cached[0] < cached[1] < cached[2] < cached[3]


def test_the_pair_that_ships_gives_the_stock_replies(tmp_path: Path) -> None:
    """Some of the requests that the scripted pair has answered above."""
    target, drafter = str(DEMO / "target"), str(DEMO / "drafter")
    flags = ("--model", target, "--draft-model", drafter, "--verify-length", "5")
    requests = [*completions([PROBLEM]), *chats([PROBLEM], ["\n", " has"])]
    requests = random.Random(5).sample(requests, 20)
    with (
        serving("mlx_lm.server", tmp_path, "--model", target) as plain,
        serving("dspine_mlx.server", tmp_path, *flags) as ours,
    ):
        done = check_same(plain, ours, requests)
        assert converse(ours, PROBLEM, 3) == converse(plain, PROBLEM, 3)
    assert done["accepted"] > 0


def test_prompts_share_one_cache_however_they_are_decoded(tmp_path: Path) -> None:
    """A conversation that grows and is cut back, each turn decoded in another way, against mlx-lm
    in this process, which caches nothing. (The scripted target would not notice a wrong cache.)"""
    model = build("qwen3")
    target, drafter, tokenizer = save_pair(tmp_path, "qwen3", model)
    other = str(shutil.copytree(drafter, tmp_path / "other"))
    modes: list[Body] = [{}, {"draft_model": None}, {"draft_model": None, "seed": 1}]
    modes += [{"verify_length": 1}, {"draft_model": other}, {"verify_length": "auto"}]
    rng, prompt, cached = random.Random(5), PROBLEM, 0
    flags = ("--model", target, "--draft-model", drafter, *ALL)
    with serving("dspine_mlx.server", tmp_path, *flags) as ours:
        for turn in range(24):
            body = {"prompt": prompt, "max_tokens": 6, "logprobs": True} | modes[turn % len(modes)]
            reply = ours.request(COMPLETIONS, body).body
            ids = [token["id"] for token in reply["choices"][0]["logprobs"]["content"]]
            plain = plain_steps(model, tokenizer, tokenizer.encode(prompt), max_tokens=6)
            assert ids == [token for token, _ in plain], (turn, body)
            cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            kept = rng.choice([len(prompt), len(prompt), rng.randrange(10, len(prompt))])
            prompt = prompt[:kept] + rng.choice([" and", " more", " apples?", " 7"])
    assert cached > 20


def save_pair(folder: Path, name: str, model: nn.Module) -> tuple[str, str, TokenizerWrapper]:
    """A family's model with the demo's tokenizer, and a drafter for it that knows nothing."""
    target, drafter = folder / "target", folder / "drafter"
    shutil.copytree(DEMO / "target", target, ignore=shutil.ignore_patterns("model*"))
    write(target, {"model_type": name, "eos_token_id": 2} | SIZES | FAMILIES[name], model)
    config = asdict(drafter_config(model))
    write(drafter, config, DFlash(DrafterConfig.from_dict(config)))
    return str(target), str(drafter), load_tokenizer(target, eos_token_ids=[2])


def write(folder: Path, config: Body, model: nn.Module) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))


def test_a_target_that_can_not_trim_finds_its_prefix_too(tmp_path: Path) -> None:
    target, drafter, _ = save_pair(tmp_path, "qwen3_5", build("qwen3_5"))
    flags = ("--model", target, "--draft-model", drafter, *ALL)
    with (
        serving("mlx_lm.server", tmp_path, "--model", target) as plain,
        serving("dspine_mlx.server", tmp_path, *flags) as ours,
    ):
        expected, replies = converse(plain, PROBLEM, 3), converse(ours, PROBLEM, 3)
    assert [r[0]["choices"] for r in replies] == [r[0]["choices"] for r in expected]
    cached = [r[0]["usage"]["prompt_tokens_details"]["cached_tokens"] for r in replies]
    assert 0 == cached[0] < cached[1] < cached[2]

"""Which models a server has, which a request may name, and that a bad one changes nothing."""

import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from dspine_mlx.load import DEMO
from dspine_mlx.server.failure import UnknownModel
from dspine_mlx.server.options import Options
from dspine_mlx.server.provider import Provider, reachable
from tests.support.serving import ALL, Server, serving, start, usage, wait_until_up

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"


def test_without_a_model_the_pair_that_ships_is_served(tmp_path: Path) -> None:
    with serving("dspine_mlx.server", tmp_path, "--no-profile") as server:
        done = usage(server, prompt="Two and two are", max_tokens=32)
        assert done["dspine"]["path"] == "speculative"
        assert server.request("/health").body["model"] == str(DEMO / "target")
        log = server.log.read_text()
        assert "no --model was given" in log
        assert "32 tokens" in log
        assert "tokens/s" in log
        assert "tokens per round" in log
        assert "Two and two" not in log


def test_a_drafter_alone_ends_the_start(tmp_path: Path) -> None:
    server = start("dspine_mlx.server", tmp_path, "--draft-model", str(DEMO / "drafter"))
    assert server.process.wait(60) == 2
    *_, last = server.log.read_text().splitlines()
    assert last.startswith("error: the drafter")
    assert "add --model" in last


# ---- names that requests may use


def provider(host: str, allowed: Any = None, adapter: str | None = None) -> Provider:
    args: Any = SimpleNamespace(
        host=host,
        model=str(DEMO / "target"),
        draft_model=str(DEMO / "drafter"),
        adapter_path=adapter,
        trust_remote_code=False,
        chat_template="",
        pipeline=False,
    )
    return Provider(args, Options(allow_models=allowed))


@pytest.mark.parametrize(
    ("host", "allowed", "others"),
    [
        ("127.0.0.1", None, True),
        ("::1", None, True),
        ("localhost", None, True),
        ("127.9.9.9", None, True),
        ("0.0.0.0", None, False),
        ("::", None, False),
        ("192.168.0.7", None, False),
        ("example.org", None, False),
        ("127.0.0.1", (), False),
        ("0.0.0.0", ("any",), True),
        ("0.0.0.0", ("other", "else"), True),
        ("127.0.0.1", ("else",), False),
    ],
)
def test_names_that_requests_may_use(host: str, allowed: Any, others: bool) -> None:
    models = provider(host, allowed)

    def may(model: str = "default_model", draft: str | None = None, adapter: Any = None) -> bool:
        try:
            models.check_names(SimpleNamespace(model=model, draft=draft, adapter=adapter))
        except UnknownModel:
            return False
        return True

    assert may()
    assert may(str(DEMO / "target"), str(DEMO / "drafter"))
    assert may(draft="default_model")
    assert may("other") == may(draft="other") == may("other", adapter="other") == others
    assert reachable(host) == (host in ("0.0.0.0", "::", "192.168.0.7", "example.org"))


@pytest.mark.parametrize("own", [None, "their adapters"])
def test_the_servers_own_model_takes_no_other_adapters(own: str | None) -> None:
    """mlx_lm would answer without them."""
    models = provider("127.0.0.1", None, own)

    def check(model: str, adapter: str | None) -> None:
        models.check_names(SimpleNamespace(model=model, draft=None, adapter=adapter))

    for model, adapter in (("default_model", own), ("default_model", None), ("other", "else")):
        check(model, adapter)
    with pytest.raises(
        UnknownModel, match="adapters is else, but this server's own model"
    ) as wrong:
        check("default_model", "else")
    assert wrong.value.param == "adapters"


def test_other_models_are_refused_and_not_listed(scripted: tuple[str, str], tmp_path: Path) -> None:
    flags = ("--model", scripted[0], "--draft-model", scripted[1], "--allow-models", "own", *ALL)
    with serving("dspine_mlx.server", tmp_path, *flags) as server:
        for field in ("model", "draft_model", "adapters"):
            reply = server.request(COMPLETIONS, {"prompt": "@long", field: str(DEMO / "target")})
            error = reply.body["error"]
            assert (reply.status, error["param"]) == (404, field)
            assert error["code"] == "model_not_found"
        listed = [model["id"] for model in server.request("/v1/models").body["data"]]
        assert scripted[0] in listed
        assert usage(server, model=listed[0])["completion_tokens"] == 12


# ---- models that can't be loaded


def truncated(target: Path) -> None:
    data = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(data[: len(data) // 2])


def misshapen(target: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))


def mistyped(target: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0}))


def nameless(target: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"model_type": "no such"}))


def without_tokenizer(target: Path) -> None:
    (target / "tokenizer.json").write_text("{")


def without_weights(target: Path) -> None:
    (target / "model.safetensors").unlink()


def no_config(target: Path) -> None:
    (target / "config.json").write_bytes(b"\xff[")


def bad_header(target: Path) -> None:
    (target / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


@pytest.mark.parametrize(
    "spoil",
    [truncated, misshapen, mistyped, nameless, without_tokenizer, without_weights, no_config,
     bad_header],
)  # fmt: skip
@pytest.mark.parametrize("part", ["model", "draft_model"])
def test_what_does_not_load_leaves_what_there_is(
    server: Server, scripted: tuple[str, str], tmp_path: Path, spoil: Any, part: str
) -> None:
    if part == "draft_model" and spoil in (without_tokenizer, nameless):
        return  # drafters need neither
    prompt = f"Still there: {part} {spoil.__name__} @long"
    usage(server, prompt=prompt)
    before = server.request("/health").body
    bad = tmp_path / "bad"
    shutil.copytree(scripted[part == "draft_model"], bad)
    spoil(bad)
    reply = server.request(COMPLETIONS, {"prompt": prompt, part: str(bad)})
    assert reply.status in (400, 404), reply
    assert reply.body["error"]["param"] == part
    after = server.request("/health").body
    for name in ("loaded", "model", "draft_model", "drafter"):
        assert after[name] == before[name]
    found = usage(server, prompt=prompt)
    assert found["prompt_tokens_details"]["cached_tokens"] == found["prompt_tokens"] - 1


def test_another_model_is_loaded_and_left_again(scripted: tuple[str, str], tmp_path: Path) -> None:
    flags = ("--model", scripted[0], "--draft-model", scripted[1], *ALL)
    other = shutil.copytree(scripted[0], tmp_path / "other")
    with serving("dspine_mlx.server", tmp_path, *flags) as server:
        expected = server.request(COMPLETIONS, {"prompt": "@unicode"}).body["choices"]
        for model in (str(other), "default_model", str(DEMO / "target"), scripted[0]):
            body = {"prompt": "@unicode", "model": model, "draft_model": None}
            reply = server.request(COMPLETIONS, body)
            assert reply.status == 200, reply
            if model != str(DEMO / "target"):
                assert reply.body["choices"] == expected


# ---- errors as the official client sees them


def test_errors_are_openais(server: Server) -> None:
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
    )
    hello: Any = [{"role": "user", "content": "Hello"}]
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="default_model", messages=hello, temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    assert bad.value.type == "invalid_request_error"
    assert "temperature is -1; it must be" in bad.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=hello, stream=True)
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    assert "gpt-9" in unknown.value.message


def test_an_error_within_a_stream_is_openais(scripted: tuple[str, str], tmp_path: Path) -> None:
    flags = ("--model", scripted[0], "--draft-model", scripted[1], *ALL)
    server = wait_until_up(start("tests.support.faulty_server", tmp_path, *flags))
    try:
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
        )
        stream = client.completions.create(
            model="default_model",
            prompt="@long",
            max_tokens=30,
            stream=True,
            frequency_penalty=0.125,
        )
        with pytest.raises(openai.APIError, match="the sixth token") as failed:
            list(stream)
        assert failed.value.type == "server_error"
    finally:
        server.process.kill()
        server.process.wait(20)

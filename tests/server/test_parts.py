"""Parts of the server without a process: flags, self-check, prompt cache, metrics, limits."""

import json
import pickle
import socket
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm.server
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_lm.utils import _parse_size

import dspine_mlx
import dspine_mlx.server
from dspine_mlx.errors import InputError
from dspine_mlx.server.call import Call, Failed
from dspine_mlx.server.compatibility import SEAMS, check_host
from dspine_mlx.server.connections import Connections, Server
from dspine_mlx.server.decoding import check_prompt
from dspine_mlx.server.handler import Handler
from dspine_mlx.server.metrics import Histogram, Metrics
from dspine_mlx.server.options import Options, parse
from dspine_mlx.server.prompt_cache import PromptCache
from dspine_mlx.server.provider import context_length
from dspine_mlx.server.validation import parse_body
from dspine_mlx.target.open import check_config

# ---- flags and self-check


def test_flags_that_are_not_ours_are_left_to_mlx_lm() -> None:
    ours = ["--verify-length", "4", "--kernels", "off", "--no-profile"]
    ours.append("--no-lookup")
    theirs = ["--model", "m", "--draft-model", "d", "--temp", "0.5", "--new-flag"]
    options, rest = parse([*theirs, *ours])
    assert rest == theirs
    assert options == Options(verify_length=4, kernels="off", profile=False, lookup=False)
    assert parse([])[0] == Options()


def test_an_old_flag_is_read_and_names_its_successors(caplog: pytest.LogCaptureFixture) -> None:
    assert parse(["--speculate-up-to", "3", "--temp", "1"]) == (Options(), ["--temp", "1"])
    assert "--decode-concurrency" in caplog.text
    assert "--prompt-concurrency" in caplog.text


def test_num_draft_tokens_means_the_verify_length() -> None:
    options, rest = parse(["--num-draft-tokens", "5"])
    assert (options.verify_length, rest) == (5, ["--num-draft-tokens", "5"])
    assert parse(["--num-draft-tokens", "5", "--verify-length", "auto"])[0].verify_length == "auto"


@pytest.mark.parametrize(
    "flags",
    [
        *(["--verify-length", "-1"], ["--speculate-up-to", "0"], ["--api-key", ""]),
        *(["--kernels", "no"], ["--prompt-cache-bytes", "5KB"], ["--prompt-cache-bytes=-1"]),
        *(["--prompt-cache-bytes", "x"], ["--prompt-cache-bytes", "1e3"]),
    ],
)
def test_bad_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(flags)
    assert stopped.value.code == 2
    assert flags[0].partition("=")[0] in capsys.readouterr().err


@given(
    st.integers(0, 10**6),
    st.sampled_from(["", ".5", ".", ".25"]),
    st.sampled_from(["", "M", "gb", " GB", "mb"]),
)
def test_sizes_are_read_as_mlx_lm_reads_them(number: int, fraction: str, unit: str) -> None:
    text = f"{number}{fraction}{unit}"
    assert parse(["--prompt-cache-bytes", text])[1] == ["--prompt-cache-bytes", text]
    assert _parse_size(text) >= number


@pytest.mark.parametrize("name", SEAMS)
def test_an_mlx_lm_without_a_seam_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_host()
    owner, _, attribute = name.rpartition(".")
    part = getattr(mlx_lm.server, owner) if owner else mlx_lm.server
    if attribute in vars(part):
        monkeypatch.delattr(part, attribute)
        with pytest.raises(InputError, match=f"has no mlx_lm.server.{name}; serving works with"):
            check_host()
    monkeypatch.setattr(part, attribute, lambda: None, raising=False)
    if SEAMS[name]:
        with pytest.raises(InputError, match=f"{name} without {SEAMS[name][0]}"):
            check_host()


def test_install_rebinds_the_servers_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ModelProvider", "run", "stream_generate", "BatchGenerator"):
        monkeypatch.setattr(mlx_lm.server, name, getattr(mlx_lm.server, name))
    dspine_mlx.server.install(Options(verify_length=3))
    assert mlx_lm.server.ModelProvider.keywords["options"].verify_length == 3
    assert mlx_lm.server.run.keywords["options"].verify_length == 3


# ---- prompt cache


def filled(rows: int) -> KVCache:
    cache = KVCache()
    keys = mx.arange(rows, dtype=mx.float32).reshape(1, 1, rows, 1)
    cache.update_and_fetch(keys, keys)
    return cache


def prompt_cache() -> Any:
    provider: Any = SimpleNamespace(target_caches=2)
    return PromptCache(provider, 4, 1 << 40)


def test_entries_are_shared_but_drafter_caches_are_not() -> None:
    cache, tokens = prompt_cache(), [1, 2, 3, 4]
    cache.insert_cache(("m", None, "a"), tokens, [filled(4) for _ in range(5)])
    for draft, caches in (("a", 5), ("b", 2), (None, 2)):
        found, rest = cache.fetch_nearest_cache(("m", None, draft), [*tokens, 5])
        assert (len(found), rest) == (caches, [5])
        assert [c.offset for c in found] == [4] * caches
    assert cache.fetch_nearest_cache(("other", None, "a"), tokens) == (None, tokens)
    assert cache.fetch_nearest_cache(("m", "adapter", "a"), tokens) == (None, tokens)


@pytest.mark.parametrize("draft", ["a", None])
def test_an_exact_hit_leaves_one_token(draft: str | None) -> None:
    cache, tokens = prompt_cache(), [1, 2, 3, 4]
    cache.insert_cache(("m", None, "a"), tokens, [filled(4) for _ in range(3)])
    found, rest = cache.fetch_nearest_cache(("m", None, draft), tokens)
    assert [c.offset for c in found] == [4 - len(rest)] * len(found)
    assert rest == tokens[-len(rest) :]
    found, rest = cache.fetch_nearest_cache(("m", None, draft), [1, 2, 9])
    assert ([c.offset for c in found], rest) == ([2] * len(found), [9])


def test_an_exact_hit_on_caches_that_can_not_be_trimmed() -> None:
    cache, tokens = prompt_cache(), [1, 2, 3, 4]
    cache.insert_cache(("m", None, None), tokens, [ArraysCache(1), ArraysCache(1)])
    assert cache.fetch_nearest_cache(("m", None, None), tokens) == (None, tokens)
    cache.insert_cache(("m", None, None), tokens[:2], [ArraysCache(1), ArraysCache(1)])
    found, rest = cache.fetch_nearest_cache(("m", None, None), tokens)
    assert (len(found), rest) == (2, [3, 4])


# ---- the rest


def answer_of(content: bytes) -> tuple[bytes, Any, str]:
    """Status and error of a handler without a generation thread, and the metrics then."""
    generator: Any = SimpleNamespace(
        options=Options(idle_timeout=0.05),
        metrics=Metrics(),
        cli_args=SimpleNamespace(allowed_origins="*"),
    )
    server = Server(("127.0.0.1", 0), partial(Handler, generator))
    server.connections = Connections(8, 10)
    with server:
        Thread(target=server.handle_request, daemon=True).start()
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.sendall(content)
            head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    return head.split()[1], json.loads(body)["error"], generator.metrics.text({})


def test_a_body_that_does_not_arrive_gets_408() -> None:
    status, error, metrics = answer_of(
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n"
    )
    assert status == b"408"
    assert "in time" in error["message"]
    assert 'dspine_requests_total{path="refused",status="408"} 1' in metrics


def test_a_mistake_of_ours_is_said() -> None:
    image = {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}
    body = json.dumps({"messages": [{"role": "user", "content": [image]}]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
    status, error, _ = answer_of((head + body).encode())
    assert (status, error["type"]) == (b"500", "server_error")
    assert error["message"].startswith("AttributeError: ")


def test_histograms_are_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert list(histogram.lines("h")) == [
        'h_bucket{le="1"} 2',
        'h_bucket{le="2"} 3',
        'h_bucket{le="+Inf"} 4',
        "h_sum 12",
        "h_count 4",
    ]


def block(accepted: int) -> list[tuple[int, mx.array, bool]]:
    """Tokens of a round: the accepted drafted ones, and the target's own."""
    return [(7, mx.zeros(1), i < accepted) for i in range(accepted + 1)]


def test_a_call_is_counted_with_its_statistics() -> None:
    metrics, call = Metrics(), Call()
    call.path, call.drafted, call.tokens = "speculative", True, [7] * 6
    call.statistics.record(4, block(accepted=3))
    call.statistics.record(4, block(accepted=1))
    call.statistics.plain = 3
    metrics.finish(call)
    lost = Call()
    lost.fail(Failed(503, "stopping"))
    metrics.finish(lost)
    text = metrics.text({"requests_queued": 2})
    for line in (
        'dspine_requests_total{path="speculative",status="200"} 1',
        'dspine_requests_total{path="waiting",status="503"} 1',
        'dspine_draft_tokens_total{kind="drafted"} 8',
        'dspine_draft_tokens_total{kind="accepted"} 4',
        'dspine_accepted_tokens_bucket{le="1"} 1',
        "dspine_accepted_tokens_sum 4",
        "dspine_requests_queued 2",
        "dspine_parked_share 0.5",
        "dspine_round_seconds_count 2",  # also of rounds that nobody waited for
    ):
        assert line in text.splitlines()


def test_a_call_travels_to_other_ranks_without_its_connection() -> None:
    call = pickle.loads(pickle.dumps(Call(object(), 3, "grammar")))  # type: ignore[arg-type]
    assert (call.connection, call.verify_length, call.grammar) == (None, 3, "grammar")
    assert not call.disconnected()


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
    ],
)
def test_context_lengths(config: dict[str, Any], limit: int | None) -> None:
    assert context_length(config) == limit


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
SCALING = st.dictionaries(
    st.sampled_from(["factor", "original_max_position_embeddings", "type"]), ANYTHING
)
PLACES = ("max_position_embeddings", "rope_scaling", "rope_parameters")


@given(st.dictionaries(st.sampled_from(PLACES), ANYTHING | SCALING), st.booleans())
def test_a_config_that_passes_has_a_context_length(config: dict[str, Any], nested: bool) -> None:
    """It is read when the former model has been given up."""
    try:
        check_config({"text_config": config} if nested else config)
    except InputError:
        return
    limit = context_length(config)
    assert limit is None or 1 <= limit < 1 << 80


def test_a_model_without_limits_takes_any_prompt() -> None:
    arguments: Any = SimpleNamespace(
        max_tokens=10**9,
        logits=SimpleNamespace(logit_bias={5: 1.0}),
        sampling=SimpleNamespace(top_k=10**6),
    )
    provider: Any = SimpleNamespace(context_length=None, vocab_size=None)
    check_prompt([1], arguments, provider)
    with pytest.raises(InputError, match="empty"):
        check_prompt([], arguments, provider)


@given(
    st.dictionaries(
        st.text(),
        st.integers() | st.text() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    )
)
def test_json_bodies_come_through_unchanged(body: dict[str, Any]) -> None:
    assert parse_body(json.dumps(body).encode()) == body

"""Stop strings: a reply is what comes before the first of them, on every path."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import StopSequences
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.load import DEMO
from dspine_mlx.server.stops import ReplyText, Stopped
from tests.bench.server_load import text_of
from tests.support.serving import Server, serving

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
PROBLEM = "Maria has 9 toys. Her sister has 3 fewer toys than she has. How many toys are there?"
TEXTS = st.text("abé😀", max_size=30)
WORDS = st.lists(st.text("abé😀", min_size=1, max_size=5), min_size=1, max_size=4)


def before_first(text: str, words: list[str]) -> str:
    places = [text.find(word) for word in words if word in text]
    return text[: min(places)] if places else text


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(pieces(), WORDS)
@settings(deadline=None)
def test_a_text_ends_before_its_first_stop_string_however_it_comes(
    parts: list[str], words: list[str]
) -> None:
    stopped, given_out, read = Stopped(words), "", ""
    for part in parts:
        read += part
        given_out += stopped.add(part)
        assert before_first(read, words).startswith(given_out)
        if stopped.found:
            break
    else:
        given_out += stopped.end()
    assert given_out == before_first("".join(parts), words)
    assert stopped.found == any(word in "".join(parts) for word in words)


@given(pieces(), WORDS)
@settings(deadline=None)
def test_only_what_may_become_a_stop_string_is_held_back(
    parts: list[str], words: list[str]
) -> None:
    stopped, given_out, read = Stopped(words), "", ""
    for part in parts:
        read += part
        given_out += stopped.add(part)
        if stopped.found:
            return
        held = read[len(given_out) :]
        assert held == "" or any(word.startswith(held) or held.startswith(word) for word in words)


@given(st.text(max_size=40), st.data())
@settings(max_examples=60, deadline=None)
def test_tokens_of_any_text(tokenizer: TokenizerWrapper, text: str, data: st.DataObject) -> None:
    """With a real tokenizer, whose tokens cut characters into bytes."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    whole = detokenizer.text
    start = data.draw(st.integers(0, max(0, len(whole) - 1)))
    word = whole[start : data.draw(st.integers(start + 1, start + 6))] or "x"
    reply = ReplyText([word], StopSequences([(2,)]), tokenizer.detokenizer)
    out, ended = "", False
    for i, token in enumerate(ids):
        ended = reply.advance(token)
        out += reply.take(last=ended or i == len(ids) - 1)
        if ended:
            break
    assert out == before_first(whole, [word])
    assert reply.found == (word in whole)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    flags = ("--model", str(DEMO / "target"), "--draft-model", str(DEMO / "drafter"))
    folder = tmp_path_factory.mktemp("pair")
    with serving("dspine_mlx.server", folder, *flags, "--verify-length", "4") as server:
        yield server


PATHS: dict[str, dict[str, Any]] = {
    "speculative": {},
    "batched": {"draft_model": None},
    "batched, seeded": {"draft_model": None, "seed": 1},
    "batched, undrafted": {"verify_length": 0},
}


@pytest.mark.parametrize("path", PATHS)
def test_replies_end_before_stop_strings_on_every_path(pair: Server, path: str) -> None:
    """Each stop string on each path, streamed on half of them."""
    body = {"messages": [{"role": "user", "content": PROBLEM}], "max_tokens": 28} | PATHS[path]
    text, ending = text_of(pair.request(CHAT, body))
    assert len(text) > 60
    stops: list[Any] = [text[:1], text[:30], text[3:5], text[7:19], text[40:41], [text[20:24], "9"]]
    stops += [["zzz", text[-3:]], "not there", [text[:50] + "?", text[10:12]]]
    for i, stop in enumerate(stops, list(PATHS).index(path)):
        reply = pair.request(CHAT, body | {"stop": stop, "stream": i % 2 == 1})
        words = [stop] if isinstance(stop, str) else stop
        found, reason = text_of(reply)
        assert found == before_first(text, words), stop
        assert reason == ("stop" if any(word in text for word in words) else ending)
        if not reply.events:
            assert reply.body["usage"]["dspine"]["path"] == path.partition(",")[0]


def test_a_reply_that_ends_by_itself_gives_what_was_held_back(server: Server) -> None:
    for stop in ("你好", ["你?", "zz"]):
        reply = server.request(
            "/v1/completions", {"prompt": "@unicode", "max_tokens": 20, "stop": stop}
        )
        choice = reply.body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("é😀你", "stop")


def test_a_stopped_turn_is_found_in_the_cache(server: Server) -> None:
    for path in PATHS.values():
        prompt = f"Stop and go on {path} @long"
        body = {"prompt": prompt, "max_tokens": 30, "stop": "three"} | path
        first = server.request("/v1/completions", body).body
        text = first["choices"][0]["text"]
        assert text == "@one@two@"
        again = server.request("/v1/completions", body | {"prompt": prompt + text}).body["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]

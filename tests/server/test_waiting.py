"""Requests that can't join the running batch: answered in their turn, and nobody starves."""

import base64
import io
import shutil
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from PIL import Image

from tests.support.serving import ALL, UNICODE, Server, serving

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "@long", "max_tokens": 400}
TEMPLATE = "{% for m in messages %}{{ m['content'] if m['content'] is string }}{% endfor %}"


def in_order(server: Server, asked: list[tuple[str, dict[str, Any]]]) -> tuple[list[Any], Any]:
    """Replies to requests sent one after another, each before the last one's reply, and their
    places in the order in which they came."""
    replies: list[Any] = [None] * len(asked)
    done: list[int] = []

    def ask(i: int) -> None:
        replies[i] = server.request(*asked[i])
        done.append(i)

    threads = [Thread(target=ask, args=(i,)) for i in range(len(asked))]
    for n, thread in enumerate(threads, 1):
        thread.start()
        while server.request("/health").body["requests"] < n - len(done) and thread.is_alive():
            pass
    for thread in threads:
        thread.join(60)
    return replies, done


def check(server: Server, waiting: tuple[str, dict[str, Any]]) -> Any:
    """Two texts run, one that can't join them comes, and then three more that could. The one in
    the middle has its turn after the first two and before the last three."""
    (alone,) = in_order(server, [(COMPLETIONS, LONG)])[0]
    asked = [(COMPLETIONS, LONG)] * 2 + [waiting] + [(COMPLETIONS, LONG)] * 3
    replies, done = in_order(server, asked)
    assert [reply.status for reply in replies] == [200] * 6, replies
    assert set(done[:2]) == {0, 1}
    assert done[2] == 2
    for i in (0, 1, 3, 4, 5):
        assert replies[i].body["choices"] == alone.body["choices"]
    return replies[2].body


def test_another_models_request_has_its_turn(scripted: tuple[str, str], tmp_path: Path) -> None:
    other = str(shutil.copytree(scripted[0], tmp_path / "other"))
    flags = ("--model", scripted[0], "--draft-model", scripted[1], *ALL)
    with serving("dspine_mlx.server", tmp_path, *flags) as server:
        waiting = {"prompt": "@unicode", "model": other, "draft_model": None}
        assert check(server, (COMPLETIONS, waiting))["choices"][0]["text"] == UNICODE


def test_a_request_with_images_has_its_turn(scripted: tuple[str, str], tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (1, 1)).save(picture, "PNG")
    url = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
    content = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url}}]
    flags = ("--model", scripted[0], "--draft-model", scripted[1], *ALL)
    with serving(
        "tests.support.seeing_server", tmp_path, *flags, "--chat-template", TEMPLATE
    ) as server:
        waiting = {"messages": [{"role": "user", "content": content}], "max_tokens": 20}
        body = check(server, (CHAT, waiting))
    assert body["choices"][0]["message"]["content"] == UNICODE
    assert body["usage"]["dspine"]["path"] == "plain"
    assert body["usage"]["dspine"]["drafted"] == 0

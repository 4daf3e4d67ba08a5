"""Images: a text model fetches none, and other models only small public ones."""

import base64
import http.server
import ipaddress
import socket
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.server import images
from dspine_mlx.server.fields import FieldError
from dspine_mlx.server.images import BYTES, fetch, inline_images, is_public
from tests.support.serving import Server, usage

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


class Inside(http.server.BaseHTTPRequestHandler):
    """A service that only this machine may reach."""

    hits: list[str] = []

    def do_GET(self) -> None:
        self.hits.append(self.path)
        if self.path.startswith("/to"):
            self.send_response(302)
            self.send_header("Location", self.path.partition("?")[2])
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.send_header("Content-Type", "image/png")
        self.end_headers()
        try:
            self.wfile.write(PIXEL)
            for _ in range(64 if self.path == "/large" else 0):
                self.wfile.write(b"x" * (1 << 20))
            while self.path == "/endless":
                self.wfile.write(b"x" * 1000)
        except OSError:
            pass

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def inside() -> Iterator[str]:
    Inside.hits.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Inside)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def asking(url: Any, kind: str = "image_url") -> list[Any]:
    return [{"role": "user", "content": [{"type": kind, "image_url": url}]}]


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image"])
def test_a_text_model_fetches_nothing(server: Server, inside: str, kind: str) -> None:
    for url in (f"{inside}/a", {"url": f"{inside}/b"}, "data:image/png;base64,AAAA"):
        for more in ({}, {"model": "/nowhere"}, {"draft_model": None}):
            reply = server.request(CHAT, {"messages": asking(url, kind)} | more)
            assert (reply.status, reply.body["error"]["param"]) == (400, "messages")
    assert Inside.hits == []
    assert usage(server)["completion_tokens"] == 12


@given(st.sampled_from([3, None, [], {}, {"url": 3}, {"url": None}, [{"url": "x"}]]))
@settings(deadline=None)
def test_images_without_a_url_are_refused(server: Server, url: Any) -> None:
    assert server.request(CHAT, {"messages": asking(url)}).status == 400


def test_private_addresses_are_not_asked(inside: str) -> None:
    port = inside.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost", "0.0.0.0", "127.1", "2130706433", "[::ffff:127.0.0.1]"):
        with pytest.raises(FieldError, match="not public|can't be fetched"):
            fetch(f"http://{host}:{port}/a", False, BYTES)
    assert Inside.hits == []


@given(
    st.ip_addresses(network="10.0.0.0/8")
    | st.ip_addresses(network="192.168.0.0/16")
    | st.ip_addresses(network="169.254.0.0/16")
    | st.ip_addresses(network="127.0.0.0/8")
    | st.ip_addresses(network="172.16.0.0/12")
    | st.ip_addresses(network="224.0.0.0/4")
    | st.ip_addresses(network="100.64.0.0/10")
    | st.ip_addresses(network="0.0.0.0/8")
)
@settings(deadline=None)
def test_no_form_of_a_private_address_is_public(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    mapped = ipaddress.IPv6Address((0xFFFF << 32) | number)
    sixtofour = ipaddress.IPv6Address((0x2002 << 112) | (number << 80))
    nat64 = ipaddress.IPv6Address((0x64FF9B << 96) | number)
    local64 = ipaddress.IPv6Address((0x64FF9B0001 << 80) | number)
    retired = [ipaddress.IPv6Address((top << 32) | number) for top in (0, 0xFFFF0000)]
    for other in (address, mapped, sixtofour, nat64, local64, *retired):
        assert not is_public(str(other)), other
    assert is_public("93.184.215.14")
    assert is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c")
    for text in ("::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1", "::"):
        assert not is_public(text)


def test_every_address_of_a_name_must_be_public(monkeypatch: pytest.MonkeyPatch) -> None:
    def addresses(*_: Any, **__: Any) -> list[Any]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, ("93.184.215.14", 80)), (*kind, ("10.0.0.7", 80))]

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    with pytest.raises(FieldError, match="not public"):
        fetch("http://both.example/a", False, BYTES)


def test_what_is_allowed_is_put_in_place(inside: str) -> None:
    messages = asking({"url": f"{inside}/to?/to?{inside}/image"})
    inline_images(messages, private=True)
    url = messages[0]["content"][0]["image_url"]["url"]
    assert url == f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"
    assert len(Inside.hits) == 3
    inline_images(messages, private=False)  # a data URL stays
    assert messages[0]["content"][0]["image_url"]["url"] == url


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/none", "answers 404"),
        ("/large", "more than 32 MB"),
        ("/to?/to?/to?/to?/image", "redirects more than 3 times"),
        ("/to?file:///etc/passwd", "must lead to http"),
        ("/to?ftp://example.org/a", "must lead to http"),
        ("/to?http://[bad", "can't be fetched"),
        ("/\r\nHost: x", "can't be fetched"),
        ("/é", "can't be fetched"),
    ],
)
def test_what_is_no_image_within_limits_is_refused(inside: str, path: str, message: str) -> None:
    with pytest.raises(FieldError, match=message):
        fetch(inside + path, True, BYTES)


def test_a_redirect_is_checked_like_a_first_url(
    inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = iter([True])
    monkeypatch.setattr(images, "is_public", lambda address: next(first, False))
    with pytest.raises(FieldError, match="not public"):
        fetch(f"{inside}/to?{inside}/secret", False, BYTES)
    assert [hit.partition("?")[0] for hit in Inside.hits] == ["/to"]


def test_an_endless_image_is_given_up_in_time(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "SECONDS", 0.3)
    with pytest.raises(FieldError, match="within 0 s|can't be fetched|more than"):
        fetch(f"{inside}/endless", True, 1 << 40)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png,abc", "must be base64"),
        ("data:image/png;base64,%%%", "is not base64"),
        ("data:image/png;base64,AAAA", "can't be read"),
        ("data:image/png;base64," + "A" * (BYTES * 4 // 3 + 100), "more than 32 MB"),
        ("file:///etc/passwd", "must start with"),
    ],
)
def test_data_urls(url: str, message: str) -> None:
    with pytest.raises(FieldError, match=message):
        inline_images(asking(url), private=False)


def test_many_pixels_and_many_images() -> None:
    huge = bytearray(PIXEL)
    huge[16:24] = (30000).to_bytes(4, "big") * 2  # of the header, and its checksum
    import zlib

    huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4, "big")
    url = f"data:image/png;base64,{base64.b64encode(huge).decode()}"
    with pytest.raises(FieldError, match="30000|pixels"):
        inline_images(asking(url), private=False)
    part = {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}
    with pytest.raises(FieldError, match="takes up to 16"):
        inline_images([{"role": "user", "content": [part] * 17}], private=False)

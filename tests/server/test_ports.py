"""Ports of servers: none is given to two of them, and one that was not asked for is told."""

from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler

import pytest

from dspine_mlx.server.connections import Server
from tests.support import serving
from tests.support.serving import free_port


def test_a_port_is_given_once_while_its_lock_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    first, lock = free_port()
    offered = iter([first, first, first + 1])

    class Offering:
        def __enter__(self) -> "Offering":
            return self

        def __exit__(self, *_: object) -> None: ...

        def bind(self, _: object) -> None: ...

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", next(offered)

    monkeypatch.setattr(serving.socket, "socket", Offering)
    with ExitStack() as stack:
        second, other = free_port()
        stack.enter_context(other)
        assert second == first + 1
    lock.close()


def test_a_server_says_which_port_it_got(capsys: pytest.CaptureFixture[str]) -> None:
    with Server(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_address[1]
        assert port > 0
        assert capsys.readouterr().out == f"listening on port {port}\n"
    with Server(("127.0.0.1", port), BaseHTTPRequestHandler):
        assert capsys.readouterr().out == ""  # it was asked for

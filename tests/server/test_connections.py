"""Connections: limits on their number, and on the time until a request arrives."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.server.connections import Connections
from tests.bench.server_load import status_of
from tests.support.serving import ALL, Server, start, usage, wait_until_up

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"
KEY = "schlüssel €"


class Socket:
    """What `Connections` does to one."""

    def __init__(self) -> None:
        self.ended = False

    def shutdown(self, how: int) -> None:
        assert how == socket.SHUT_RD
        self.ended = True


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["new", "arrive", "close"]))))
@settings(deadline=None)
def test_whatever_comes_there_are_never_more_and_requests_stay(events: list[Any]) -> None:
    connections = Connections(6, 60)
    waiting: list[Any] = []
    working: list[Any] = []
    for address, event in events:
        if event == "new":
            sock: Any = Socket()
            if connections.add(sock, address):
                waiting.append((sock, address))
            else:  # only where requests fill the place
                same = [s for s, a in working if a == address]
                assert len(same) >= 3 or len(working) >= 6
        elif event == "arrive" and waiting:
            sock, where = waiting.pop()
            if not sock.ended:
                connections.arrived(sock)
                working.append((sock, where))
        elif event == "close" and working:
            connections.remove(working.pop()[0])
        waiting = [(s, a) for s, a in waiting if not s.ended]
        assert not any(s.ended for s, _ in working)
        assert len(connections) == len(waiting) + len(working) <= 6
        for where in "ab":
            assert sum(a == where for _, a in waiting + working) <= 3


@pytest.fixture(scope="module")
def guarded(
    scripted: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("guarded")
    key = folder / "key"
    key.write_text(KEY, encoding="utf-8")
    flags = ("--model", scripted[0], "--draft-model", scripted[1], "--max-connections", "16", *ALL)
    server = wait_until_up(start("dspine_mlx.server", folder, *flags, "--api-key", f"@{key}"))
    yield server
    server.process.kill()
    server.process.wait(20)


def authorized(server: Server, body: Any, encoding: str = "utf-8") -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nContent-Length: {len(raw)}\r\nAuthorization: Bearer "
    return server.raw(head.encode() + KEY.encode(encoding) + b"\r\n\r\n" + raw)


BODY = {"prompt": "@long", "max_tokens": 3}


def test_idle_connections_give_way(guarded: Server) -> None:
    with ExitStack() as stack:
        for i in range(60):
            idle = socket.create_connection(("127.0.0.1", guarded.port), 10)
            stack.enter_context(idle)
            if i % 3:
                idle.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: slow" * (i % 3))
        assert b"200 OK" in authorized(guarded, BODY)
        assert status_of(guarded)["threads"] < 60
    assert b"200 OK" in authorized(guarded, BODY)


def test_running_out_of_descriptors_neither_spins_nor_ends_the_server(guarded: Server) -> None:
    resource = pytest.importorskip("resource")
    if not hasattr(resource, "prlimit"):
        pytest.skip("limits of another process can't be set here")
    pid = guarded.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 4, before[1]))
    try:
        with ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(socket.create_connection(("127.0.0.1", guarded.port), 10))
            assert b"200 OK" in authorized(guarded, BODY)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("encoding", ["utf-8"])
def test_a_key_beyond_ascii(guarded: Server, encoding: str) -> None:
    assert b"200 OK" in authorized(guarded, BODY, encoding)
    wrong = guarded.raw(b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer \xff\xfe\x80\r\n\r\n")
    assert b" 401 " in wrong


def test_a_large_body_without_a_key_is_not_read(guarded: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 67108864\r\n\r\n"
    with socket.create_connection(("127.0.0.1", guarded.port), 20) as client:
        client.sendall(head)
        sent = 0
        try:
            while sent < 1 << 26:
                sent += client.send(b"x" * (1 << 16))
        except OSError:
            pass
        assert sent < 1 << 25
        assert b" 401 " in client.recv(1 << 12)


LENGTHS = ["-1", "ten", "1e3", "+3", "0x10", "3, 4", "٣", "9" * 5000, "", "1.0", "99"]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("half_close", [True, False])
def test_wrong_content_lengths(server: Server, length: str, half_close: bool) -> None:
    if length == "99" and not half_close:
        return  # a body that may still come
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode()
    answer = server.raw(head + json.dumps(BODY).encode(), half_close=half_close)
    assert answer.split()[1][:1] == b"4", answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_chunked_bodies_and_two_lengths(server: Server) -> None:
    for head in ("Transfer-Encoding: chunked", "Content-Length: 3\r\nContent-Length: 4"):
        content = f"POST {COMPLETIONS} HTTP/1.1\r\n{head}\r\n\r\n4\r\nabcd\r\n0\r\n\r\n".encode()
        answer = server.raw(content)
        assert answer.split()[1] in (b"400", b"411")
    assert usage(server)["completion_tokens"] == 12


def test_a_half_closed_client_is_answered_or_counted_as_gone(server: Server) -> None:
    raw = json.dumps(BODY).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    answer = server.raw(head + raw, half_close=True)
    assert answer.split()[1] in (b"200", b"499")


def test_a_head_has_a_deadline(tmp_path: Path) -> None:
    connections = Connections(4, -1)
    ends = socket.socketpair()
    try:
        assert connections.add(ends[0], "a")
        connections.expire()
        assert ends[0].recv(1) == b""
        connection = connections.wait(ends[0], 60)
        assert connection.late
    finally:
        for end in ends:
            end.close()

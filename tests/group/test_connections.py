"""Connections are looked at from outside: what is in them stays there."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspine_mlx.group.connections import Connections, connections


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other


def test_a_closed_end(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    known = connections()
    assert known[one.fileno()] == other.getsockname()
    assert known[other.fileno()] == one.getsockname()
    watched = Connections({one.fileno(): known[one.fileno()]})
    assert not watched.closed
    other.send(b"ab")
    assert not watched.closed
    other.close()
    assert not watched.closed  # there is something to read before its end
    assert one.recv(2) == b"ab"
    assert watched.closed


def test_a_number_that_is_another_files_now(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    watched = Connections({one.fileno(): other.getsockname()})
    other.close()
    assert watched.closed
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, one.fileno())
    os.close(null)
    assert not watched.closed
    assert not watched.made


def test_looking_leaves_nothing_open(tmp_path: Path) -> None:
    """Files and pipes are no sockets."""
    reader, writer = os.pipe()
    with (tmp_path / "file").open("w") as file:
        known = Connections(dict.fromkeys((reader, file.fileno()), ("127.0.0.1", 1)))
        before = len(os.listdir("/dev/fd"))
        assert not {reader, writer, file.fileno()} & connections().keys()
        assert not known.closed
        assert len(os.listdir("/dev/fd")) == before
    os.close(reader)
    os.close(writer)

"""The listening server: limits on connections and on the time until a request arrives.

A connection costs a thread and a descriptor before anything is known about its client. So there is
a limit for all of them and one per address. A connection that has not sent its request's head by
its deadline is closed. When a new one finds no room, the one that has waited longest is closed.
Idle connections give way; requests being answered never do.
"""

import errno
import logging
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from threading import Lock
from typing import Any

from dspine_mlx.server.failure import error_body

FULL = error_body(503, "this server has no room for more connections; try again later")
NO_ROOM = (
    f"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    f"Content-Length: {len(FULL)}\r\nRetry-After: 1\r\n\r\n"
).encode() + FULL
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LISTENING = "listening on port"
PAUSE = 0.05  # seconds before the next accept when descriptors have run out


@dataclass
class Connection:
    """One client's connection, until its request arrives (`waits`) and then while it is
    answered."""

    socket: socket.socket
    address: str
    deadline: float
    since: float = field(default_factory=time.monotonic)
    waits: bool = True
    late: bool = False  # its deadline has passed

    def let_go(self) -> None:
        """End the read that its thread is in; the thread can still answer."""
        self.late = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RD)


class Connections:
    """All open connections; `limit` in all, half of it per address."""

    def __init__(self, limit: int, seconds: float):
        self.limit, self.seconds = limit, seconds
        self.lock = Lock()
        self.open: dict[int, Connection] = {}

    def __len__(self) -> int:
        return len(self.open)

    def add(self, sock: socket.socket, address: str) -> bool:
        """Admit a connection; False if there is no room even without the idle ones."""
        with self.lock:
            same = [c for c in self.open.values() if c.address == address]
            if len(same) >= max(1, self.limit // 2) and not self.evict(same):
                return False
            if len(self.open) >= self.limit and not self.evict(list(self.open.values())):
                return False
            deadline = time.monotonic() + self.seconds
            self.open[id(sock)] = Connection(sock, address, deadline)
            return True

    def evict(self, among: list[Connection]) -> bool:
        """Close the connection that has waited longest for its client."""
        waiting = [c for c in among if c.waits]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda c: c.since)
        oldest.let_go()
        del self.open[id(oldest.socket)]
        return True

    def evict_any(self) -> bool:
        with self.lock:
            return self.evict(list(self.open.values()))

    def expire(self) -> None:
        with self.lock:
            now = time.monotonic()
            late = [c for c in self.open.values() if c.waits and now > c.deadline and not c.late]
            for connection in late:
                connection.let_go()

    def wait(self, sock: socket.socket, seconds: float) -> Connection:
        """Give the body this many seconds more: the head has arrived."""
        deadline = time.monotonic() + seconds
        with self.lock:
            connection = self.open.get(id(sock))
            if connection is None:  # evicted meanwhile
                return Connection(sock, "", deadline, late=True)
            connection.deadline = deadline
            return connection

    def arrived(self, sock: socket.socket) -> None:
        """Note that the whole request has arrived."""
        with self.lock:
            if id(sock) in self.open:
                self.open[id(sock)].waits = False

    def remove(self, sock: socket.socket) -> None:
        with self.lock:
            self.open.pop(id(sock), None)


class Server(ThreadingHTTPServer):
    """Accepts connections while there is room, and calls `alive` between them."""

    daemon_threads = True
    request_queue_size = 128
    connections: Connections  # a subclass has them, as mlx_lm makes the instance

    def server_bind(self) -> None:
        anyone = self.server_address[1] == 0
        super().server_bind()
        if anyone:  # --port 0: nobody knows yet which one it is
            print(f"{LISTENING} {self.server_port}", flush=True)

    def alive(self) -> None:
        """Raise the error that ends the server, if any."""

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in EXHAUSTED:  # the listening socket stays ready: don't spin on it
                self.connections.evict_any()
                time.sleep(PAUSE)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        if self.connections.add(request, str(client_address[0])):
            return True
        with suppress(OSError):
            request.setblocking(False)
            request.send(NO_ROOM)
        return False

    def shutdown_request(self, request: Any) -> None:
        self.connections.remove(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        self.connections.expire()
        self.alive()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            logging.exception(f"a request of {client_address} failed")

"""One request on its way through the server: what it asks of us, and what became of it."""

import select
import socket
import time
from contextvars import ContextVar
from queue import Queue
from threading import Lock
from typing import Any, Literal

from mlx_lm import server as host

from dspine_mlx.errors import InputError
from dspine_mlx.round.statistics import Statistics

# Whether a reply starts inside a reasoning block, may open one, or comes after one (or has none).
Reasoning = Literal["inside", "possible", "over"]


class Failed(Exception):
    """A request that gets an error instead of a reply: an HTTP status and a sentence."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


LEAST_LOGPROB = -9999.0  # OpenAI's, for a token that can't come
CLIENT_GONE = 499  # nginx's status for a client that closed the connection


class UnknownModel(InputError):
    """A model that is neither a folder here nor on the Hub."""


class Call:
    """The HTTP thread makes it, the generation thread fills it in."""

    def __init__(
        self,
        connection: socket.socket | None = None,
        verify_length: int | str = "auto",
        grammar: str | None = None,
    ):
        self.connection = connection
        self.verify_length = verify_length
        self.grammar = grammar  # llguidance's, of a response_format
        self.path = "waiting"  # then speculative, batched or plain
        self.statistics = Statistics()
        self.context: host.GenerationContext | None = None
        self.reasoning: Reasoning = "over"
        self.tools = False  # whether the reply may be a tool call
        self.tokens = 0
        self.started = time.perf_counter()
        self.first_token: float | None = None  # seconds after the start
        self.round_started = self.started
        self.round_seconds: list[float] = []
        self.failure: Failed | None = None

    def __reduce__(self) -> tuple[type["Call"], tuple[None, int | str, str | None]]:
        """Other ranks of a distributed server get the settings only."""
        return Call, (None, self.verify_length, self.grammar)

    def fail(self, failure: Failed) -> Failed:
        """Give the request up; the generation thread stops at its next token or prompt chunk."""
        self.failure = self.failure or failure
        return self.failure

    @property
    def prompt(self) -> list[int]:
        return [] if self.context is None else self.context.prompt

    def usage(self) -> dict[str, Any]:
        """`usage.dspine` of the response."""
        s = self.statistics
        return {
            "path": self.path,
            "rounds": s.rounds,
            "acceptance_length": round(s.acceptance_length, 3),
            "drafted": s.drafted,
            "accepted": s.accepted,
            "verify_lengths": {str(n): rounds for n, rounds in sorted(s.verify_lengths.items())},
            "parked": s.plain,
            "verdict": s.verdict,
        }

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def disconnected(self) -> bool:
        """Whether either end is closed, as far as the socket knows; never waits."""
        if self.connection is None:
            return False
        poll = select.poll()
        try:
            poll.register(self.connection, select.POLLIN)
            return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):  # ValueError: closed here, while the server ends
            return True


# The request that this thread is working on.
serving: ContextVar[Call] = ContextVar("serving")


class Reply:
    """A request's way back to its HTTP thread, which keeps account of what passes."""

    def __init__(self, queue: Queue, call: Call, calls: "Calls"):
        self.queue, self.call, self.calls = queue, call, calls

    def put(self, item: Any) -> None:
        if isinstance(item, host.GenerationContext):
            self.call.context = item
        elif isinstance(item, host.Response):
            self.call.tokens += 1
            for token in item.top_tokens:  # a grammar's -inf is no JSON
                token["logprob"] = max(token["logprob"], LEAST_LOGPROB)
            if self.call.first_token is None:
                self.call.first_token = time.perf_counter() - self.call.started
        elif item is None or isinstance(item, Exception):
            self.calls.remove(self.call)
        self.queue.put(item)


class Calls:
    """The requests that wait or run."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.calls: set[Call] = set()
        self.closed: Failed | None = None

    def __len__(self) -> int:
        return len(self.calls)

    def add(self, call: Call) -> None:
        with self.lock:
            if self.closed is not None:
                raise call.fail(self.closed)
            self.calls.add(call)

    def remove(self, call: Call) -> None:
        with self.lock:
            self.calls.discard(call)

    def close(self, failure: Failed) -> None:
        """Fail all of them, and those to come."""
        with self.lock:
            self.closed = failure
            for call in self.calls:
                call.fail(failure)

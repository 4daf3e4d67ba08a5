"""One request on its way through the server: its settings and its outcome."""

import select
import socket
import time
from collections.abc import Iterator
from contextvars import ContextVar
from copy import copy
from queue import Queue
from threading import Lock
from typing import Any, Literal

from mlx_lm import server as host

from dspine_mlx.round.statistics import Statistics
from dspine_mlx.server.failure import Failed, failed
from dspine_mlx.server.stops import ReplyText

# Whether a reply starts inside a reasoning block, may open one, or comes after one (or has none).
Reasoning = Literal["inside", "possible", "over"]


LEAST_LOGPROB = -9999.0  # OpenAI's, for an impossible token


class Call:
    """A request's state: the HTTP thread creates it, the generation thread fills it in."""

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
        self.drafted = False  # whether it has a drafter
        self.reply: Reply | None = None  # once the generation thread has taken it
        self.statistics = Statistics()
        self.context: host.GenerationContext | None = None
        self.reasoning: Reasoning = "over"
        self.tools = False  # whether the reply may be a tool call
        self.tokens: list[int] = []  # of the reply, so far
        self.text: ReplyText | None = None  # of the reply, where it has stop strings
        self.stopped = False  # by a stop string, or with text held back for one
        self.alone = False  # its batch failed, so it continues by itself
        self.started = time.perf_counter()
        self.prefilled: float | None = None  # when the prompt's last chunk was done
        self.first_token: float | None = None  # seconds after the start
        self.latest = self.started  # when the newest token came
        self.round_started = self.started
        self.round_seconds: list[float] = []
        self.rounds = 0  # that were timed
        self.shared_steps = self.shared_texts = 0  # steps in a batch, and texts in them
        self.failure: Failed | None = None

    def __reduce__(self) -> tuple[type["Call"], tuple[Any, ...], dict[str, Any]]:
        """Pickle only the settings, for other ranks of a group."""
        settings = (None, self.verify_length, self.grammar)
        return Call, settings, {"path": self.path, "tools": self.tools, "reasoning": self.reasoning}

    def fail(self, failure: Failed) -> Failed:
        """Give the request up; the generation thread stops at its next token or prompt chunk."""
        self.failure = self.failure or failure
        return self.failure

    def take(self, response: host.Response) -> None:
        """Record one token, whose text becomes the deliverable part of the reply."""
        self.tokens.append(response.token)
        self.latest = time.perf_counter()
        if self.first_token is None:
            self.first_token = self.latest - self.started
        response.logprob = sayable(response.logprob)
        for token in response.top_tokens:
            token["logprob"] = sayable(token["logprob"])
        if self.text is None:
            return
        response.text = self.text.take(response.finish_reason is not None)
        ended = response.finish_reason == "stop" and response.text
        if self.text.found or ended:  # mlx_lm drops the text that comes with "stop"
            response.finish_reason, self.stopped = "length", True

    def timed(self) -> None:
        """Note the time of a round that is over, if there was one since the last note."""
        now = time.perf_counter()
        if self.statistics.rounds > self.rounds:
            self.round_seconds.append(now - self.round_started)
            self.rounds = self.statistics.rounds
        self.round_started = now

    def times(self, rounds: int) -> list[float]:
        """Seconds of the first rounds. One that its client did not wait for has its time so far."""
        known = self.round_seconds[:rounds]
        so_far = time.perf_counter() - self.round_started
        return known + [so_far] * (rounds - len(known))

    @property
    def steps_alone(self) -> int:
        """Rounds and plain steps that it had to itself."""
        return max(0, self.statistics.rounds + self.statistics.plain - self.shared_steps)

    @property
    def texts_per_step(self) -> float | None:
        """Texts that its steps were shared by, itself included: the mean over all steps. None:
        mlx_lm's own batches don't say."""
        steps = self.steps_alone + self.shared_steps
        return (self.steps_alone + self.shared_texts) / steps if steps else None

    def progress(self, done: int, total: int) -> None:
        """Record progress on the prompt; mlx_lm's batches report all of it before the first
        token."""
        if not self.tokens and (done < total or self.path == "batched"):
            self.prefilled = time.perf_counter()

    @property
    def speed(self) -> float | None:
        """Tokens per second since the prompt was prefilled."""
        if self.prefilled is None or not self.tokens or self.latest <= self.prefilled:
            return None
        return len(self.tokens) / (self.latest - self.prefilled)

    @property
    def prompt(self) -> list[int]:
        return [] if self.context is None else self.context.prompt

    def usage(self) -> dict[str, Any]:
        """The response's `usage.dspine`."""
        s, texts = self.statistics, self.texts_per_step
        return {
            "path": self.path,
            "texts_per_step": None if texts is None else round(texts, 2),
            "rounds": s.rounds,
            "acceptance_length": round(s.acceptance_length, 3),
            "drafted": s.drafted,
            "accepted": s.accepted,
            "verify_lengths": {str(n): rounds for n, rounds in sorted(s.verify_lengths.items())},
            "lookups": s.lookups,
            "parked": s.plain,
            "verdict": s.verdict,
            "tokens_per_second": None if self.speed is None else round(self.speed, 2),
        }

    def figures(self) -> dict[str, Any]:
        """What the server's page shows of a request: no text."""
        return self.usage() | {
            "status": 200 if self.failure is None else self.failure.status,
            "prompt_tokens": len(self.prompt),
            "tokens": len(self.tokens),
            "first_token": self.first_token,
        }

    def summary(self) -> str:
        """One line for the log: figures, never text."""
        status = self.failure.status if self.failure is not None else 200
        words = [
            f"{status} {self.path}: {len(self.prompt)} prompt tokens, {len(self.tokens)} tokens"
        ]
        if self.speed is not None:
            words.append(f"{self.speed:.1f} tokens/s")
        if self.shared_steps and self.texts_per_step is not None:
            words.append(f"{self.texts_per_step:.1f} texts per step")
        if self.statistics.rounds:
            words.append(f"{self.statistics.acceptance_length:.2f} tokens per round")
        if self.statistics.verdict:
            words.append(self.statistics.verdict)
        return ", ".join(words)

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


def sayable(logprob: float) -> float:
    """Make a logprob fit for JSON, which has neither NaN nor a forbidden token's -inf."""
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB


class Heartbeat:
    """Time of the generation thread's last step."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def beat(self) -> None:
        self.last = time.monotonic()

    @property
    def age(self) -> float:
        return time.monotonic() - self.last


class Reply:
    """The queue back to a request's HTTP thread; it records what passes through."""

    def __init__(self, queue: Queue, call: Call, calls: "Calls", in_group: bool = False):
        self.queue, self.call, self.calls, self.in_group = queue, call, calls, in_group
        self.ended = False

    def put(self, item: Any) -> None:
        self.calls.heart.beat()
        if self.ended:
            return
        if isinstance(item, host.GenerationContext):
            if self.call.context is not None:  # of a reply that is resumed
                return
            if self.in_group and self.call.path != "batched":
                item = copy(item)  # mlx_lm fails on a stop of the context itself
            self.call.context = item
        elif isinstance(item, host.Response):
            self.call.take(item)
        elif isinstance(item, tuple):
            self.call.progress(*item)
        elif item is None or isinstance(item, Exception):
            self.ended = True
            self.calls.remove(self.call)
        if self.call.failure is not None and self.call.context is not None:
            self.call.context.stop()  # a batch drops it
        self.queue.put(item)


class Calls:
    """The waiting and running requests."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.heart = Heartbeat()
        self.calls: set[Call] = set()
        self.taken: dict[Call, tuple] = {}  # by the generation thread
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
            self.taken.pop(call, None)

    def take(self, reply: Reply, request: host.CompletionRequest, args: Any) -> tuple:
        """Note the request that the generation thread takes, and return it."""
        with self.lock:
            if reply.call in self.calls:
                self.taken[reply.call] = reply, request, args
        return reply, request, args

    def in_progress(self) -> list[tuple]:
        with self.lock:
            return list(self.taken.values())

    def running(self) -> list[Call]:
        """Those that the generation thread works on."""
        with self.lock:
            return list(self.taken)

    def close(self, failure: Failed) -> None:
        """Fail all requests, and all future ones."""
        with self.lock:
            self.closed = failure
            for call in self.calls:
                call.fail(failure)


def answered(responses: Iterator[host.Response], call: Call) -> Iterator[host.Response]:
    """Pass responses on; every error but one of the client's own connection becomes a `Failed`."""
    try:
        yield from responses
        call.check()  # a failed call ends early without an error
    except OSError:
        raise
    except Exception as error:  # whatever the generation thread put on the queue
        raise call.fail(failed(error)) from error

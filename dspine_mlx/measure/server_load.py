"""Several requests at once through `dspine-mlx serve`: mlx-lm's batches against drafting batches.

The server is a separate process on the loopback interface, and the clients are threads here. So the
figures include HTTP, chat template and streaming, as users see them. Plain requests name no drafter
and are decoded in mlx-lm's own batches; the others are drafted for together.
"""

import http.client
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from dspine_mlx.errors import InputError
from dspine_mlx.measure.clock import LEAST_TOKENS
from dspine_mlx.measure.compare import PLAIN, verify_length
from dspine_mlx.measure.prompts import Messages
from dspine_mlx.server.connections import LISTENING
from dspine_mlx.server.options import Options

POLL = 0.1  # seconds between two checks of a server that is loading


class ServerFailed(RuntimeError):
    """The server ended or answered with an error."""


@dataclass(frozen=True)
class Request:
    """Settings that all requests share."""

    port: int
    max_tokens: int
    temperature: float


@dataclass(frozen=True)
class Reply:
    first_text: float  # seconds from request to the first text of the stream
    seconds: float  # to its end
    tokens: int
    path: str  # how the server decoded the request: speculative, batched or plain


@dataclass(frozen=True)
class Batch:
    """Requests that were sent together."""

    seconds: float  # until the last one ended
    replies: list[Reply]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all requests together, prefill included."""
        return sum(reply.tokens for reply in self.replies) / self.seconds

    @property
    def long_enough(self) -> bool:
        """Whether its replies are, on average, long enough for a ratio of speeds."""
        return sum(reply.tokens for reply in self.replies) >= LEAST_TOKENS * len(self.replies)


@dataclass
class ServerComparison:
    """Batches by mode; the modes take turns."""

    modes: list[str]
    runs: dict[str, list[Batch]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)  # mode -> reason

    @contextmanager
    def surviving(self, mode: str) -> Iterator[None]:
        """Drop a mode that the server fails at; without plain there is nothing to compare."""
        try:
            yield
        except ServerFailed as error:
            if mode == PLAIN:
                raise
            self.dropped[mode] = str(error)
            self.modes.remove(mode)
            del self.runs[mode]

    def summary(self, mode: str) -> dict[str, Any]:
        """Summarise a mode: medians, and speed-up over the plain batch of the same turn."""
        batches, plain = self.runs[mode], self.runs[PLAIN]
        pairs = zip(batches, plain, strict=False)
        ratios = sorted(
            a.tokens_per_second / b.tokens_per_second
            for a, b in pairs
            if a.long_enough and b.long_enough
        )
        first = [reply.first_text for batch in batches for reply in batch.replies]
        return {
            "way": mode,
            "tokens_per_second": median(batch.tokens_per_second for batch in batches),
            "speedup": median(ratios) if ratios else None,
            "speedup_range": [ratios[0], ratios[-1]] if ratios else None,
            "texts": sum(len(batch.replies) for batch in batches),
            "texts_in_ratios": sum(len(c.replies) for c in batches if c.long_enough),
            "first_text_seconds": median(first),
            "last_first_text_seconds": median(
                max(reply.first_text for reply in batch.replies) for batch in batches
            ),
            "slowest_seconds": median(
                max(reply.seconds for reply in batch.replies) for batch in batches
            ),
            "verdict": verdict(ratios),
            "paths": dict(Counter(reply.path for batch in batches for reply in batch.replies)),
        }


def verdict(ratios: list[float]) -> str:
    """Whether drafting pays under this load, by speed-ups over mlx-lm's batches in ascending order:
    it does if each of them says so."""
    if not ratios:
        return "the texts are too short to tell"
    times = f"{median(ratios):.2f} times the tokens per second of mlx-lm's batches"
    if ratios[0] > 1:
        return f"drafting pays: {times}"
    return f"drafting loses: {times}" if ratios[-1] < 1 else f"no difference can be told: {times}"


def check_mode(mode: str) -> None:
    if verify_length(mode) is None and mode != PLAIN:
        raise InputError(
            f"the server has no {mode}; with --concurrency compare plain, auto, fixed:N"
        )


def compare_modes(
    asked: Request, modes: list[str], prompts: list[Messages], requests: int, repeat: int
) -> Iterator[ServerComparison]:
    """Send batches of so many requests, the modes interleaved (A B A B ...) after a warm-up of
    each. Yields the comparison so far after each turn."""
    result = ServerComparison(list(dict.fromkeys([PLAIN, *modes])))
    result.runs = {mode: [] for mode in result.modes}
    together = list(islice(cycle(prompts), requests))
    for mode in list(result.modes):
        with result.surviving(mode):
            run_batch(asked, mode, together)
    for _ in range(repeat):
        for mode in list(result.modes):
            with result.surviving(mode):
                result.runs[mode].append(run_batch(asked, mode, together))
        yield result


def run_batch(asked: Request, mode: str, prompts: list[Messages]) -> Batch:
    """Send all prompts at once."""
    with ThreadPoolExecutor(len(prompts)) as clients:
        start = time.perf_counter()
        replies = list(clients.map(partial(ask, asked, mode), prompts))
        return Batch(time.perf_counter() - start, replies)


def ask(asked: Request, mode: str, messages: Messages) -> Reply:
    body: dict[str, Any] = {
        "messages": messages,
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    length = verify_length(mode)
    body |= {"draft_model": None} if length is None else {"verify_length": length}
    start, first = time.perf_counter(), None
    connection = http.client.HTTPConnection("127.0.0.1", asked.port)
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    response = connection.getresponse()
    if response.status != 200:
        raise ServerFailed(f"the server answered {response.status}: {response.read().decode()}")
    usage: dict[str, Any] = {}
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise ServerFailed(f"the server gave a request up: {event['error']}")
        first = first or time.perf_counter()
        usage = event.get("usage") or usage
    connection.close()
    if first is None or not usage:
        raise ServerFailed("the server ended a reply early")
    seconds = time.perf_counter() - start
    return Reply(first - start, seconds, usage["completion_tokens"], usage["dspine"]["path"])


@contextmanager
def serving(
    model: str, draft_model: str | None, requests: int, kernels: str = "auto"
) -> Iterator[int]:
    """Run a server that decodes up to so many requests and keeps no prompts; yields its port.

    kernels: the server's --kernels.
    """
    command = [sys.executable, "-m", "dspine_mlx.server", "--model", model, "--port", "0"]
    command += ["--decode-concurrency", str(requests)]
    room = 2 * (requests + 1)  # half of all connections may come from one address; one asks /health
    command += ["--max-connections", str(max(room, Options.max_connections))]
    command += ["--prompt-cache-size", "0", "--log-level", "ERROR"]
    command += ["--kernels", kernels]
    command += [] if draft_model is None else ["--draft-model", draft_model]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield port_when_loaded(process, log)
        finally:
            process.terminate()
            process.wait()


def port_when_loaded(process: subprocess.Popen, log: Path) -> int:
    """Wait until the server has said which port it got, and has loaded its models."""
    while True:
        ended = process.poll() is not None  # before its last words are read
        text = log.read_text(encoding="utf-8", errors="replace")
        said = re.search(rf"^{LISTENING} (\d+)$", text, re.MULTILINE)
        if said and loaded(int(said[1])):
            return int(said[1])
        if ended:
            last = text.strip().splitlines()[-1:]
            raise ServerFailed(f"the server did not start: {' '.join(last)}")
        time.sleep(POLL)


def loaded(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/health")
        return bool(json.load(connection.getresponse())["loaded"])
    except OSError:
        return False
    finally:
        connection.close()

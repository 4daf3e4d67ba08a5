"""Load on `dspine-mlx serve`: mixed requests from several clients, some of which hang up.

    python -m tests.bench.server_load [--clients 8] [--requests 50] [--disconnect 0.2]

Every whole reply is compared with the one the idle server gave. Prints one JSON object: replies,
hang-ups, wrong replies, requests per second by path, resident memory before and after, threads
before and after, and how long a SIGTERM under load took. Exit status 1 if something is wrong.
"""

import argparse
import json
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.serving import Server, scripted_pair, start, wait_until_up

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "n": {"type": "boolean"}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "unicode": (COMPLETIONS, {"prompt": "@unicode", "max_tokens": 20}),
    "long": (COMPLETIONS, {"prompt": "@long", "max_tokens": 120}),
    "plain": (COMPLETIONS, {"prompt": "@long", "max_tokens": 60, "draft_model": None}),
    "seeded": (COMPLETIONS, {"prompt": "@one", "max_tokens": 30, "seed": 3, "temperature": 1.5}),
    "stop": (COMPLETIONS, {"prompt": "Go @one", "max_tokens": 30, "stop": "@three"}),
    "chat": (CHAT, HELLO | {"max_tokens": 12, "logprobs": True}),
    "tools": (CHAT, HELLO | {"tools": [{"type": "function", "function": {"name": "get_weather"}}]}),
    "schema": (CHAT, HELLO | {"max_tokens": 60, "response_format": FORMAT}),
    "stream": (COMPLETIONS, {"prompt": "@long", "max_tokens": 90, "stream": True}),
    "chat stream": (CHAT, HELLO | {"max_tokens": 12, "stream": True}),
}


def text_of(reply: Any) -> Any:
    """What a reply says, whatever path it took: content, finish reason, logprob tokens."""
    choices = [c for part in reply.events or [reply.body] for c in part["choices"]]
    text, reason = "", None
    for choice in choices:
        message = choice.get("message") or choice.get("delta") or choice
        text += (message.get("reasoning") or "") + (
            message.get("content") or message.get("text") or ""
        )
        text += "".join(call["function"]["arguments"] for call in message.get("tool_calls", []))
        reason = choice["finish_reason"] or reason
    return text, reason


@dataclass
class Load:
    """Clients that send requests one after another and hang up on some of them."""

    server: Server
    expected: dict[str, Any]
    disconnect: float
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, clients: int, requests: int) -> None:
        threads = [
            threading.Thread(target=self.client, args=(seed, requests), daemon=True)
            for seed in range(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        self.wrong += ["a client is stuck" for thread in threads if thread.is_alive()]

    def client(self, seed: int, requests: int) -> None:
        rng = random.Random(seed)
        for _ in range(requests):
            kind = rng.choice(list(KINDS))
            if rng.random() < self.disconnect:
                self.hang_up(kind, rng.choice((0, 1, 300)))
            else:
                self.ask(kind)

    def ask(self, kind: str) -> None:
        path, body = KINDS[kind]
        try:
            reply = self.server.request(path, body)
        except OSError as error:
            return self.note("wrong", f"{kind}: {error}")
        if reply.status != 200:
            return self.note("wrong", f"{kind}: {reply}")
        if text_of(reply) != self.expected[kind]:
            return self.note("wrong", f"{kind}: {text_of(reply)} is not {self.expected[kind]}")
        if reply.events:
            return self.note("streams")
        return self.note(reply.body["usage"]["dspine"]["path"])

    def hang_up(self, kind: str, after: int) -> None:
        """Close the connection after so many bytes of the reply."""
        path, body = KINDS[kind]
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        address = ("127.0.0.1", self.server.port)
        with suppress(OSError), socket.create_connection(address, timeout=60) as connection:
            connection.sendall(head.encode() + raw)
            if after:
                connection.recv(after)
        self.note("hang-ups")

    def note(self, what: str, problem: str | None = None) -> None:
        with self.lock:
            self.done[what] += 1
            if problem is not None:
                self.wrong.append(problem)


def expected_replies(server: Server) -> dict[str, Any]:
    return {kind: text_of(server.request(path, body)) for kind, (path, body) in KINDS.items()}


def status_of(server: Server) -> dict[str, int]:
    """Resident kilobytes and threads of the server's process (Linux)."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {"memory_kb": int(fields["VmRSS"].split()[0]), "threads": int(fields["Threads"])}


def settled(server: Server, seconds: float = 10) -> dict[str, int]:
    """Status once no request is left. Each look is a request with a thread of its own, so the
    fewest threads of several looks count."""
    deadline = time.monotonic() + seconds
    while server.request("/health").body["requests"] and time.monotonic() < deadline:
        time.sleep(0.05)
    looks = []
    for _ in range(20):
        looks.append(status_of(server))
        time.sleep(0.02)
    return looks[-1] | {"threads": min(look["threads"] for look in looks)}


def terminate_under_load(server: Server, expected: dict[str, Any]) -> tuple[float, int]:
    """Seconds from SIGTERM to the end of the process, and its exit status."""
    load = Load(server, expected, disconnect=0.2)
    threads = [threading.Thread(target=load.client, args=(s, 200), daemon=True) for s in range(4)]
    for thread in threads:
        thread.start()
    while not server.request("/health").body["requests"]:
        pass
    start_time = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    status = server.process.wait(30)
    return time.monotonic() - start_time, status


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--clients", type=int, default=8)
    flags.add_argument("--requests", type=int, default=50)
    flags.add_argument("--disconnect", type=float, default=0.2)
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target, drafter = scripted_pair(folder / "pair")
        server = wait_until_up(
            start(
                "dspine_mlx.server", folder, "--model", str(target), "--draft-model", str(drafter)
            )
        )
        expected = expected_replies(server)
        Load(server, expected, args.disconnect).run(args.clients, args.requests)  # warm up
        before, begin = settled(server), time.monotonic()
        load = Load(server, expected, args.disconnect)
        load.run(args.clients, args.requests)
        seconds, after = time.monotonic() - begin, settled(server)
        ended, status = terminate_under_load(server, expected)
    result = {
        "requests": sum(load.done.values()),
        "seconds": round(seconds, 1),
        "done": load.done,
        "wrong": load.wrong[:5],
        "before": before,
        "after": after,
        "sigterm_seconds": round(ended, 2),
        "exit_status": status,
    }
    print(json.dumps(result))
    grown = after["memory_kb"] > 1.05 * before["memory_kb"] or after["threads"] > before["threads"]
    return int(bool(load.wrong) or grown or status != 0)


if __name__ == "__main__":
    sys.exit(main())

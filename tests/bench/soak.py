"""Soak test of `dspine-mlx serve`: everything at once, against one process.

    python -m tests.bench.soak --minutes 10 [--seed 7] [--clients 4] [--requests 2000]
    python -m tests.bench.soak --minutes 60 --clients 16 --requests 400     # batches of many texts

Serves the pair that ships and mixes paths (alone, batched, plain; whole or streamed), seeds,
samplers, stop strings, drafters, models that are loaded and left again, clients that hang up,
hostile requests and a prompt cache with little room. Every reply is compared with plain decoding
by mlx-lm in this process. Prints one JSON object: seed, counts (shared: replies whose steps were
those of two texts or more on average), what was wrong, memory, threads and descriptors before and
after. Exit status 1 if a reply is wrong or something has grown.
"""

import argparse
import json
import os
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from dspine_mlx.load import DEMO
from tests.bench.hostile import hostile
from tests.bench.server_load import settled, text_of
from tests.support.serving import Server, start, wait_until_up

CHAT = "/v1/chat/completions"
LONGEST = 24  # tokens of a reply
ROUND = 20  # requests, or four per client, whose references are made before they are sent
PATIENCE = 600.0  # seconds to wait for a reply: the machine may be busy
NAMES = ("Tom", "Maria", "Ada", "Lin", "Omar", "Eva")
THINGS = ("apples", "toys", "books", "stamps", "coins", "shells")
STEPS = (
    "buys {} more",
    "gives {} to a friend",
    "loses {} on the way home",
    "finds {} under the bed, and her sister brings as many again",
)
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"draft_model": None},
    {"verify_length": 1},
    {"verify_length": 7},
    {"verify_length": "auto"},
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.05},
)
Messages = list[dict[str, str]]


class Reference:
    """Plain decoding by mlx-lm: its tokens, kept by request, and whether they end the text."""

    def __init__(self, target: Path):
        self.model, self.tokenizer = mlx_lm.load(str(target))
        self.known: dict[str, list[int]] = {}
        self.ended: dict[str, bool] = {}

    def add(self, body: dict[str, Any]) -> None:
        key = self.key(body)
        if key in self.known:
            return
        prompt = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        names = ("top_p", "top_k", "min_p")
        sampler = make_sampler(
            body.get("temperature", 0.0), **{n: body[n] for n in names if n in body}
        )
        bias = {int(k): v for k, v in body.get("logit_bias", {}).items()} or None
        processors = make_logits_processors(bias, body.get("repetition_penalty"))
        if "seed" in body:
            mx.random.seed(body["seed"])
        tokens, ended = [], False
        for response in mlx_lm.stream_generate(
            self.model,
            self.tokenizer,
            prompt,
            max_tokens=LONGEST,
            sampler=sampler,
            logits_processors=processors,
        ):
            ended = response.finish_reason == "stop"
            tokens += [] if ended else [response.token]
        self.known[key], self.ended[key] = tokens, ended

    @staticmethod
    def key(body: dict[str, Any]) -> str:
        names = ("messages", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias")
        return json.dumps([body.get(n) for n in (*names, "repetition_penalty")])

    def reply(self, body: dict[str, Any]) -> tuple[str, str]:
        """Text and finish reason."""
        tokens, most = self.known[self.key(body)], body["max_tokens"]
        detokenizer = self.tokenizer.detokenizer
        for token in tokens[:most]:
            detokenizer.add_token(token)
        detokenizer.finalize()
        text, reason = detokenizer.text, "length"
        if self.ended[self.key(body)] and most > len(tokens):
            reason = "stop"
        stops = body.get("stop", [])
        places = [text.find(word) for word in stops if word in text]
        return (text[: min(places)], "stop") if places else (text, reason)


@dataclass
class Draw:
    """Requests, drawn from a seed."""

    rng: random.Random
    others: dict[str, list[str]]  # models and drafters that a request may name
    reference: Reference
    count: int = 0

    def question(self) -> str:
        rng, name = self.rng, self.rng.choice(NAMES)
        steps = ", then ".join(s.format(rng.randint(2, 9)) for s in rng.sample(STEPS, 2))
        return (
            f"{name} has {rng.randint(3, 30)} {rng.choice(THINGS)}. {name} {steps}. "
            "How many are there in the end?"
        )

    def messages(self) -> Messages:
        first = self.rng.choice(self.questions)
        messages = [{"role": "user", "content": first}]
        if self.rng.random() < 0.3:
            self.reference.add({"messages": messages})
            said, _ = self.reference.reply({"messages": messages, "max_tokens": LONGEST})
            messages += [{"role": "assistant", "content": said}]
            messages += [{"role": "user", "content": "And twice as many?"}]
        return messages

    def __post_init__(self) -> None:
        self.questions = [self.question() for _ in range(12)]

    def request(self) -> dict[str, Any]:
        rng = self.rng
        self.count += 1
        body: dict[str, Any] = {"messages": self.messages(), "max_tokens": rng.randint(1, LONGEST)}
        body |= rng.choice(WAYS) | {"stream": rng.random() < 0.4}
        kind = rng.random()
        if kind < 0.25:
            body |= {"seed": rng.randint(0, 3)} | rng.choice(SAMPLING)
        elif kind < 0.35:
            body |= {"logit_bias": {str(rng.randint(10, 2000)): rng.choice([-100, 4.5])}}
        elif kind < 0.42:  # mlx_lm's penalties ignore cached tokens: a text without a known prefix
            text = f"{self.count} {self.question()}"
            body |= {"messages": [{"role": "user", "content": text}], "repetition_penalty": 1.2}
        self.reference.add(body)
        if rng.random() < 0.3:
            text, _ = self.reference.reply(body | {"max_tokens": LONGEST})
            text = text or "x"
            at = [rng.randrange(len(text)) for _ in range(2)]
            body["stop"] = [text[i : i + rng.randint(1, 6)] for i in at]
        for name, choices in self.others.items():
            if rng.random() < 0.03:
                body[name] = rng.choice(choices)
        return body


@dataclass
class Soak:
    server: Server
    reference: Reference
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, problem: str | None = None) -> None:
        with self.lock:
            self.done[what] += 1
            if problem is not None:
                self.wrong.append(problem)

    def ask(self, body: dict[str, Any]) -> None:
        try:
            reply = self.server.request(CHAT, body)
        except OSError as error:
            return self.note("compared", f"{body}: {error}")
        if reply.status != 200:
            return self.note("compared", f"{body}: {reply}")
        if text_of(reply) != self.reference.reply(body):
            return self.note(
                "compared", f"{body}: {text_of(reply)} is not {self.reference.reply(body)}"
            )
        if not reply.events:
            told = reply.body["usage"]["dspine"]
            self.note(told["path"])
            if (told["texts_per_step"] or 1) >= 2:
                self.note("shared")
        return self.note("compared")

    def hang_up(self, body: dict[str, Any], after: int) -> None:
        raw = json.dumps(body | {"stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
        address = ("127.0.0.1", self.server.port)
        with suppress(OSError), socket.create_connection(address, 60) as connection:
            connection.sendall(head + raw)
            if after:
                connection.recv(after)
        self.note("hang-ups")

    def attack(self, content: bytes, half_close: bool) -> None:
        """Any answer but a 5xx will do; bytes that aren't HTTP may close the connection."""
        try:
            answer = self.server.raw(content, half_close=half_close)
        except OSError:
            answer = b""
        status = answer.split(b" ", 2)[1:2]
        bad = bool(status) and status[0][:1] == b"5" and status[0] != b"501"
        self.note("hostile", f"{content[:300]!r}: {answer[:300]!r}" if bad else None)

    def concurrently(self, jobs: list[Any], clients: int) -> None:
        """Each client takes the next job until none is left."""
        left = iter(jobs)

        def client() -> None:
            while True:
                with self.lock:
                    job = next(left, None)
                if job is None:
                    return
                job()

        threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        if any(thread.is_alive() for thread in threads):
            self.wrong.append("a client is stuck")

    def round(self, draw: Draw, size: int, clients: int) -> None:
        jobs: list[Any] = []
        for _ in range(size):
            kind = draw.rng.random()
            if kind < 0.12:
                jobs.append(partial(self.attack, *hostile(draw.rng)))
            elif kind < 0.2:
                jobs.append(partial(self.hang_up, draw.request(), draw.rng.choice((0, 1, 400))))
            else:
                jobs.append(partial(self.ask, draw.request()))
        self.concurrently(jobs, clients)


def state_of(server: Server) -> dict[str, int]:
    status = settled(server)
    return status | {"descriptors": len(os.listdir(f"/proc/{server.process.pid}/fd"))}


def soak(folder: Path, seed: int, seconds: float, requests: int, clients: int) -> dict[str, Any]:
    target, drafter = DEMO / "target", DEMO / "drafter"
    others = {
        "model": [str(shutil.copytree(target, folder / "other target"))],
        "draft_model": [str(shutil.copytree(drafter, folder / "other drafter"))],
    }
    rng = random.Random(seed)
    room = rng.choice(["2MB", "20MB", "200MB"])
    flags = ["--model", str(target), "--draft-model", str(drafter), "--no-profile"]
    flags += ["--prompt-cache-bytes", room, "--prompt-cache-size", "6", "--log-level", "WARNING"]
    server = start("dspine_mlx.server", folder, *flags)
    server.patience = PATIENCE
    try:
        reference = Reference(target)
        wait_until_up(server, PATIENCE)
        draw, work = Draw(rng, others, reference), Soak(server, reference)
        size = max(ROUND, 4 * clients)
        work.round(draw, min(size, requests), clients)  # warm up: caches, pools, other models
        before, end = state_of(server), time.monotonic() + seconds
        while time.monotonic() < end and sum_of(work) < requests and not work.wrong:
            work.round(draw, min(size, requests - sum_of(work)), clients)
        after = state_of(server)
        server.process.terminate()
        status = server.process.wait(120)
    finally:
        server.process.kill()
        server.process.wait(30)
    return {
        "seed": seed,
        "prompt_cache": room,
        "requests": sum_of(work),
        "done": work.done,
        "wrong": work.wrong[:5],
        "before": before,
        "after": after,
        "exit_status": status,
    }


def sum_of(work: Soak) -> int:
    return sum(work.done[kind] for kind in ("compared", "hang-ups", "hostile"))


def grown(result: dict[str, Any]) -> list[str]:
    """What has grown by more than a new thread pool takes."""
    before, after = result["before"], result["after"]
    limits = {name: before[name] for name in ("threads", "descriptors")}
    limits["memory_kb"] = round(1.1 * before["memory_kb"]) + (64 << 10)
    return [name for name, limit in limits.items() if after[name] > limit]


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--minutes", type=float, default=1.0)
    flags.add_argument("--requests", type=int, default=1 << 30, help="end after so many")
    flags.add_argument("--clients", type=int, default=4)
    flags.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = soak(Path(name), args.seed, args.minutes * 60, args.requests, args.clients)
    print(json.dumps(result))
    return int(bool(result["wrong"] or grown(result)) or result["exit_status"] != 0)


if __name__ == "__main__":
    sys.exit(main())

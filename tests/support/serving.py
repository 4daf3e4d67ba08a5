"""Servers in processes of their own, clients on loopback, and a pair whose replies are scripted."""

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors.numpy import save_file

from dspine_mlx.load import DEMO
from tests.support.checkpoints import offsets
from tests.support.forked import Forked

ALL = ("--verify-length", "16")  # drafting in every round, whether or not it pays here
H, RANK = 64, 64
TOOL_CALL = '{"name":"get_weather","arguments":{"city":"Paris"}}'
UNICODE = "é😀你"
REPLIES = {  # what comes after a prompt's last token, as token texts
    "\n": ["<think>", "hm", "</think>", "<tool_call>", TOOL_CALL, "</tool_call>", "<|im_end|>"],
    "@unicode": [*UNICODE, "<|im_end|>"],
    "@long": ["@one", "@two", "@three", "@one"],  # for ever
}
ADDED = [
    "hm",
    "<tool_call>",
    TOOL_CALL,
    "</tool_call>",
    "@unicode",
    "@long",
    "@one",
    "@two",
    "@three",
]
TEMPLATE = (
    "{# <tool_call> tool_call.name #}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def scripted_pair(folder: Path) -> tuple[Path, Path]:
    """A qwen3 target whose next token depends on the current one only, as REPLIES say, and a DSpark
    drafter whose Markov head knows it: folders."""
    target, drafter = folder / "target", folder / "drafter"
    successor, vocabulary = script(target)
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(vocabulary, H)).astype(np.float32)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    head = 0.02 * rng.normal(size=(vocabulary, H)).astype(np.float32)
    for token, following in successor.items():
        head[following] += 1.5 * embedding[token]
    write(target, qwen3_config(vocabulary), qwen3_weights(embedding, head, rng))
    known = np.array(sorted(set(successor.values())), np.uint32)
    config = drafter_config(vocabulary, len(known))
    write(drafter, config, markov_weights(config, embedding, known, successor))
    return target, drafter


def script(target: Path) -> tuple[dict[int, int], int]:
    """Writes the tokenizer; the successor of every scripted token, and the vocabulary's size."""
    from tokenizers import Tokenizer

    target.mkdir(parents=True)
    tokenizer = json.loads((DEMO / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    size = 2048 + len(ADDED)
    for i, text in enumerate(ADDED, 2048):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": i, "content": text} | flags)
    (target / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = json.loads((DEMO / "target" / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = TEMPLATE
    (target / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    encoder = Tokenizer.from_file(str(target / "tokenizer.json"))
    successor: dict[int, int] = {}
    for start, reply in REPLIES.items():
        ids = [i for text in (start, *reply) for i in encoder.encode(text).ids]
        for token, following in zip(ids, ids[1:], strict=False):
            assert successor.setdefault(token, following) == following, (start, token)
    return successor, size


def qwen3_config(vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": H,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }


def qwen3_weights(
    embedding: np.ndarray, head: np.ndarray, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    weights["model.norm.weight"] = np.ones(H, np.float32)
    for i in range(2):
        weights |= layer(f"model.layers.{i}.", 64, heads=2, kv=1, head_dim=32, rng=rng)
    return weights


def layer(
    at: str, inner: int, heads: int, kv: int, head_dim: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """A layer that attends, but adds nothing to the residual stream."""
    shapes = {
        "self_attn.q_proj": (heads * head_dim, H),
        "self_attn.k_proj": (kv * head_dim, H),
        "self_attn.v_proj": (kv * head_dim, H),
        "mlp.gate_proj": (inner, H),
        "mlp.up_proj": (inner, H),
    }
    weights = {name: rng.normal(size=shape) / 8 for name, shape in shapes.items()}
    weights |= {
        "self_attn.o_proj": np.zeros((H, heads * head_dim)),
        "mlp.down_proj": np.zeros((H, inner)),
    }
    weights |= {f"self_attn.{n}_norm": np.ones(head_dim) for n in ("q", "k")}
    weights |= {f"{n}_layernorm": np.ones(H) for n in ("input", "post_attention")}
    return {f"{at}{name}.weight": value.astype(np.float32) for name, value in weights.items()}


def drafter_config(vocabulary: int, known: int) -> dict[str, Any]:
    return {
        "hidden_size": H,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": vocabulary,
        "draft_vocab_size": known,
        "block_size": 6,
        "mask_token_id": 3,
        "target_layer_ids": [0, 1],
        "rope_theta": 1e4,
        "markov_rank": RANK,
        "top_k": known,
    }


def markov_weights(
    config: dict[str, Any], embedding: np.ndarray, known: np.ndarray, successor: dict[int, int]
) -> dict[str, np.ndarray]:
    """Base logits of 0 for every known token; all knowledge sits in the Markov head."""
    after = np.zeros((len(known), RANK), np.float32)
    for token, following in successor.items():
        after[np.searchsorted(known, following)] += 12 * embedding[token]
    weights = {
        "fc.weight": np.zeros((H, 2 * H), np.float32),
        "hidden_norm.weight": np.ones(H, np.float32),
        "norm.weight": np.ones(H, np.float32),
        "lm_head.weight": np.zeros((len(known), H), np.float32),
        "d2t": offsets(known),
        "markov_head.markov_w1.weight": embedding,
        "markov_head.markov_w2.weight": after,
    }
    rng = np.random.default_rng(1)
    inner, head_dim = config["intermediate_size"], config["head_dim"]
    return weights | layer("layers.0.", inner, heads=2, kv=1, head_dim=head_dim, rng=rng)


def write(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors")


@dataclass
class Reply:
    status: int
    body: Any  # JSON, or text where it isn't
    events: list[Any]  # of a stream, without [DONE]


class Process(Forked):
    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Fresh(Process):
    """One that imports everything itself, under its own environment."""

    def __init__(self, argv: Sequence[str], env: dict[str, str], fds: Sequence[Path]):
        self.returncode = None
        with ExitStack() as stack:
            files = [
                stack.enter_context(path.open("wb" if number else "rb"))
                for number, path in enumerate(fds)
            ]
            self.process = subprocess.Popen(
                [sys.executable, *argv],
                env=env | {"MLX_DISABLE_COMPILE": "1"},
                stdin=files[0],
                stdout=files[1],
                stderr=files[2],
            )
        self.pid = self.process.pid

    def poll(self) -> int | None:
        self.returncode = self.process.poll()
        return self.returncode


@dataclass
class Server:
    process: Process
    port: int
    log: Path
    lock: IO[str] | None = None  # of the port
    patience: float = 60.0  # seconds that a reply may take

    def request(
        self, path: str, body: Any = None, *, method: str | None = None, **headers: str
    ) -> Reply:
        raw = (
            body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        )
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience)
        connection.request(method or ("GET" if raw is None else "POST"), path, raw, headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        if response.getheader("Content-type") == "text/event-stream":
            lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            return Reply(response.status, text, [json.loads(x) for x in lines if x != "[DONE]"])
        try:
            return Reply(response.status, json.loads(text), [])
        except ValueError:
            return Reply(response.status, text, [])

    def raw(self, content: bytes, *, half_close: bool = False) -> bytes:
        """Whatever comes back for some bytes on a socket."""
        with socket.create_connection(("127.0.0.1", self.port), self.patience) as connection:
            connection.sendall(content)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            received = b""
            while chunk := connection.recv(1 << 16):
                received += chunk
            return received


def usage(server: Server, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """Of a short reply."""
    reply = server.request(path, {"prompt": "@long", "max_tokens": 12} | body)
    assert reply.status == 200, reply
    return reply.body["usage"]


def free_port() -> tuple[int, IO[str]]:
    """A port, and the lock that keeps other tests on this machine from it while the file is open.

    A port is free until its server has started, which takes seconds. Without a lock two servers
    were given the same one, and a test talked to the other's.
    """
    folder = Path(tempfile.gettempdir()) / f"dspine-mlx-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    while True:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            return port, lock


def start(module: str, folder: Path, *flags: str, kind: type[Process] = Process) -> Server:
    """`python -m module --port ... flags`, not yet listening."""
    folder.mkdir(parents=True, exist_ok=True)
    (port, lock), log = free_port(), folder / f"{module}.log"
    log.write_text("")
    null = Path(os.devnull)
    command = ["-m", module, "--port", str(port), *flags]
    return Server(kind(command, dict(os.environ), (null, null, log)), port, log, lock)


def wait_until_up(server: Server, seconds: float = 180) -> Server:
    """The server, once it answers; one that does not is ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            loaded = server.request("/health").body.get("loaded", True)
            if loaded and server.process.poll() is None:
                return server
        except OSError:
            pass
        time.sleep(0.05)
    server.process.kill()
    raise AssertionError(f"the server is not up: {server.log.read_text()}")


@contextmanager
def serving(
    module: str, folder: Path, *flags: str, kind: type[Process] = Process
) -> Iterator[Server]:
    server = start(module, folder, *flags, kind=kind)
    try:
        yield wait_until_up(server)
    finally:
        server.process.send_signal(signal.SIGINT)
        try:
            server.process.wait(20)
        except AssertionError:
            server.process.kill()
            raise

"""Ranks as processes on this machine: a group on 127.0.0.1, each wait with a deadline."""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dspine_mlx.load import DEMO
from tests.support.forked import Forked

DEADLINE = 240.0  # seconds, for processes that share two cores with others


@dataclass
class Ended:
    """A rank's exit status and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def said(self) -> list[str]:
        """Its sentences on standard error."""
        return [line for line in self.err.splitlines() if "dspine-mlx:" in line]


def free_ports(n: int) -> list[int]:
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def taken(port: int) -> bool:
    """Whether a process listens there."""
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


class Ranks:
    """n processes with the same arguments, or each with its own, that make a group.

    typed: rank 0's standard input. late: ranks, the last ones, that the test starts itself.
    """

    def __init__(
        self,
        arguments: Sequence[Sequence[str]],
        folder: Path,
        typed: Path | None = None,
        late: int = 0,
    ):
        self.typed = typed
        self.folder, hosts = folder, folder / "hosts.json"
        self.ports = free_ports(len(arguments))
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in self.ports]))
        self.env = {"HOME": str(folder)}
        if len(arguments) > 1:
            self.env["MLX_HOSTFILE"] = str(hosts)
        self.processes: list[Forked] = []
        self.out: list[TextIO] = []
        for rank, own in enumerate(arguments[: len(arguments) - late]):
            self.start(rank, own)

    def start(self, rank: int, arguments: Sequence[str]) -> None:
        """Start the next rank, with a pipe as its standard output."""
        own = {"MLX_RANK": str(rank)} if "MLX_HOSTFILE" in self.env else {}
        pipe = self.folder / f"out-{rank}"
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        self.err(rank).write_text("")
        typed = Path(os.devnull) if rank or self.typed is None else self.typed
        process = Forked(arguments, self.env | own, (typed, pipe, self.err(rank)))
        self.processes.append(process)
        self.out.append(pipe.open())

    def err(self, rank: int) -> Path:
        return self.folder / f"err-{rank}"

    def end(self, seconds: float = DEADLINE) -> list[Ended]:
        """Wait for all; whoever has not ended by then is killed, and the test fails."""
        deadline = time.monotonic() + seconds
        try:
            status = [p.wait(deadline - time.monotonic()) for p in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return [
            Ended(status[rank], "" if out.closed else out.read(), self.err(rank).read_text())
            for rank, out in enumerate(self.out)
        ]


def run_ranks(n: int, arguments: Sequence[str], folder: Path) -> list[Ended]:
    return Ranks([arguments] * n, folder).end()


def wait_until(holds: Callable[[], bool], seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def save_target(model: nn.Module, folder: Path, parts: int = 0, **config: Any) -> Path:
    """A model's folder, with the shipped tokenizer. parts: in so many files, with their index.
    config: more of its entries."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(vars(model.args) | config))
    weights = sorted(tree_flatten(model.parameters()))
    if parts:
        index: dict[str, str] = {}
        for i in range(parts):
            name = f"model-{i + 1:05}-of-{parts:05}.safetensors"
            mx.save_safetensors(str(folder / name), dict(weights[i::parts]))
            index |= {tensor: name for tensor, _ in weights[i::parts]}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DEMO / "target" / name).read_bytes())
    return folder

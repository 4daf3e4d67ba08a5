"""Energy per token, from macOS's `powermetrics`, which only root may run.

Its figures are Apple's estimates for the whole chip (CPU, GPU and ANE), other programs' work
included. They compare modes of decoding on one machine, not machines. (Parsing is tested with
sample output; it has not been run on a Mac.)
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, takewhile

COMMAND = ("powermetrics", "--samplers", "cpu_power,gpu_power", "-i", "200", "--buffer-size", "1")
SECONDS = 3.0  # a mode is repeated until it has run about this long
ELAPSED = re.compile(r"\((\d+(?:\.\d+)?)ms elapsed\)")
POWER = re.compile(r"^Combined Power \(CPU \+ GPU \+ ANE\): (\d+(?:\.\d+)?) mW", re.MULTILINE)


def on_mac() -> bool:
    return sys.platform == "darwin"


def is_root() -> bool:
    return os.geteuid() == 0


def mean_power(text: str) -> float | None:
    """Watts over all whole samples of powermetrics' text, weighted by their lengths; None without
    any."""
    samples = []
    for part in text.split("*** Sampled system activity")[1:]:
        elapsed, power = ELAPSED.search(part), POWER.search(part)
        if elapsed and power:
            samples.append((float(elapsed[1]), float(power[1])))
    total = sum(elapsed for elapsed, _ in samples)
    return sum(elapsed * power for elapsed, power in samples) / total / 1e3 if total else None


@dataclass
class Reading:
    watts: float | None = None


@contextmanager
def metered(command: Sequence[str] = COMMAND) -> Iterator[Reading]:
    """Mean power over the block, available after it exits."""
    reading = Reading()
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process,
        ThreadPoolExecutor(1) as reader,
    ):
        assert process.stdout is not None
        start = process.stdout.readline()  # it is up
        rest = reader.submit(process.stdout.read)
        try:
            yield reading
        finally:
            process.terminate()
            reading.watts = mean_power(start + rest.result())


def joules_per_token(
    run: Callable[[list[int]], int],
    prompts: list[list[int]],
    command: Sequence[str] = COMMAND,
    seconds: float = SECONDS,
) -> float | None:
    """Joules per generated token, prompts included; run decodes a prompt and counts its tokens."""
    with metered(command) as reading:
        started = time.perf_counter()
        left = takewhile(lambda _: time.perf_counter() - started < seconds, cycle(prompts))
        tokens = sum(run(prompt) for prompt in left)
        took = time.perf_counter() - started
    return None if reading.watts is None else reading.watts * took / tokens

"""Time and peak memory of the transfer space at the size of an 8B target, beside NumPy's plain way.

    python -m tests.bench.transfer_space [--vocab 151936 --size 4096 --rank 1024]

Each mode runs in a process of its own on the same random bfloat16 head. Memory is the peak resident
size beyond what the process holds once the head is there.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

from dspine_mlx.drafters.transfer_space import positive, transfer_codes


def chunked(head: mx.array, rank: int) -> np.ndarray:
    return np.array(transfer_codes(head, rank)[0])


def plain(head: mx.array, rank: int) -> np.ndarray:
    """The definition, on the whole matrix at once in float32."""
    rows = np.array(head.astype(mx.float32))
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    centred = rows - rows.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    codes = centred @ (positive(vectors[:, -rank:]) / np.sqrt(values[-rank:]))
    return codes / np.linalg.norm(codes, axis=1, keepdims=True)


def resident(line: str) -> int:
    """VmRSS or VmHWM (its peak) of this process, in bytes; Linux only."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{line}:")[1].split()[0]) * 1024


def measure(mode: str, vocab: int, size: int, rank: int) -> None:
    mx.random.seed(0)
    head = mx.random.normal((vocab, size), dtype=mx.bfloat16)
    head = head * mx.linspace(0.5, 2, size).astype(mx.bfloat16)  # no two eigenvalues alike
    mx.eval(head)
    mx.clear_cache()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making the head
    before, start, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    codes = {"chunked": chunked, "plain": plain}[mode](head, rank)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    beyond = (resident("VmHWM") - before) / 1e9
    figures = {"mode": mode, "seconds": round(seconds, 1)}
    figures |= {"cpu_seconds": round(cpu, 1), "beyond_head_gb": round(beyond, 2)}
    print(json.dumps(figures | {"sample": codes[::10007, ::97].round(8).tolist()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=1024)
    parser.add_argument("--mode", choices=["chunked", "plain"])
    args = parser.parse_args()
    if args.mode:
        return measure(args.mode, args.vocab, args.size, args.rank)
    samples = []
    for mode in ("chunked", "plain"):
        command = [sys.executable, "-m", "tests.bench.transfer_space", "--mode", mode]
        command += [f"--{k}={v}" for k, v in vars(args).items() if k != "mode"]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        result = json.loads(out.splitlines()[-1])
        samples.append(np.array(result.pop("sample")))
        print(json.dumps(result))
    print(f"largest difference of sampled entries: {np.abs(samples[0] - samples[1]).max():.1e}")
    return None


if __name__ == "__main__":
    main()

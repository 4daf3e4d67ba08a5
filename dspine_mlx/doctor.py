"""What this machine offers, what is on file, and what is known not to work."""

import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx
from huggingface_hub import CacheNotFound, scan_cache_dir

from dspine_mlx import costs
from dspine_mlx.errors import InputError
from dspine_mlx.generate import stream_generate
from dspine_mlx.load import load

OK, NOTE, PROBLEM = "ok", "note", "problem"
BANDWIDTH = {  # GB/s as Apple publishes them; the larger where a name has two
    "M1": 68, "M1 Pro": 200, "M1 Max": 400, "M1 Ultra": 800,
    "M2": 100, "M2 Pro": 200, "M2 Max": 400, "M2 Ultra": 800,
    "M3": 100, "M3 Pro": 150, "M3 Max": 400, "M3 Ultra": 819,
    "M4": 120, "M4 Pro": 273, "M4 Max": 546,
    "M5": 153,
}  # fmt: skip
EMULATES_BFLOAT16 = ("M1", "M2")


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, how it is, and what to do about it."""

    name: str
    status: str
    detail: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """All findings. Loads the pair that ships, to run its kernels."""
    yield Finding("system", OK, f"{platform.platform()}, Python {platform.python_version()}")
    yield from packages()
    yield from device()
    yield from pair()
    yield on_file()
    yield hub_cache()


def packages() -> Iterator[Finding]:
    for name in ("dspine-mlx", "mlx", "mlx-lm"):
        yield Finding(name, OK, version(name))
    for name, use in (("llguidance", "structured output"), ("matplotlib", "plots")):
        try:
            yield Finding(name, OK, version(name))
        except PackageNotFoundError:
            yield Finding(name, NOTE, f"not installed; {use} needs it", f"pip install {name}")


def device() -> Iterator[Finding]:
    if not mx.metal.is_available():
        advice = "" if sys.platform != "darwin" else "use a native arm64 Python on Apple Silicon"
        status = PROBLEM if sys.platform == "darwin" else NOTE
        yield Finding("Metal", status, "there is none; MLX runs on the CPU", advice)
        return
    info = mx.device_info()
    chip = str(info["device_name"]).removeprefix("Apple ")
    memory, working = (
        int(info[k]) / 2**30 for k in ("memory_size", "max_recommended_working_set_size")
    )
    speed = f", {BANDWIDTH[chip]} GB/s nominal" if chip in BANDWIDTH else ""
    yield Finding("chip", OK, f"{chip}, {memory:.0f} GiB{speed}")
    wired = subprocess.run(
        ["sysctl", "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True, check=False
    )
    limit = wired.stdout.strip() or "unknown"
    advice = "sudo sysctl iogpu.wired_limit_mb=N raises it, at the cost of other programs"
    yield Finding("GPU memory", OK, f"{working:.0f} GiB usable, wired limit {limit} MB", advice)
    if chip.split()[0] in EMULATES_BFLOAT16:
        yield Finding(
            "bfloat16",
            NOTE,
            f"the {chip} emulates it",
            "convert target and drafter with --dtype float16",
        )


def pair() -> Iterator[Finding]:
    """The shipped pair's round, and what the self-check of its kernels says."""
    try:
        model, tokenizer, drafter = load()
        text = stream_generate(model, tokenizer, [5, 6, 7], drafter, max_tokens=8, verify_length=4)
        tokens = [response.token for response in text]
    except (InputError, RuntimeError, ValueError) as error:
        yield Finding("shipped pair", PROBLEM, str(error), "reinstall dspine-mlx")
        return
    yield Finding("shipped pair", OK, f"generates ({len(tokens)} tokens)")
    if drafter is None or not drafter.kernels.active:
        yield Finding("kernels", NOTE, "off without Metal; plain MLX operations run")
        return
    for check in drafter.kernels.checks.values():
        status, advice = (OK, "") if check.runs else (NOTE, "plain MLX operations run instead")
        yield Finding(f"kernel {check.kernel}", status, f"{check.shapes}: {check.reason}", advice)


def on_file() -> Finding:
    files = sorted(costs.CACHE.glob("*.json")) if costs.CACHE.is_dir() else []
    detail = f"{len(files)} files of costs and calibrations in {costs.CACHE}"
    return Finding("on file", OK, detail, "delete a file to have it made again" if files else "")


def hub_cache() -> Finding:
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return Finding("Hub cache", OK, "empty")
    drafters = [
        repo.repo_id
        for repo in cache.repos
        if repo.repo_type == "model" and any(is_drafter(r.snapshot_path) for r in repo.revisions)
    ]
    detail = f"{len(cache.repos)} repositories, {cache.size_on_disk / 2**30:.1f} GiB"
    return Finding("Hub cache", OK, f"{detail}; drafters: {', '.join(sorted(drafters)) or 'none'}")


def is_drafter(folder: Path) -> bool:
    config = folder / "config.json"
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    return any(key in text for key in ("target_layer_ids", "aux_hidden_state_layer_ids"))

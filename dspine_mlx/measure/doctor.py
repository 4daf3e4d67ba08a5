"""Check this machine, the files in its caches, and known incompatibilities."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import mlx.core as mx
from huggingface_hub import CacheNotFound, scan_cache_dir

from dspine_mlx.batch.costs import BatchCurve
from dspine_mlx.batch.on_file import batch_costs_on_file
from dspine_mlx.errors import InputError
from dspine_mlx.generate import stream_generate
from dspine_mlx.group.channel import HEAD, ROOM
from dspine_mlx.load import load
from dspine_mlx.measure.kernels_on_file import (
    check_in_words,
    checks_on_file,
    races_on_file,
    shapes_in_words,
)
from dspine_mlx.server.compatibility import check_host
from dspine_mlx.target.products import STOCK
from dspine_mlx.verify_length import store
from dspine_mlx.verify_length.calibration import Calibration
from dspine_mlx.verify_length.costs import Curve
from dspine_mlx.verify_length.on_file import calibrations_on_file, costs_on_file
from dspine_mlx.verify_length.store import load_calibrations

OK, NOTE, PROBLEM = "ok", "note", "problem"
BACKENDS = ("jaccl", "ring", "mpi", "nccl")  # of mlx.distributed
ROUND_TRIPS = 50
BANDWIDTH = {  # GB/s as Apple publishes them; the larger where a name has two
    "M1": 68, "M1 Pro": 200, "M1 Max": 400, "M1 Ultra": 800,
    "M2": 100, "M2 Pro": 200, "M2 Max": 400, "M2 Ultra": 800,
    "M3": 100, "M3 Pro": 150, "M3 Max": 400, "M3 Ultra": 819,
    "M4": 120, "M4 Pro": 273, "M4 Max": 546,
    "M5": 153,
}  # fmt: skip
OLD = ("M1", "M2")  # emulate bfloat16; MLX's kernel for several quantised rows needs an M3
PEERS = {
    "dflash-mlx": "patches classes of mlx-lm",
    "mlx-dspark": "patches transformers when imported",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was checked, its state, and advice.

    private: the detail may hold the user's names or paths.
    """

    name: str
    status: str
    detail: str
    advice: str = ""
    private: bool = False


def examine() -> Iterator[Finding]:
    """Yield all findings. Loads the pair that ships, to run its kernels."""
    system = f"{platform.platform()}, Python {platform.python_version()}"
    yield Finding("system", OK, system, private=True)
    yield from packages()
    yield from incompatibilities()
    yield from device()
    yield from group()
    yield from pair()
    yield from verify_rows()
    yield from on_file()
    yield hub_cache()


def packages() -> Iterator[Finding]:
    for name in ("dspine-mlx", "mlx", "mlx-lm"):
        yield Finding(name, OK, version(name))
    for name, use in (("llguidance", "structured output"), ("matplotlib", "plots")):
        installed = installed_version(name)
        if installed is None:
            yield Finding(name, NOTE, f"not installed; needed for {use}", f"pip install {name}")
        else:
            yield Finding(name, OK, installed)


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def incompatibilities() -> Iterator[Finding]:
    """Known incompatibilities."""
    for backend in ("mlx-metal", "mlx-cpu"):
        found = installed_version(backend)
        if found not in (None, version("mlx")):
            detail = f"{found}, but mlx is {version('mlx')}; the two must be equal"
            yield Finding(backend, PROBLEM, detail, f"pip install {backend}=={version('mlx')}")
    try:
        check_host()
        yield Finding("serving", OK, f"mlx-lm {version('mlx-lm')} has the parts that serve needs")
    except InputError as error:
        yield Finding("serving", NOTE, str(error), "for dspine-mlx serve, install such an mlx-lm")
    for name, what in PEERS.items():
        if installed_version(name) is not None:
            advice = "don't import it in a program that uses dspine-mlx"
            yield Finding(name, NOTE, f"is installed here too, and {what}", advice)


def device() -> Iterator[Finding]:
    if not mx.metal.is_available():
        advice = "" if sys.platform != "darwin" else "use a native arm64 Python on Apple Silicon"
        status = PROBLEM if sys.platform == "darwin" else NOTE
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        yield Finding("machine", OK, f"{store.device_name()}, {memory:.0f} GiB")
        yield Finding("Metal", status, "there is none; MLX runs on the CPU", advice)
        return
    info = mx.device_info()
    chip = str(info["device_name"]).removeprefix("Apple ")
    memory, working = (
        int(info[k]) / 2**30 for k in ("memory_size", "max_recommended_working_set_size")
    )
    speed = f"{BANDWIDTH[chip]} GB/s nominal" if chip in BANDWIDTH else "bandwidth not known here"
    yield Finding("chip", OK, f"{chip}, {memory:.0f} GiB, {speed}")
    wired = subprocess.run(
        ["sysctl", "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True, check=False
    )
    limit = wired.stdout.strip() or "unknown"
    limit = "macOS's own" if limit == "0" else f"{limit} MB"
    advice = "sudo sysctl iogpu.wired_limit_mb=N raises it, at the cost of other programs"
    yield Finding("GPU memory", OK, f"{working:.0f} GiB usable, wired limit {limit}", advice)
    yield from limits_of(chip)


def group() -> Iterator[Finding]:
    """The machines that mlx.launch has started this on, or what could connect some."""
    ranks = mx.distributed.init()
    backends = [b for b in BACKENDS if mx.distributed.is_available(b)]
    if ranks.size() < 2:
        able = ", ".join(backends) or "none"
        yield Finding("group", OK, f"one process; backends for several machines: {able}")
        return
    seconds = [round_trip(ranks) for _ in range(ROUND_TRIPS)]
    detail = (
        f"{ranks.size()} ranks on {' or '.join(backends)}; a message to all takes "
        f"{1e6 * median(seconds):.0f} us (median of {ROUND_TRIPS})"
    )
    yield Finding("group", OK, detail, "its network has no authentication: keep it private")


def round_trip(ranks: mx.distributed.Group) -> float:
    """Seconds of one message, as before each forward."""
    message = mx.zeros((HEAD + ROOM,), mx.int32)
    begun = time.perf_counter()
    mx.eval(mx.distributed.all_sum(message, group=ranks))
    return time.perf_counter() - begun


def limits_of(chip: str) -> Iterator[Finding]:
    generation = chip.split()[0]
    if generation in OLD:
        advice = "convert target and drafter with --dtype float16"
        yield Finding("bfloat16", NOTE, f"the {chip} emulates it", advice)
    system = tuple(int(part) for part in platform.mac_ver()[0].split(".") if part)
    if generation == "M5" and system and system < (26, 2):
        detail = f"macOS {platform.mac_ver()[0]} does not let MLX use the {chip}'s"
        yield Finding("neural accelerators", NOTE, detail, "update to macOS 26.2 or later")


def pair() -> Iterator[Finding]:
    """Run a round of the shipped pair, and report its kernels' self-checks."""
    try:
        model, tokenizer, drafter = load()
        text = stream_generate(model, tokenizer, [5, 6, 7], drafter, max_tokens=8, verify_length=4)
        tokens = [response.token for response in text]
    except (InputError, RuntimeError, ValueError) as error:
        yield Finding("shipped pair", PROBLEM, str(error), "reinstall dspine-mlx", private=True)
        return
    assert drafter is not None
    modes = load_calibrations(drafter)
    yield Finding("shipped pair", OK, f"generates ({len(tokens)} tokens); {in_words(modes)}")
    yield Finding("verify rows", OK, drafter.target.verify_kernels.promise())
    if not drafter.kernels.active:
        yield Finding("kernels", NOTE, "off without Metal; plain MLX operations run")
        return
    for check in drafter.kernels.checks.values():
        status, advice = (OK, "") if check.runs else (NOTE, "plain MLX operations run instead")
        yield Finding(f"kernel {check.kernel}", status, f"{check.shapes}: {check.reason}", advice)


def verify_rows() -> Iterator[Finding]:
    """What races found for every shape of the targets loaded here, and what remains slow."""
    helped = False
    for race in races_on_file():
        if race.problem:
            advice = f"delete {race.name}; races are run again when needed"
            yield Finding("kernel race", NOTE, f"{race.problem}; not used", advice)
            continue
        helped |= any(verdict.product != STOCK for verdict in race.verdicts.values())
        for found, slow in shapes_in_words(race.verdicts):
            yield Finding(f"rows, {race.mode}", NOTE if slow else OK, found, slow)
    for check in checks_on_file():
        yield Finding("exact check", OK, check_in_words(check))
    chip = str(mx.device_info()["device_name"]).removeprefix("Apple ")
    if mx.metal.is_available() and chip.split()[0] in OLD and not helped:
        yield Finding(
            "verify rows",
            NOTE,
            f"on the {chip} every further row of a quantised target costs nearly as much as the "
            "first with MLX's products, and no kernel has been found faster here yet; where "
            "drafting does not pay, it parks by itself",
            "load a target, and look again; dspine-mlx bench --rows tells most",
        )


def on_file() -> Iterator[Finding]:
    """Every file of costs and calibrations."""
    entries = [*costs_on_file(), *batch_costs_on_file(), *calibrations_on_file()]
    detail = f"{len(entries)} files of costs and calibrations in {store.cache_folder()}"
    yield Finding("on file", OK, detail, private=True)
    for cost in costs_on_file():
        yield line("costs", cost.name, cost.pair, cost.problem, cost.days, figures(cost.curve))
    for batch in batch_costs_on_file():
        what = batch_figures(batch.curves)
        yield line("batch costs", batch.name, batch.pair, batch.problem, batch.days, what)
    for one in calibrations_on_file():
        what = in_words(one.modes or {})
        yield line("calibration", one.name, one.pair, one.problem, one.days, what)


def line(kind: str, name: str, pair: str, problem: str, days: float, what: str) -> Finding:
    detail = ": ".join(part for part in (pair, what) if part) + f"; {days:.0f} days old"
    if not problem:
        return Finding(kind, OK, detail)
    measured = kind != "calibration"
    again = "it is measured again when needed" if measured else "run dspine-mlx calibrate"
    return Finding(kind, NOTE, f"{detail}; {problem}", f"delete {name}; {again}")


def batch_figures(curves: Sequence[BatchCurve]) -> str:
    """What a token of each text takes by plain decoding, and a verify forward of all rows."""
    if not curves:
        return ""
    cells = [
        f"{one.texts} {1e3 * one.curve.plain[0]:.1f} and {1e3 * one.curve.verify[0][-1]:.1f} ms"
        for one in curves
    ]
    rows = len(curves[0].curve.verify[0])
    return f"plain steps, and verify forwards of {rows} rows per text, by texts: {', '.join(cells)}"


def figures(curve: Curve | None) -> str:
    if curve is None:
        return ""
    rows = curve.verify[0]
    return (
        f"plain {1e3 * curve.plain[0]:.1f} ms, draft {1e3 * curve.draft[0]:.1f} ms, "
        f"verify {1e3 * rows[0]:.1f} ms (1 row) to {1e3 * rows[-1]:.1f} ms ({len(rows)} rows)"
    )


def in_words(modes: dict[str, Calibration]) -> str:
    known = [f"{mode} ({calibration.rounds} rounds)" for mode, calibration in modes.items()]
    return f"calibrated for {', '.join(known)}" if known else "not calibrated"


def hub_cache() -> Finding:
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return Finding("Hub cache", OK, "empty")
    except RuntimeError as error:  # a user without a home
        return Finding("Hub cache", NOTE, str(error), "set HF_HOME to keep downloads")
    drafters = [
        repo.repo_id
        for repo in cache.repos
        if repo.repo_type == "model" and any(is_drafter(r.snapshot_path) for r in repo.revisions)
    ]
    detail = (
        f"{len(cache.repos)} repositories, {cache.size_on_disk / 2**30:.1f} GiB; "
        f"drafters: {', '.join(sorted(drafters)) or 'none'}"
    )
    if cache.warnings:
        detail += f"; {len(cache.warnings)} entries are damaged"
        return Finding("Hub cache", NOTE, detail, "download them again", private=True)
    return Finding("Hub cache", OK, detail, private=True)


def is_drafter(folder: Path) -> bool:
    config = folder / "config.json"
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    return any(key in text for key in ("target_layer_ids", "aux_hidden_state_layer_ids"))

"""What a step costs here: seconds of plain decoding, drafting and verifying, by width and depth.

A curve is measured for the loaded pair at first use and cached by chip, pair and MLX version; while
text is generated the times of the real steps correct it: heat, other load and depth are followed.
"""

import hashlib
import json
import logging
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.round.select import select
from dspine_mlx.target.rollback import Rollback, leaves

log = logging.getLogger(__name__)
CACHE = Path.home() / ".cache" / "dspine-mlx"
FORMAT = 2
DEPTHS = (64, 2048)  # context positions at which a curve is measured
PLAIN = 12  # tokens of plain decoding timed together: the first find the CPU's caches cold
SECONDS = 3.0  # a measurement stops repeating after about this long
NOISE, WANDER = 0.15, 0.03  # of one step's log-time; of its mean from step to step
BALANCE = 30  # FLOP a byte at which Apple GPUs turn from bandwidth- to compute-bound (M1 38, M5 26)


@dataclass(frozen=True)
class Curve:
    """Seconds at two context depths; linear in the depth between and beyond them."""

    depths: tuple[int, int]
    plain: tuple[float, float]  # a token of pipelined plain decoding
    draft: tuple[float, float]  # one proposal
    verify: tuple[tuple[float, ...], tuple[float, ...]]  # a target forward over 1 .. M + 1 rows
    measured: bool = True

    def __post_init__(self) -> None:
        seconds = [*self.plain, *self.draft, *self.verify[0], *self.verify[1]]
        if len(self.verify[0]) != len(self.verify[1]) or len(self.verify[0]) < 2:
            raise ValueError("verify must name as many widths at both depths, at least 2")
        if not all(math.isfinite(s) and s > 0 for s in seconds) or self.depths[0] >= self.depths[1]:
            raise ValueError("seconds must be above 0 and depths ascending")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Curve":
        """From JSON; ValueError, KeyError or TypeError when it is not a curve."""
        low, high = data["verify"]
        return cls(
            (int(data["depths"][0]), int(data["depths"][1])),
            (float(data["plain"][0]), float(data["plain"][1])),
            (float(data["draft"][0]), float(data["draft"][1])),
            (tuple(map(float, low)), tuple(map(float, high))),
            bool(data["measured"]),
        )

    def at(self, depth: int) -> list[float]:
        """[plain, verify 1 row .. M + 1 rows, draft] after depth positions."""
        share = max(0.0, (depth - self.depths[0]) / (self.depths[1] - self.depths[0]))
        return [low + share * rise for low, rise in self.lines]

    @cached_property
    def lines(self) -> list[tuple[float, float]]:
        """The costs at the first depth, and what the second adds."""
        low, high = (
            [p, *v, d] for p, v, d in zip(self.plain, self.verify, self.draft, strict=True)
        )
        return [(a, max(0.0, b - a)) for a, b in zip(low, high, strict=True)]


class Costs:
    """A curve and what real steps have taught since.

    Prediction: curve * exp(x), x one log-correction for each kind of step, in a Kalman filter. All
    share a common part (heat, load), which may wander; each has a smaller part of its own, alike
    for neighbouring widths, of which plain decoding is the narrowest. Seeing one kind so informs
    all, and most of all itself.
    """

    def __init__(self, curve: Curve):
        self.curve = curve
        self.widths = len(curve.verify[0])
        n = self.widths + 2
        alike = np.eye(n)
        alike[:-1, :-1] = 0.7 ** np.abs(np.subtract.outer(np.arange(n - 1), np.arange(n - 1)))
        common, own = (0.3, 0.1) if curve.measured else (3.0, 0.5)
        self.x, self.covariance = np.zeros(n), common**2 + own**2 * alike
        self.wander = WANDER**2 + (WANDER / 8) ** 2 * alike
        self.depth, self.seconds = -1, list[float]()  # of the last prediction

    def predict(self, depth: int) -> list[float]:
        """[plain, verify 1 row .. M + 1 rows, draft] after depth positions."""
        if depth != self.depth:
            steps, self.depth = zip(self.curve.at(depth), self.x.tolist(), strict=True), depth
            self.seconds = [step * math.exp(x) for step, x in steps]
        return self.seconds

    def plain(self, depth: int) -> float:
        return self.predict(depth)[0]

    def draft(self, depth: int) -> float:
        return self.predict(depth)[-1]

    def verify(self, depth: int) -> list[float]:
        """Seconds of a forward over 1 .. M + 1 rows."""
        return self.predict(depth)[1:-1]

    def observe_plain(self, seconds: float, depth: int) -> None:
        self.observe(0, seconds, depth)

    def observe_round(self, draft: float, verify: float, width: int, depth: int) -> None:
        self.observe(width, verify, depth)
        self.observe(self.widths + 1, draft, depth)

    def observe(self, kind: int, seconds: float, depth: int) -> None:
        """kind: 0 plain, 1 .. M + 1 a verify width, M + 2 a draft, as in `predict`."""
        if not seconds > 0:
            log.warning("a clock went backwards (%s s for a step); this time is ignored", seconds)
            return
        surprise = math.log(seconds / self.predict(depth)[kind])
        self.covariance += self.wander
        column = self.covariance[kind].copy()
        variance = column.item(kind) + NOISE**2
        limit = 3 * math.sqrt(variance)  # a pause of the machine is no cost
        self.x += min(limit, max(-limit, surprise)) / variance * column
        self.covariance -= column[:, None] * (column / variance)
        self.depth = -1


def costs_of(drafter: Drafter, measured: bool = True) -> Costs:
    """The costs of a bound pair: from the cache, else measured now and cached; or only guessed."""
    if not measured:
        return Costs(guess(drafter))
    key = pair_key(drafter)
    path = CACHE / f"costs-{digest(key)}.json"
    curve = read_curve(path, key, drafter.config.num_proposals + 1)
    if curve is None:
        curve = measure(drafter)
        write_json(path, {"key": key, "pair": describe(drafter), "curve": asdict(curve)})
    return Costs(curve)


def pair_key(drafter: Drafter) -> dict[str, str]:
    """What a measurement depends on. Models are known by their tensors' names, shapes, dtypes."""
    return {
        "format": str(FORMAT),
        "device": device_name(),
        "blas": os.environ.get("LD_PRELOAD", ""),  # MLX has no name for the library it is using
        "mlx": mx.__version__,
        "target": structure(drafter.target.model),
        "drafter": structure(drafter.network),
    }


def describe(drafter: Drafter) -> str:
    """A bound pair in words, without names."""
    target = drafter.target
    family = type(target.model).__module__.rpartition(".")[2]
    size = sum(value.nbytes for _, value in tree_flatten(target.model.parameters()))
    return (
        f"{family}, {len(target.layers)} layers of {target.hidden_size}, {size / 1e9:.2g} GB, with "
        f"{type(drafter.network).__name__}, {len(drafter.layers)} layers, "
        f"{drafter.config.num_proposals} proposals"
    )


def device_name() -> str:
    if mx.metal.is_available():
        return str(mx.device_info()["device_name"])
    return f"{platform.system()} {platform.machine()} with {os.cpu_count()} processors"


def structure(module: Any) -> str:
    tensors = tree_flatten(module.parameters())
    return digest([[name, list(value.shape), str(value.dtype)] for name, value in tensors])


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def read_curve(path: Path, key: dict[str, str], widths: int) -> Curve | None:
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        curve = Curve.from_dict(data["curve"])
        if data["key"] != key or len(curve.verify[0]) != widths:
            raise ValueError("it belongs to another pair")
    except (ValueError, KeyError, TypeError, OSError) as error:
        log.warning("%s can't be used (%s); the costs are measured again", path, error)
        return None
    return curve


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write atomically; a folder that can't be written is only warned about."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            json.dump(data, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("%s can't be written (%s); it will be made again next time", path, error)


def guess(drafter: Drafter) -> Curve:
    """A roofline: rows are free until the chip is compute-bound. Real steps set the scale.

    Weights of b bytes a parameter feed BALANCE * b / 2 rows at full bandwidth; a CPU is taken to be
    compute-bound from the second row on, at half of the first row's cost each.
    """
    target, own = (
        sum(value.nbytes for _, value in tree_flatten(m.parameters()))
        for m in (drafter.target.model, drafter.network)
    )
    widths = range(1, drafter.config.num_proposals + 2)
    if mx.metal.is_available():
        packed = any("scales" in m for m in drafter.target.model.modules())
        free = BALANCE * (0.56 if packed else 2) / 2
        verify = tuple(max(1.0, w / free) for w in widths)
    else:
        verify = tuple(1 + 0.5 * (w - 1) for w in widths)
    second = 1e-11 * target  # of one row, at 100 GB/s
    low = tuple(second * v for v in verify)
    draft = second * max(0.05, own / target)
    return Curve(
        DEPTHS, (second, second * 1.1), (draft, draft), (low, tuple(1.1 * s for s in low)), False
    )


def measure(drafter: Drafter, seconds: float = SECONDS) -> Curve:
    """Median times of interleaved repetitions after a warm-up, on caches of their own."""
    bench = Bench(drafter)
    all_widths = list(range(1, drafter.config.num_proposals + 2))
    some = sorted({1, 2, (1 + len(all_widths)) // 2, len(all_widths)})
    low = bench.medians(DEPTHS[0], all_widths, 0.7 * seconds)
    high = bench.medians(DEPTHS[1], some, 0.3 * seconds)
    slopes = np.interp(all_widths, some, [max(0.0, high[w] - low[w]) for w in some])
    return Curve(
        DEPTHS,
        (low["plain"], max(high["plain"], low["plain"])),
        (low["draft"], max(high["draft"], low["draft"])),
        (
            tuple(low[w] for w in all_widths),
            tuple(low[w] + float(s) for w, s in zip(all_widths, slopes, strict=True)),
        ),
    )


class Bench:
    """Steps of a pair on scratch caches."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.target = drafter, drafter.target
        self.cache = make_prompt_cache(self.target.model)
        self.draft_cache = drafter.make_cache()
        self.rollback = Rollback(self.cache, self.target.model)
        self.forward(8)
        drafter.extend(self.features, self.draft_cache)

    def forward(self, width: int, eager_taps: bool = False) -> mx.array:
        tokens = mx.zeros((width,), mx.uint32)
        logits, self.features = self.target.forward(
            tokens, self.cache, self.drafter.config.target_layer_ids, eager_taps
        )
        return mx.argmax(logits, axis=-1)

    def verify(self, width: int) -> None:
        """A verify forward and the way back to half of it, which recurrent layers replay."""
        self.rollback.checkpoint()
        kernels = self.target.verify_kernels
        with self.rollback.verifying(mx.zeros((width,), mx.uint32)), kernels.verifying(width):
            predicted = self.forward(width, eager_taps=True)
        mx.eval(predicted, self.features)
        self.rollback.accept((width + 1) // 2)
        mx.eval([c.state for c in self.cache])
        self.rollback.accept(0)

    def draft(self) -> None:
        proposal = self.drafter.propose(0, self.features[:, :2], self.draft_cache)
        draft = select(proposal, kernels=self.drafter.kernels)
        mx.eval(draft.tokens, draft.evidence)
        for c in self.draft_cache:
            c.trim(min(2, self.features.shape[1]))

    def plain(self, tokens: int = PLAIN) -> None:
        """Tokens of pipelined plain decoding: the next forward runs while one is read."""
        self.rollback.checkpoint()
        following = self.forward(1)
        mx.async_eval(following)
        for _ in range(tokens - 1):
            token, following = following, self.forward(1)
            mx.async_eval(following)
            mx.eval(token)
        mx.eval(following)
        self.rollback.accept(0)

    def deepen(self, depth: int) -> None:
        """Fill the attention caches up to depth positions; what the rows hold takes no time."""
        for c in leaves([*self.cache, *self.draft_cache]):
            if type(c) in (KVCache, RotatingKVCache) and c.offset < depth:
                B, heads, _, size = c.keys.shape
                rows = mx.zeros((B, heads, depth - c.offset, size), c.keys.dtype)
                c.update_and_fetch(rows, mx.zeros((*rows.shape[:3], c.values.shape[3]), rows.dtype))
        mx.eval([c.state for c in self.draft_cache])

    def medians(self, depth: int, widths: list[int], seconds: float) -> dict[int | str, float]:
        self.deepen(depth)
        steps: dict[int | str, Callable[[], None]] = {"plain": self.plain, "draft": self.draft}
        steps |= {w: (lambda w=w: self.verify(w)) for w in widths}  # type: ignore[misc]
        times: dict[int | str, list[float]] = {name: [] for name in steps}
        for step in steps.values():  # the first run of a width may compile kernels
            step()
        started = time.perf_counter()
        while len(times["draft"]) < 7 and (
            len(times["draft"]) < 3 or time.perf_counter() - started < seconds
        ):
            for name, step in steps.items():
                begun = time.perf_counter()
                step()
                times[name].append(max(time.perf_counter() - begun, 1e-9))
        medians = {name: statistics.median(values) for name, values in times.items()}
        return medians | {"plain": medians["plain"] / PLAIN}

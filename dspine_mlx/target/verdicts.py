"""Verdicts of races, kept on file so that a machine races once."""

import hashlib
import json
import logging
import platform
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from dspine_mlx.cache_folder import present, reading, write_json
from dspine_mlx.errors import InputError
from dspine_mlx.metal.attention import Attended
from dspine_mlx.metal.kernel import source
from dspine_mlx.metal.rows import Matrix
from dspine_mlx.target.products import from_dict, name, to_dict
from dspine_mlx.target.race import Race, Verdict

log = logging.getLogger(__name__)
FORMAT = 2
TEXTS = (
    "rows_header",
    "rows_tile",
    "rows_exact_header",
    "rows_exact",
    "experts_exact",
    "rows_attention",
    "rows_merge",
    "exact_attention",
    "exact_merge",
)


def dtype_of(name: str) -> mx.Dtype:
    found: mx.Dtype = getattr(mx, name)
    return found


class Shape(NamedTuple):
    """The layers that a verdict holds for, besides the number of rows. dtype: of the rows."""

    outputs: int
    columns: int
    bits: int
    group_size: int
    mode: str
    dtype: str

    @classmethod
    def of(cls, matrix: Matrix, dtype: mx.Dtype) -> "Shape":
        N, K = matrix.shape
        rows = str(dtype).removeprefix("mlx.core.")
        return cls(N, K, matrix.bits, matrix.group_size, matrix.mode, rows)

    @property
    def mlx_dtype(self) -> mx.Dtype:
        return dtype_of(self.dtype)

    def __str__(self) -> str:
        packing = f"{self.bits} bits, groups of {self.group_size}" if self.bits else self.dtype
        mode = "" if self.mode == "affine" else f"{self.mode}, "
        return f"{self.outputs} x {self.columns}, {mode}{packing}"


class AttentionShape(NamedTuple):
    """The attention that a verdict holds for. context: the number of keys from which it holds.
    bits: of a quantised cache, or 0."""

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    bits: int
    group_size: int
    sinks: bool
    dtype: str
    context: int = 0

    @classmethod
    def of(cls, queries: mx.array, attended: Attended) -> "AttentionShape":
        """Of any context."""
        sinks, dtype = attended.sinks is not None, str(queries.dtype).removeprefix("mlx.core.")
        return cls(queries.shape[1], *attended.sizes(), *attended.packing(), sinks, dtype)

    @property
    def mlx_dtype(self) -> mx.Dtype:
        return dtype_of(self.dtype)

    def __str__(self) -> str:
        sizes = f"{self.head_size}"
        if self.value_size != self.head_size:
            sizes += f" and {self.value_size}"
        packing = f"{self.bits} bits, groups of {self.group_size}" if self.bits else self.dtype
        sinks = ", sinks" if self.sinks else ""
        return (
            f"attention, {self.heads}/{self.kv_heads} heads of {sizes}, {packing}{sinks}, "
            f"{self.context} keys"
        )


class ExpertShape(NamedTuple):
    """The experts that a verdict holds for. chosen: of them, by a row. own: each of these has a row
    of its own, as after the first layer."""

    experts: int
    outputs: int
    columns: int
    bits: int
    group_size: int
    mode: str
    chosen: int
    own: bool
    dtype: str

    @property
    def mlx_dtype(self) -> mx.Dtype:
        return dtype_of(self.dtype)

    def __str__(self) -> str:
        mode = "" if self.mode == "affine" else f"{self.mode}, "
        return (
            f"{self.chosen} of {self.experts} experts, {self.outputs} x {self.columns}, "
            f"{mode}{self.bits} bits, groups of {self.group_size}"
        )


AnyShape = Shape | AttentionShape | ExpertShape
Verdicts = dict[tuple[AnyShape, int], Verdict]
KINDS: dict[str, type[AnyShape]] = {  # of entries
    "shape": Shape,
    "attention": AttentionShape,
    "experts": ExpertShape,
}


def kernels_key(race: Race) -> dict[str, Any]:
    """Everything a verdict depends on: the machine, its compiler (which comes with macOS), MLX,
    the kernels' source and the race's mode."""
    device = mx.device_info()
    texts = "\0".join(map(source, TEXTS))
    return {
        "device": str(device["device_name"]),
        "architecture": race.machine.architecture,
        "macos": platform.mac_ver()[0],
        "mlx": mx.__version__,
        "kernels": digest(texts),
        "mode": race.mode,
        "newest": race.newest,
    }


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def path(folder: Path, key: dict[str, Any]) -> Path:
    return folder / f"kernels-{digest(json.dumps(key, sort_keys=True))}.json"


def read(folder: Path, key: dict[str, Any]) -> Verdicts:
    """Read the verdicts under a key; none if the file is absent, unreadable or of another key."""
    file = path(folder, key)
    if not present(file):
        return {}
    try:
        with reading(file) as data:
            if data["format"] != FORMAT or data["key"] != key:
                return {}
            return dict(map(entry, data["verdicts"]))
    except InputError as error:
        log.warning("%s can't be read (%s); races again", file, error)
        return {}


def entry(data: dict[str, Any]) -> tuple[tuple[AnyShape, int], Verdict]:
    product = from_dict(data["product"])
    kind = next((kind for kind in KINDS if kind in data), "shape")
    shape = KINDS[kind](**data[kind])
    seconds, stock, one_row = (float(data[k]) for k in ("seconds", "stock", "one_row"))
    rejected = tuple(map(str, data["rejected"]))
    verdict = Verdict(product, str(data["why"]), seconds, stock, rejected, one_row)
    return (shape, int(data["rows"])), verdict


def as_dict(shape: AnyShape, rows: int, verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON, for the file and for reports."""
    kind = next(name for name, kind in KINDS.items() if isinstance(shape, kind))
    return {
        kind: shape._asdict(),
        "rows": rows,
        "product": to_dict(verdict.product),
        "why": verdict.why,
        "seconds": verdict.seconds,
        "stock": verdict.stock,
        "one_row": verdict.one_row,
        "rejected": list(verdict.rejected),
    }


def to_json(verdicts: Verdicts) -> str:
    return json.dumps([as_dict(*key, verdict) for key, verdict in sorted_items(verdicts)])


def from_json(text: str) -> Verdicts:
    return dict(map(entry, json.loads(text)))


def common(found: list[str], shapes: set[AnyShape]) -> Verdicts:
    """On these shapes, rank 0's verdicts; where it has settled nothing, the next rank's."""
    verdicts: Verdicts = {}
    for other in map(from_json, reversed(found)):
        verdicts |= {k: v for k, v in other.items() if k[0] in shapes}
    return verdicts


def write(folder: Path, key: dict[str, Any], verdicts: Verdicts) -> None:
    """Add to the file under the key. If the folder can't be written, the next load races again."""
    merged = read(folder, key) | verdicts
    entries = [as_dict(shape, rows, verdict) for (shape, rows), verdict in sorted_items(merged)]
    try:
        write_json(path(folder, key), {"format": FORMAT, "key": key, "verdicts": entries})
    except OSError as error:
        log.warning("verdicts on kernels can't be kept in %s: %s", folder, error.strerror)


def sorted_items(verdicts: Verdicts) -> list[tuple[tuple[AnyShape, int], Verdict]]:
    """By kind, shape and rows."""
    return sorted(verdicts.items(), key=lambda item: (type(item[0][0]).__name__, item[0]))


def packing_of(shape: AnyShape) -> tuple[int, int] | None:
    """(bits, group size) of the quantised caches that an attention reads."""
    if isinstance(shape, AttentionShape) and shape.bits:
        return shape.bits, shape.group_size
    return None


def in_words(verdict: Verdict) -> str:
    if not verdict.seconds:
        return f"{name(verdict.product)} ({verdict.why})"
    ms, stock = 1e3 * verdict.seconds, 1e3 * verdict.stock
    return f"{name(verdict.product)} {ms:.3g} ms (stock {stock:.3g})"

"""Writing a converted folder: streamed to a temporary name, and moved into place when complete."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from dspine_mlx.convert.plan import Item, Plan
from dspine_mlx.drafters.transfer_space import CODES
from dspine_mlx.errors import InputError

SHARD = 1 << 30  # bytes per file, and so in memory at a time


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out`. It is renamed to `out` if the block succeeds, and deleted if
    not.

    A killed process leaves it behind under a hidden name, without the config.json that is written
    last, so it never loads.
    """
    refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o777 & ~umask())
        refuse_existing(out)
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise InputError(f"{out} exists; remove it or name another --mlx-path")


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_weights(
    plan: Plan, folder: Path, progress: Callable[[int], None] = lambda _: None
) -> dict[str, str]:
    """Write model*.safetensors and their index; returns each file's SHA-256. progress: bytes
    written."""
    free = shutil.disk_usage(folder).free
    if free < plan.nbytes:
        raise InputError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, "
            f"the output takes {plan.nbytes / 1e9:.1f}; make room or name another --mlx-path"
        )
    shards = list(shards_of(plan.items))
    index: dict[str, str] = {}
    digests = {}
    for number, items in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else "model"
        arrays: dict[str, mx.array] = {}
        for item in items:
            stored = item.store(checked(plan, item))
            mx.eval(stored)
            arrays |= stored
            progress(item.nbytes)
        file = folder / f"{name}.safetensors"
        save(file, arrays)
        index |= dict.fromkeys(arrays, file.name)
        digests[file.name] = sha256(file)
        arrays.clear()
        mx.clear_cache()
    total = {"total_size": plan.nbytes}
    write_json(folder / "model.safetensors.index.json", {"metadata": total, "weight_map": index})
    return digests


def shards_of(items: list[Item]) -> Iterator[list[Item]]:
    shard: list[Item] = []
    size = 0
    for item in items:
        if shard and size + item.nbytes > SHARD:
            yield shard
            shard, size = [], 0
        shard.append(item)
        size += item.nbytes
    yield shard


def checked(plan: Plan, item: Item) -> mx.array:
    """Load a parameter's value; refuse NaN, infinity, and codes that are not of unit length."""
    value = plan.value(item)
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    if not mx.isfinite(value).all().item():
        raise InputError(f"{' + '.join(item.sources)} holds NaN or infinity; refused")
    cast = item.stored != value.dtype
    if cast and not mx.isfinite(value.astype(item.stored)).all().item():
        raise InputError(
            f"{' + '.join(item.sources)} overflows in {item.stored}; choose another --dtype"
        )
    if item.path == CODES:
        length = mx.linalg.norm(value.astype(mx.float32), axis=-1)
        wrong = int((mx.abs(length - 1) > 0.02).sum().item())
        if wrong:
            raise InputError(
                f"{wrong} of the {value.shape[0]} rows of {item.sources[0]} have no unit length; "
                "these are not DSpine's transfer codes"
            )
    return value


def save(file: Path, arrays: dict[str, mx.array]) -> None:
    try:
        mx.save_safetensors(str(file), arrays, metadata={"format": "mlx"})
    except RuntimeError as error:
        raise OSError(f"could not write {file.name}, the disk may be full: {error}") from error
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=2, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())

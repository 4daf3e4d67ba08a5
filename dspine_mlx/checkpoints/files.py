"""Reading untrusted checkpoint folders.

A safetensors header is checked against its file before MLX opens it. An index can only name files
in its own folder. Pickles are opened by torch's weights-only loader or not at all.
"""

import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from dspine_mlx.errors import InputError

INDEX = "model.safetensors.index.json"
MAX_JSON = 64 << 20  # bytes; the largest public index is below 10 MiB
MAX_HEADER = 64 << 20
MAX_RANK = 8
DTYPES = {  # safetensors name -> bytes and the MLX dtype
    "BOOL": (1, mx.bool_),
    "U8": (1, mx.uint8),
    "I8": (1, mx.int8),
    "U16": (2, mx.uint16),
    "I16": (2, mx.int16),
    "F16": (2, mx.float16),
    "BF16": (2, mx.bfloat16),
    "U32": (4, mx.uint32),
    "I32": (4, mx.int32),
    "F32": (4, mx.float32),
    "I64": (8, mx.int64),
    "U64": (8, mx.uint64),
}


@dataclass(frozen=True)
class Tensor:
    """A tensor that is still in its file."""

    file: Path
    shape: tuple[int, ...]
    dtype: mx.Dtype
    key: str  # its name in the file

    @property
    def nbytes(self) -> int:
        size = self.dtype.size
        for n in self.shape:
            size *= n
        return size


Tensors = dict[str, Tensor]


def parse_json(text: str | bytes, where: object, **options: Any) -> Any:
    """Parse untrusted JSON. Whatever `json` raises becomes an `InputError`: bad syntax, bytes that
    are not text, numbers with too many digits, too deep nesting."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"), **options)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; `InputError` for anything else, repeated keys included.

    Infinity passes: configs of recurrent targets have it. Values are checked where they are used.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            names = [name for name, _ in pairs]
            double = sorted({name for name in names if names.count(name) > 1})
            raise InputError(f"{path} has the key {double[0]!r} twice")
        return out

    if not path.is_file():  # reading a device would never end
        raise InputError(f"{path} is no file")
    if path.stat().st_size > MAX_JSON:
        raise InputError(f"{path} has {path.stat().st_size} bytes; no config or index is that long")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from error
    value = parse_json(data, path, object_pairs_hook=unique)
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} has no config.json; give the folder of a model or drafter")
    return read_json(path)


def read_tensors(folder: Path) -> Tensors:
    """List a folder's tensors by name: shards of an index, model*.safetensors, the only
    *.safetensors, or torch files."""
    tensors: Tensors = {}
    for file in weight_files(folder):
        for name, tensor in file_tensors(file).items():
            if name in tensors:
                other = tensors[name].file.name
                raise InputError(f"{folder} has {name} twice, in {other} and {file.name}")
            tensors[name] = tensor
    check_index(folder, tensors)
    return tensors


def file_tensors(file: Path) -> Tensors:
    if file.suffix == ".safetensors":
        return read_header(file)
    return torch_tensors(file)


def weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(weight_map(index).values()))
        return [inside(folder, name) for name in names]
    found = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not found:
        found = [f for p in ("*.bin", "*.pt", "*.pth") for f in sorted(folder.glob(p))]
    if not found and any(folder.glob("*.gguf")):
        raise InputError(
            f"{folder} holds GGUF, whose drafter names and configs follow no published layout; "
            "convert from the safetensors checkpoint it was made from"
        )
    if not found:
        raise InputError(f"{folder} has no model*.safetensors; give the folder of a checkpoint")
    return [inside(folder, file.name) for file in found]


def weight_map(index: Path) -> dict[str, str]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise InputError(f"{index} has no weight_map; it must map tensor names to files")
    for tensor, file in names.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file, re.ASCII):
            raise InputError(
                f"{index} places {tensor} in {file!r}; it must be a safetensors file of that folder"
            )
    return names


def check_index(folder: Path, tensors: Tensors) -> None:
    index = folder / INDEX
    if not index.is_file():
        return
    wrong = [
        f"{name} in {file}"
        for name, file in weight_map(index).items()
        if name not in tensors or tensors[name].file.name != file
    ]
    if wrong:
        raise InputError(f"{index} promises tensors that are not there: {', '.join(wrong[:8])}")


def inside(folder: Path, name: str) -> Path:
    """Path of a file in a folder, refused if a link leads out of the folder.

    The Hub's cache links snapshots/REVISION/FILE to blobs/ beside snapshots/, which is allowed.
    """
    path = folder / name
    if not path.is_file():
        raise InputError(f"{path} is missing; the download or copy is incomplete")
    homes = [folder.resolve()]
    if folder.parent.name == "snapshots":
        homes.append((folder.parent.parent / "blobs").resolve())
    real = path.resolve()
    if not any(real.is_relative_to(home) for home in homes):
        raise InputError(f"{path} links to {real}, outside its folder")
    return path


def read_header(file: Path) -> Tensors:
    """List a safetensors file's tensors after checking its header against its exact size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size - 8, MAX_HEADER):
                raise InputError(
                    f"{file} has {size} bytes and announces a header of {length}; it is truncated "
                    "or no safetensors file"
                )
            raw = stream.read(length)
    except OSError as error:
        raise InputError(f"{file} can't be read: {error.strerror}") from error
    header = parse_json(raw, f"the header of {file}")
    if not isinstance(header, dict):
        raise InputError(f"{file} has a header that is no JSON object")
    header.pop("__metadata__", None)
    tensors, spans = {}, []
    for name, entry in header.items():
        tensors[name], span = header_entry(file, name, entry)
        spans.append((*span, name))
    end = 0
    for begin, stop, name in sorted(spans):
        if begin != end:
            raise InputError(
                f"{file}: {name} starts at byte {begin}, the tensor before it ends at {end}; "
                "tensors must neither overlap nor leave gaps"
            )
        end = stop
    if end != size - 8 - length:
        raise InputError(
            f"{file}: its header describes {end} bytes of data, the file holds "
            f"{size - 8 - length}; it may be truncated"
        )
    return tensors


def header_entry(file: Path, name: str, entry: Any) -> tuple[Tensor, tuple[int, int]]:
    """One tensor of a header, and its first and last-plus-one byte."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise InputError(f"{file}: {name} needs dtype, shape and data_offsets")
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(
            f"{file}: {name} is {dtype}, which can't be read here; {', '.join(DTYPES)} can"
        )
    counts = isinstance(shape, list) and len(shape) <= MAX_RANK
    if not counts or not all(type(n) is int and 0 <= n < 2**31 for n in shape):
        raise InputError(f"{file}: {name} has the shape {shape!r}; it must be a list of sizes")
    whole = isinstance(offsets, list) and len(offsets) == 2
    if not whole or not all(type(n) is int and n >= 0 for n in offsets):
        raise InputError(f"{file}: {name} has the offsets {offsets!r}; it must be two numbers")
    tensor = Tensor(file, tuple(shape), DTYPES[dtype][1], name)
    if offsets[1] - offsets[0] != tensor.nbytes:
        raise InputError(
            f"{file}: {name} of shape {shape} in {dtype} takes {tensor.nbytes} bytes, "
            f"its offsets {offsets} hold {offsets[1] - offsets[0]}"
        )
    return tensor, (offsets[0], offsets[1])


def load_tensors(tensors: Tensors) -> dict[str, mx.array]:
    """Load some tensors; arrays of safetensors are read only when evaluated."""
    files: dict[Path, list[str]] = {}
    for name, tensor in tensors.items():
        files.setdefault(tensor.file, []).append(name)
    out: dict[str, mx.array] = {}
    for file, names in files.items():
        keys = [tensors[name].key for name in names]
        arrays = lazy_arrays(file) if file.suffix == ".safetensors" else torch_arrays(file, keys)
        out |= {name: arrays[key] for name, key in zip(names, keys, strict=True)}
    return out


def lazy_arrays(file: Path) -> dict[str, mx.array]:
    try:
        return mx.load(str(file))
    except RuntimeError as error:
        raise InputError(f"{file} can't be read: {error}") from error


# --- torch files --------------------------------------------------------------------------------


def torch_state(file: Path) -> dict[str, Any]:
    """Load a torch file's tensors, mapped lazily, through the weights-only loader."""
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{file} is a torch pickle, which only torch's weights-only loader may open; "
            "install torch, or use a safetensors checkpoint"
        ) from error
    check_zip(file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001  torch raises its unpickler's own types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{file} was refused by torch's weights-only loader: {reason}") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(torch.is_tensor(v) for v in state.values()):
        raise InputError(f"{file} holds more than tensors by name; save a plain state_dict")
    return state


def check_zip(file: Path) -> None:
    """Refuse compressed entries: torch writes none, and one may unpack to any size."""
    if not zipfile.is_zipfile(file):
        raise InputError(f"{file} is no zip as torch has written since 1.6; save it anew")
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    packed = [e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED]
    if packed or sum(e.file_size for e in entries) > file.stat().st_size:
        raise InputError(f"{file} holds compressed entries, which torch never writes; refused")


def torch_tensors(file: Path) -> Tensors:
    kinds = {str(dtype).rpartition(".")[2]: dtype for _, dtype in DTYPES.values()}
    kinds["bool"] = mx.bool_
    out = {}
    for name, value in torch_state(file).items():
        kind = str(value.dtype).rpartition(".")[2]
        if kind not in kinds:
            raise InputError(f"{file}: {name} is {kind}, which can't be read here")
        out[name] = Tensor(file, tuple(value.shape), kinds[kind], name)
    return out


def torch_arrays(file: Path, keys: list[str]) -> dict[str, mx.array]:
    import torch

    state, out = torch_state(file), {}
    for key in keys:
        value = state[key].detach().contiguous()
        if value.dtype == torch.bfloat16:  # NumPy has no bfloat16: hand over the bits
            out[key] = mx.array(value.view(torch.uint16).numpy()).view(mx.bfloat16)
        else:
            out[key] = mx.array(value.numpy())
    return out

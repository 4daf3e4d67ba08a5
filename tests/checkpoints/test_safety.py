"""Untrusted checkpoints."""

import json
import pickle
import struct
import sys
import types
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspine_mlx.checkpoints import files
from dspine_mlx.checkpoints.detect import detect
from dspine_mlx.checkpoints.open import open_checkpoint
from dspine_mlx.convert.conversion import convert
from dspine_mlx.drafters import METHODS
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter, quantize_like
from tests.support.checkpoints import (
    dflash_zlab,
    dspark_specforge,
    dspine_specforge,
    save,
    speculators,
    tiny_target,
)


def refused(folder: Path, message: str) -> None:
    """One sentence, nothing written, from conversion and from loading alike."""
    out = folder.parent / "out"
    before = sorted(folder.parent.iterdir())
    with pytest.raises(InputError, match=message) as error:
        convert(folder, out)
    assert "\n" not in str(error.value)
    assert sorted(folder.parent.iterdir()) == before
    with pytest.raises(InputError):
        load_drafter(folder, tiny_target()[0])


# --- pickles ------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, flag: Path):
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.flag,))


def test_pickles_are_never_executed(tmp_path: Path) -> None:
    flag = tmp_path / "executed"
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dflash_zlab()[0]))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Bomb(flag)}))
    refused(folder, "only torch's weights-only loader may open|is no zip as torch has written")
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert flag.exists()  # the file would have done it


class FakeTensor:
    """As much of torch.Tensor as reading needs."""

    def __init__(self, array: np.ndarray, dtype: str):
        self.array, self.dtype, self.shape = array, f"torch.{dtype}", array.shape

    def detach(self) -> "FakeTensor":
        return self

    def contiguous(self) -> "FakeTensor":
        return self

    def view(self, dtype: str) -> "FakeTensor":
        return FakeTensor(self.array.view(np.uint16), dtype)

    def numpy(self) -> np.ndarray:
        return self.array


def fake_torch(monkeypatch: pytest.MonkeyPatch, state: Any) -> list[dict[str, Any]]:
    """A torch that records how it was called: the real one is not needed to test our side."""
    calls: list[dict[str, Any]] = []

    def load(file: Path, **options: Any) -> Any:
        calls.append(options)
        if isinstance(state, Exception):
            raise state
        return state

    module = types.SimpleNamespace(
        load=load,
        is_tensor=lambda value: isinstance(value, FakeTensor),
        bfloat16="torch.bfloat16",
        uint16="torch.uint16",
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return calls


def torch_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dflash_zlab()[0]))
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
    return folder


def test_torch_files_go_through_the_weights_only_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = dflash_zlab()[1]
    half = {name: mx.array(value).astype(mx.bfloat16) for name, value in weights.items()}
    bits = {name: np.array(value.view(mx.uint16)) for name, value in half.items()}
    state = {name: FakeTensor(value, "bfloat16") for name, value in bits.items()}
    calls = fake_torch(monkeypatch, state)
    convert(torch_folder(tmp_path), tmp_path / "out")
    assert calls
    assert all(call["weights_only"] is True and call["mmap"] for call in calls)
    written = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert all(mx.array_equal(written[name], value) for name, value in half.items())


def test_with_the_real_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weights = {n: torch.tensor(w).bfloat16() for n, w in dflash_zlab()[1].items()}
    weights["norm.weight"] = torch.nn.Parameter(weights["norm.weight"].float())
    folder = torch_folder(tmp_path)
    torch.save(weights, folder / "pytorch_model.bin")
    convert(folder, tmp_path / "out")
    written = mx.load(str(tmp_path / "out" / "model.safetensors"))
    for name, value in weights.items():
        wanted = value.detach().float().numpy()
        np.testing.assert_array_equal(np.array(written[name].astype(mx.float32)), wanted)
    flag = tmp_path / "executed"
    torch.save({"fc.weight": Bomb(flag)}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="refused by torch's weights-only loader"):
        convert(folder, tmp_path / "bomb")
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match="no zip"):
        convert(folder, tmp_path / "legacy")
    assert not flag.exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (pickle.UnpicklingError("Weights only load failed\nmore"), "refused by torch's"),
        ({"epoch": 3}, "more than tensors"),
        ([1], "more than tensors"),
    ],
)
def test_torch_files_with_more_than_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: Any, message: str
) -> None:
    fake_torch(monkeypatch, state)
    refused(torch_folder(tmp_path), message)


def test_a_zip_bomb_is_not_unfolded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_torch(monkeypatch, {})
    folder = torch_folder(tmp_path)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", b"\0" * (64 << 20))
    assert (folder / "pytorch_model.bin").stat().st_size < 1 << 20
    refused(folder, "compressed entries")
    assert not calls


def test_gguf_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "drafter.gguf").write_bytes(b"GGUF")
    refused(folder, "holds GGUF")


# --- indices and links --------------------------------------------------------------------------


def rewrite_index(folder: Path, **placed: Any) -> None:
    index = folder / files.INDEX
    value = json.loads(index.read_text())
    value["weight_map"] |= placed
    index.write_text(json.dumps(value))


@pytest.mark.parametrize(
    "file",
    ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "x.bin", 7,
     "", "model.safetensors\0", "ｍodel.safetensors"],
)  # fmt: skip
def test_an_index_names_only_files_of_its_folder(source: Path, file: Any) -> None:
    save(source.parent, *dflash_zlab())  # something to reach outside
    rewrite_index(source, **{"fc.weight": file})
    with pytest.raises(InputError, match="must be a safetensors file of that folder"):
        open_checkpoint(source)


def test_an_index_promises_what_is_there(source: Path) -> None:
    rewrite_index(source, ghost="model-00001-of-00002.safetensors")
    refused(source, "promises tensors that are not there: ghost")
    (source / "model-00002-of-00002.safetensors").unlink()
    refused(source, "missing; the download or copy is incomplete")


@pytest.mark.parametrize(
    "value", ["[]", '{"weight_map": {}}', '{"weight_map": [1]}', "{", '{"a": NaN}']
)
def test_broken_indices(source: Path, value: str) -> None:
    (source / files.INDEX).write_text(value)
    refused(source, "index.json")


def test_links_out_of_the_folder_are_refused(source: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    (source / "model-00001-of-00002.safetensors").rename(secret)
    (source / "model-00001-of-00002.safetensors").symlink_to(secret)
    refused(source, "outside its folder")


def test_calibrations_from_outside_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"temperatures": [1, 1, 1, 1]}')
    (source / "sts.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(InputError, match="outside its folder"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", files.INDEX, "sts.json", "model.safetensors"])
def test_devices_are_not_read(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path / "source", *dflash_zlab())
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(InputError):
        convert(folder, tmp_path / "out")


def test_a_tensor_in_two_files(source: Path) -> None:
    mx.save_safetensors(str(source / "model-extra.safetensors"), {"norm.weight": mx.ones(32)})
    (source / files.INDEX).unlink()
    refused(source, "has norm.weight twice, in")


# --- headers ------------------------------------------------------------------------------------


def write_raw(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def entry(start: int, stop: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    shape = [(stop - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HEADERS: dict[str, tuple[Any, bytes, int | None, str]] = {
    "terabytes": ({"a": entry(0, 8)}, b"\0" * 8, 1 << 42, "announces a header of"),
    "more than it holds": ({"a": entry(0, 8)}, b"\0" * 8, 10_000, "announces a header of"),
    "not JSON": (b"{{{{", b"", None, "the header of .* is not valid JSON"),
    "nested too deep": (b"[" * 100_000, b"", None, "the header of .* is not valid JSON"),
    "a list": ([], b"", None, "no JSON object"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12, None, "neither overlap"),
    "gap": ({"a": entry(0, 8), "b": entry(12, 16)}, b"\0" * 16, None, "neither overlap"),
    "beyond the end": (
        {"a": entry(0, 1 << 40, [1 << 28, 1 << 10])}, b"\0" * 8, None, "describes 1099511627776"),
    "trailing bytes": ({"a": entry(0, 8)}, b"\0" * 9, None, "describes 8 bytes"),
    "shape against bytes": ({"a": entry(0, 8, [3])}, b"\0" * 8, None, "takes 12 bytes"),
    "huge shape": ({"a": entry(0, 8, [1 << 40])}, b"\0" * 8, None, "must be a list of sizes"),
    "overflowing shape": (
        {"a": entry(0, 0, [1 << 30, 1 << 30, 1 << 4])}, b"", None, "its offsets"),
    "negative shape": ({"a": entry(0, 8, [-2])}, b"\0" * 8, None, "must be a list of sizes"),
    "shape of strings": ({"a": entry(0, 8, ["2"])}, b"\0" * 8, None, "must be a list of sizes"),
    "true as a size": ({"a": entry(0, 4, [True])}, b"\0" * 4, None, "must be a list of sizes"),
    "many dimensions": ({"a": entry(0, 4, [1] * 99)}, b"\0" * 4, None, "must be a list of sizes"),
    "offsets backwards": ({"a": entry(8, 0, [2])}, b"\0" * 8, None, "its offsets"),
    "offsets of strings": (
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]}}, b"\0" * 8, None,
        "two numbers"),
    "unknown dtype": ({"a": entry(0, 8, dtype="F4")}, b"\0" * 8, None, "is F4, which"),
    "dtype a list": ({"a": entry(0, 8, dtype=["F32"])}, b"\0" * 8, None, "needs dtype|which"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8, None, "needs dtype"),
    "no entry": ({"a": 3}, b"", None, "needs dtype"),
}  # fmt: skip


@pytest.mark.parametrize(("header", "data", "length", "message"), HEADERS.values(), ids=HEADERS)
def test_lying_headers(
    tmp_path: Path, header: Any, data: bytes, length: int | None, message: str
) -> None:
    folder = save(tmp_path / "source", *dflash_zlab())
    write_raw(folder / "model.safetensors", header, data, length)
    refused(folder, message)


@pytest.mark.parametrize("size", [0, 3, 8, 100])
def test_truncated_files(tmp_path: Path, size: int) -> None:
    folder = save(tmp_path / "source", *dflash_zlab())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refused(folder, "truncated|no safetensors")


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400))
def test_any_bytes_are_refused_or_read(data: bytes, length: int) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        file.write_bytes(struct.pack("<Q", length) + data)
        try:
            tensors = files.read_header(file)
        except InputError:
            return
        assert sum(t.nbytes for t in tensors.values()) == len(data) - length


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["fc.weight", "transfer_codes", "injection.message.weight"])
def test_weights_must_be_finite(tmp_path: Path, name: str, value: float) -> None:
    config, weights = dspine_specforge()
    weights[name][1, 2] = value
    refused(save(tmp_path / "source", config, weights), "NaN or infinity|not finite")


def test_a_draft_vocabulary_that_t2d_contradicts(tmp_path: Path) -> None:
    """As ids that could pass for offsets would."""
    config, weights = speculators(reduced=True)
    weights["t2d"] = np.roll(weights["t2d"], 1)
    refused(save(tmp_path / "source", config, weights), "other tokens than t2d marks")


def test_a_cast_must_not_overflow(tmp_path: Path) -> None:
    config, weights = dflash_zlab()
    weights["norm.weight"][3] = 1e5
    folder = save(tmp_path / "source", config, weights)
    with pytest.raises(InputError, match="overflows in mlx.core.float16"):
        convert(folder, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


NUMBERS = [name for name, value in dflash_zlab()[0].items() if type(value) in (int, float)]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("wrong", [str, float, lambda v: [v], lambda v: {"v": v}, lambda v: True])
def test_numbers_must_be_numbers(tmp_path: Path, name: str, wrong: Callable[[Any], Any]) -> None:
    config, weights = dflash_zlab()
    value = wrong(config[name])
    if value == config[name] and type(config[name]) is float:
        return
    refused(save(tmp_path / "source", config | {name: value}, weights), name)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
CONFIGS = [maker()[0] for maker in (dflash_zlab, dspine_specforge, dspark_specforge, speculators)]
SECTIONS = ["", "dflash_config", "dspine_config", "transformer_layer_config", "speculators_config"]
KEYS = sorted({key for c in CONFIGS for s in SECTIONS for key in (c.get(s, {}) if s else c)})
EXTRA = ["rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_swa", "config"]
EXTRA += ["sample_from_anchor", "quantization", "dspine_mlx", "swa_window_size", "head_dim"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    number=st.integers(0, len(CONFIGS) - 1),
    section=st.sampled_from(SECTIONS),
    changes=st.dictionaries(st.sampled_from(KEYS + EXTRA), json_values, min_size=1, max_size=4),
)
def test_any_config_is_refused_or_read(number: int, section: str, changes: dict[str, Any]) -> None:
    maker = (dflash_zlab, dspine_specforge, dspark_specforge, speculators)[number]
    config, weights = maker()
    if section and isinstance(config.get(section), dict):
        config = config | {section: config[section] | changes}
    else:
        config = config | changes
    with TemporaryDirectory() as folder:
        source = save(Path(folder), config, weights)
        try:
            checkpoint = open_checkpoint(source)
            drafter = checkpoint.build()
            quantize_like(drafter, [*checkpoint.sources, "fc.scales"], checkpoint.raw)
            checkpoint.check(drafter)
        except InputError:
            return


@settings(max_examples=80, deadline=None)
@given(
    config=st.dictionaries(st.sampled_from(KEYS + EXTRA), json_values, max_size=5),
    names=st.lists(
        st.text(max_size=30) | st.sampled_from(sorted(dspine_specforge()[1])), max_size=9
    ),
)
def test_detection_refuses_or_names(config: dict[str, Any], names: list[str]) -> None:
    with suppress(InputError):
        assert detect(config, names)[0].name in METHODS


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=80) | json_values.map(json.dumps))
def test_any_index_is_refused_or_read(text: str) -> None:
    with TemporaryDirectory() as folder:
        index = Path(folder) / files.INDEX
        index.write_text(text, encoding="utf-8", errors="surrogatepass")
        with pytest.raises(InputError):
            files.weight_files(Path(folder))


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[" * 100_000, "\xff", "{'a': 1}", "1"])
def test_json_that_is_not_quite(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match="config.json"):
        files.read_config(tmp_path)

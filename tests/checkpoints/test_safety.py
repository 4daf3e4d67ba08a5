"""Untrusted checkpoints: pickles, indices, links."""

import json
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dspine_mlx.checkpoints import files
from dspine_mlx.checkpoints.open import open_checkpoint
from dspine_mlx.convert.conversion import convert
from dspine_mlx.errors import InputError
from tests.support.checkpoints import (
    dflash_zlab,
    save,
)
from tests.support.refusals import refused

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

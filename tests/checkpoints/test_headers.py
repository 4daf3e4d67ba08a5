"""Untrusted headers, values and configs."""

import json
import re
import struct
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
from dspine_mlx.convert.report import report
from dspine_mlx.drafters import METHODS
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter, quantize_like
from tests.support.checkpoints import (
    Shape,
    dflash_zlab,
    dspark_specforge,
    dspine_specforge,
    save,
    speculators,
    tiny_target,
)
from tests.support.refusals import refused

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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling has the factor None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling has the factor 0"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"type": ["x"]}}, r"rope_type is \['x'\]"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": "x"}}, "has factor 'x'"),
        (
            {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 2}},
            "must be at most 1",
        ),
        ({"layer_types": ["full_attention", "none"]}, "layer_types is"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"first_slot": 0}, "first_slot is 0; a DSpine drafter"),
        ({"first_slot": 3}, "first_slot is 3"),
        ({"dspine_mlx": {"schema": 1, "method": "dspine", "notes": 3}}, "dspine_mlx.notes is 3"),
    ],
)
def test_a_converted_folder_is_no_more_trusted(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    convert(save(tmp_path / "source", *dspine_specforge()), tmp_path / "out")
    assert report(tmp_path / "out")["problems"] == []
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=message):
        report(tmp_path / "out")


WHOLE = (np.bool_, np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16, np.uint32, np.uint64)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(sorted(speculators(reduced=True)[1])), dtype=st.sampled_from(WHOLE))
def test_whole_numbers_are_no_weights(name: str, dtype: type[np.generic]) -> None:
    """Ids may be of any whole type, t2d of any."""
    config, weights = speculators(reduced=True)
    weights[name] = weights[name].astype(dtype)
    with TemporaryDirectory() as home:
        folder = save(Path(home) / "source", config, weights)
        if name == "t2d" or (name == "d2t" and dtype not in (np.bool_, np.int8, np.uint8)):
            assert report(folder)["problems"] == []
        elif name != "d2t" or dtype is np.bool_:
            (problem,) = report(folder)["problems"]
            assert re.search(f"wrong type: {name} is {np.dtype(dtype).name}_?, not ", problem)


def test_packed_weights_are_words(tmp_path: Path) -> None:
    convert(save(tmp_path / "source", *dspine_specforge(Shape(H=64, r=32))), tmp_path / "out", True)
    weights = mx.load(str(tmp_path / "out" / "model.safetensors"))
    name = next(n.replace(".scales", ".weight") for n in weights if n.endswith(".scales"))
    weights[name] = weights[name].astype(mx.float32)
    mx.save_safetensors(str(tmp_path / "out" / "model.safetensors"), weights)
    (problem,) = report(tmp_path / "out")["problems"]
    assert f"wrong type: {name} is float32, not uint32" in problem


def test_nothing_but_whole_numbers(tmp_path: Path) -> None:
    config, weights = dflash_zlab()
    weights = {name: value.astype(np.int32) for name, value in weights.items()}
    with pytest.raises(InputError, match="wrong type: fc.weight is int32, not float32, "):
        load_drafter(save(tmp_path / "source", config, weights), tiny_target()[0])


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

"""Transfer codes against a float64 decomposition of another kind, and folders that rebuild them."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.convert.conversion import convert
from dspine_mlx.convert.reference import dspine_round
from dspine_mlx.drafters.transfer_space import head_matrix, transfer_codes, transfer_space
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter
from dspine_mlx.target.model import Target
from tests.support.checkpoints import Shape, dflash_zlab, dspine_specforge, save, tiny_target
from tests.support.same_round import assert_same_round


def by_svd(head: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and directions from the singular vectors of the centred unit rows, in float64."""
    rows = head / np.linalg.norm(head, axis=1, keepdims=True)
    rows = rows - rows.mean(axis=0)
    left, _, right = np.linalg.svd(rows, full_matrices=False)
    codes, directions = left[:, :rank][:, ::-1], right[:rank][::-1].T  # values ascend
    signs = np.sign(directions[np.abs(directions).argmax(axis=0), np.arange(rank)])
    codes = codes / np.linalg.norm(codes, axis=1, keepdims=True)
    return codes * signs, directions * signs


def random_head(V: int, d: int, seed: int = 0) -> np.ndarray:
    """Rows with a mean of their own, and eigenvalues well apart."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0] * 1.3 ** np.arange(d)
    return (rng.normal(size=(V, d)) @ basis.T + rng.normal(size=d)).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(V=st.integers(60, 400), d=st.integers(4, 16), data=st.data(), seed=st.integers(0, 5))
def test_codes_are_the_whitened_principal_components(
    V: int, d: int, data: st.DataObject, seed: int
) -> None:
    rank = data.draw(st.integers(1, d))
    head = random_head(V, d, seed)
    codes, projection = transfer_codes(mx.array(head), rank)
    wanted, directions = by_svd(head.astype(np.float64), rank)
    np.testing.assert_allclose(np.array(projection), directions, atol=2e-3)
    np.testing.assert_allclose(np.array(codes), wanted, atol=5e-3)


def test_at_full_precision(tmp_path: Path) -> None:
    head = random_head(500, 12)
    codes, projection = transfer_codes(mx.array(head), 6)
    wanted, directions = by_svd(head.astype(np.float64), 6)
    np.testing.assert_allclose(np.array(projection), directions, atol=2e-6)
    np.testing.assert_allclose(np.array(codes), wanted, atol=2e-5)
    np.testing.assert_allclose(np.linalg.norm(np.array(codes), axis=1), 1, atol=1e-6)
    assert (codes.dtype, projection.dtype) == (mx.float32, mx.float32)


def test_chunks_change_nothing_but_rounding() -> None:
    head = mx.array(random_head(301, 10))
    whole, parts = transfer_space(head, 5, chunk=1000), transfer_space(head, 5, chunk=7)
    np.testing.assert_allclose(parts.directions, whole.directions, atol=1e-6)
    np.testing.assert_allclose(parts.mean, whole.mean, atol=1e-9)
    np.testing.assert_allclose(
        np.array(parts.codes(head, chunk=11)), np.array(whole.codes(head)), atol=1e-5
    )


def test_signs_do_not_depend_on_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    head, eigh = mx.array(random_head(200, 8)), np.linalg.eigh
    codes, projection = transfer_codes(head, 8)

    def flipped(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = eigh(matrix)
        return values, vectors * np.array([1, -1, -1, 1, -1, 1, 1, -1])

    monkeypatch.setattr(np.linalg, "eigh", flipped)
    again = transfer_codes(head, 8)
    assert mx.array_equal(codes, again[0])
    assert mx.array_equal(projection, again[1])


def test_scale_and_dtype_of_rows_do_not_matter() -> None:
    head = random_head(120, 8)
    scaled = head * np.random.default_rng(1).uniform(0.1, 9, size=(120, 1)).astype(np.float32)
    a, b = (np.array(transfer_codes(mx.array(h), 4)[0]) for h in (head, scaled))
    np.testing.assert_allclose(a, b, atol=1e-4)
    half = transfer_codes(mx.array(head).astype(mx.bfloat16), 4)[0]
    assert np.abs(np.array(half) - a).max() < 0.1


@pytest.mark.parametrize("rank", [0, -1, 9, 100])
def test_ranks_out_of_range(rank: int) -> None:
    with pytest.raises(InputError, match=f"rank {rank} must be from 1 to 8"):
        transfer_codes(mx.array(random_head(50, 8)), rank)


def test_a_head_of_too_few_directions() -> None:
    head = random_head(50, 4) @ np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    with pytest.raises(InputError, match="spans 4 directions; rank 6"):
        transfer_codes(mx.array(head), 6)


def test_packed_matrices_are_no_heads() -> None:
    with pytest.raises(InputError, match="needs its unquantised matrix"):
        transfer_codes(mx.zeros((8, 4), mx.uint32), 2)


def test_a_quantised_head_only_on_request() -> None:
    model, head = tiny_target(Shape(H=64))
    model.lm_head = model.lm_head.to_quantized(group_size=64, bits=8)
    with pytest.raises(InputError, match="quantised, and the small directions.*--dequantize-head"):
        head_matrix(Target(model))
    with pytest.warns(UserWarning, match="dequantised head"):
        matrix = head_matrix(Target(model), dequantize=True)
    assert np.abs(np.array(matrix) - np.asarray(head.head)).max() < 0.01


# --- in a conversion ----------------------------------------------------------------------------

SHAPE = Shape(H=32, r=12, V=200)


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    return save_target(tmp_path / "target", SHAPE)


def save_target(folder: Path, shape: Shape, changed: bool = False) -> Path:
    """The tiny target as an mlx-lm folder."""
    model, head = tiny_target(shape)
    if changed:
        model.lm_head.weight = model.lm_head.weight[::-1]
    folder.mkdir()
    model.save_weights(str(folder / "model.safetensors"))
    config = {
        "model_type": "qwen3",
        "hidden_size": shape.H,
        "num_hidden_layers": shape.target_layers,
        "intermediate_size": shape.I,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "vocab_size": shape.V,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_own_codes(signs: bool = True) -> tuple[dict, dict]:
    """A checkpoint whose C is its target's transfer space, in signs of its own."""
    config, weights = dspine_specforge(SHAPE)
    codes = np.array(transfer_codes(mx.array(np.asarray(tiny_target(SHAPE)[1].head)), SHAPE.r)[0])
    flips = np.where(np.arange(SHAPE.r) % 3, 1, -1) if signs else 1
    weights["transfer_codes"] = (codes * flips).astype(np.float32)
    return config, weights


def test_missing_codes_are_computed_from_the_target(tmp_path: Path, target_folder: Path) -> None:
    config, weights = with_own_codes(signs=False)
    without = {n: w for n, w in weights.items() if n != "transfer_codes"}
    source = save(tmp_path / "source", config, without)
    with pytest.raises(InputError, match="give --target, or --codes"):
        convert(source, tmp_path / "out")
    plan = convert(source, tmp_path / "out", target=target_folder)
    assert any("computed from the target's head" in note for note in plan.notes)
    model, head = tiny_target(SHAPE)
    drafter = load_drafter(tmp_path / "out", model)
    assert_same_round(drafter, dspine_round, (config, weights), head, SHAPE)


def test_a_projection_replaces_the_codes(tmp_path: Path, target_folder: Path) -> None:
    checkpoint = with_own_codes()
    source = save(tmp_path / "source", *checkpoint)
    convert(source, tmp_path / "out", target=target_folder, codes_from_head=True)
    weights = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert "transfer_codes.weight" not in weights
    assert weights["transfer_space.projection"].shape == (32, 12)
    model, head = tiny_target(SHAPE)
    drafter = load_drafter(tmp_path / "out", model)
    assert_same_round(drafter, dspine_round, checkpoint, head, SHAPE)


def test_the_projection_knows_its_target(tmp_path: Path, target_folder: Path) -> None:
    source = save(tmp_path / "source", *with_own_codes())
    convert(source, tmp_path / "out", target=target_folder, codes_from_head=True)
    model, _ = tiny_target(SHAPE)
    model.lm_head.weight = model.lm_head.weight[::-1]
    with pytest.raises(InputError, match="converted for another target"):
        load_drafter(tmp_path / "out", model)


def test_other_codes_are_kept_whole(tmp_path: Path, target_folder: Path) -> None:
    source = save(tmp_path / "source", *dspine_specforge(SHAPE))  # random C
    with pytest.raises(InputError, match="codes differ by .* keep them"):
        convert(source, tmp_path / "out", target=target_folder, codes_from_head=True)
    with pytest.raises(InputError, match="give --target"):
        convert(source, tmp_path / "out", codes_from_head=True)
    flash = save(tmp_path / "flash", *dflash_zlab(SHAPE))
    with pytest.raises(InputError, match="have no codes"):
        convert(flash, tmp_path / "out", target=target_folder, codes_from_head=True)


def test_the_target_must_fit(tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", Shape(H=16, V=200))
    source = save(tmp_path / "source", *dspine_specforge(SHAPE))
    with pytest.raises(InputError, match="its hidden size is 32"):
        convert(source, tmp_path / "out", target=other)

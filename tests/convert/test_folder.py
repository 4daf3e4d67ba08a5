"""What accompanies converted weights: their origin, calibrations, the upload."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.convert import convert as mlx_lm_convert

import dspine_mlx.convert
from dspine_mlx.convert import conversion
from dspine_mlx.convert.conversion import convert
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter
from tests.support.checkpoints import (
    dflash_zlab,
    dspark_specforge,
    save,
    tiny_target,
)


def test_the_names_that_are_public() -> None:
    assert dspine_mlx.convert.convert is convert
    first = list(inspect.signature(convert).parameters)[:9]
    assert set(first) <= inspect.signature(mlx_lm_convert).parameters.keys()


def test_the_folder_says_where_it_came_from(tmp_path: Path) -> None:
    convert(save(tmp_path / "some-drafter", *dspark_specforge()), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    own = config["dspine_mlx"]
    assert (own["schema"], own["method"], own["layout"]) == (1, "dspark", "DSpark, SpecForge")
    assert own["source"] == "some-drafter"
    assert config["first_slot"] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "some-drafter" in card
    assert "dspine-mlx generate" in card
    assert not list((tmp_path / "out").glob("tokenizer*"))


def test_a_hub_snapshot_is_named_with_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abc"
    save(snapshot, *dflash_zlab())
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    (snapshot / "model.safetensors").rename(blobs / "77")
    (snapshot / "model.safetensors").symlink_to(blobs / "77")  # as the Hub's cache has it
    monkeypatch.setattr(conversion, "resolve", lambda *_, **__: snapshot)
    convert("a/b", tmp_path / "out", revision="main")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dspine_mlx"]["source"] == "a/b"
    assert config["dspine_mlx"]["revision"] == "0123abc"
    assert "base_model: a/b" in (tmp_path / "out" / "README.md").read_text()


def test_calibrations_are_taken_along(tmp_path: Path) -> None:
    source = save(tmp_path / "source", *dspark_specforge())
    scaling = {"temperatures": [0.5, 1, 1.5, 2, 2.5], "dataset": "chat", "num_samples": 9}
    costs = {"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [90.0, 60.0]}
    (source / "sts.json").write_text(json.dumps(scaling))
    (source / "costs.json").write_text(json.dumps(costs))
    (source / "tokenizer.json").write_text("{}")
    convert(source, tmp_path / "out")
    drafter = load_drafter(tmp_path / "out", tiny_target()[0])
    assert vars(drafter.config)["confidence_temperatures"] == (0.5, 1, 1.5, 2, 2.5)
    assert json.loads((tmp_path / "out" / "costs.json").read_text()) == costs
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_temperatures_in_the_config_are_kept(tmp_path: Path) -> None:
    checkpoint = dspark_specforge(confidence_temperatures=[1.0, 2.0, 3.0, 4.0, 5.0])
    convert(save(tmp_path / "source", *checkpoint), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["confidence_temperatures"] == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("values", [[1.0], [1.0] * 4 + [0], ["1"] * 5, [1.0] * 4 + [1e999], None])
def test_wrong_temperatures_are_refused(tmp_path: Path, values: Any) -> None:
    source = save(tmp_path / "source", *dspark_specforge())
    (source / "sts.json").write_text(
        json.dumps({"temperatures": values}).replace("Infinity", "1e999")
    )
    with pytest.raises(InputError, match="must be 5 numbers above 0"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_upload_sends_the_finished_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    class Api:
        def create_repo(self, **kw: Any) -> None:
            sent.append(kw)

        def upload_folder(self, **kw: Any) -> None:
            sent.append(kw | {"files": sorted(p.name for p in Path(kw["folder_path"]).iterdir())})

    monkeypatch.setattr(conversion, "HfApi", Api)
    source = save(tmp_path / "source", *dflash_zlab())
    convert(source, tmp_path / "out", upload_repo="me/drafter")
    assert [s["repo_id"] for s in sent] == ["me/drafter"] * 2
    assert {"README.md", "config.json", "model.safetensors"} <= set(sent[1]["files"])

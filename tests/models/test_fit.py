"""Fit by configs, the choice of auto, and what is said without a network."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from dspine_mlx import load
from dspine_mlx.checkpoints.files import read_config
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO
from dspine_mlx.models import needs
from dspine_mlx.models.choose import choose, hint
from dspine_mlx.models.fit import check_configs, contradictions
from dspine_mlx.models.hub import cached_folder, online
from dspine_mlx.models.registry import entry_from
from tests.support.checkpoints import (
    Shape,
    dflash_zlab,
    dspark_deepspec,
    dspark_specforge,
    dspine_reference,
    dspine_specforge,
    speculators,
)
from tests.support.hub import (
    DRAFTER,
    REVISION,
    TARGET,
    cache_model,
    demo_cache,
    entry,
    own_registry,
)
from tests.support.serving import Fresh, serving, usage
from tests.support.terminal import on_terminal, plain

LAYOUTS = [
    dflash_zlab,
    dspine_specforge,
    dspine_reference,
    dspark_deepspec,
    dspark_specforge,
    speculators,
]


def target_config(shape: Shape, **changes: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": shape.H,
        "vocab_size": shape.V,
        "num_hidden_layers": shape.target_layers,
    }
    return {"model_type": "qwen3"} | sizes | changes


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_every_layouts_config_is_compared_with_the_targets(layout: Any) -> None:
    shape = Shape()
    config = layout(shape)[0]
    assert contradictions(config, target_config(shape)) == []
    assert contradictions(config, {"text_config": target_config(shape)}) == []
    wrong = contradictions(config, target_config(shape, hidden_size=shape.H + 8))
    assert wrong == [f"its hidden size is {shape.H}, the target's is {shape.H + 8}"]
    assert "its vocabulary is" in contradictions(config, target_config(shape, vocab_size=9))[0]
    few = contradictions(config, target_config(shape, num_hidden_layers=1))
    assert any(word in "; ".join(few) for word in ("it reads layers", "it was made for"))
    assert contradictions(config, {"model_type": "qwen3"}) == []


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub's cache with the demo pair, a registry that knows it, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(demo_cache(tmp_path / "hub")))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    known = [entry_from(entry(), "here")]
    monkeypatch.setattr(needs, "registry", lambda: known)
    return tmp_path / "hub"


def test_auto_loads_the_registrys_drafter(hub: Path) -> None:
    _, _, drafter = load(TARGET, "auto")
    assert drafter is not None
    assert drafter.folder == hub / "models--toy--word-problems-drafter" / "snapshots" / REVISION
    assert load(None, "auto")[2] is not None


def test_auto_takes_one_that_is_here_and_can_be_read(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(*entries: dict[str, Any]) -> None:
        found = [entry_from(e, "here") for e in entries]
        monkeypatch.setattr(needs, "registry", lambda: found)

    far = entry(id="toy/far", revision="f" * 40)
    known(far, entry())
    assert choose(TARGET).id == DRAFTER
    known(far, entry(method="unheard-of"), entry(automatic=False))
    assert choose(TARGET)[:2] == ("toy/far", "f" * 40)
    known(entry(revision=REVISION))
    assert choose(TARGET).revision == REVISION
    known(entry(revision="f" * 40))  # another revision is here
    assert choose(TARGET).revision is None
    known(entry(targets=["toy/other"]))
    with pytest.raises(InputError, match="no public drafter is known for toy/Word"):
        choose(TARGET)


def test_the_hint_names_what_fits(hub: Path) -> None:
    assert hint(TARGET) == f"{DRAFTER} fits this model: add --draft-model auto"
    assert hint("toy/other") == (
        "--draft-model names one that was trained for this model; --draft-model lookup needs none "
        "where text repeats itself"
    )


def test_configs_are_compared_before_anything_is_downloaded(hub: Path, tmp_path: Path) -> None:
    """Only the drafter's config.json is here: its weights are never asked for."""
    other = tmp_path / "other"
    other.mkdir()
    config = read_config(DEMO / "drafter") | {"hidden_size": 64}
    (other / "config.json").write_text(json.dumps(config))
    cache_model(hub, "toy/other", other)
    with pytest.raises(InputError, match="toy/other does not fit .*: its hidden size is 64"):
        load(TARGET, "toy/other")
    check_configs(TARGET, DRAFTER)
    assert cached_folder("toy/other") is None
    assert cached_folder(DRAFTER) is not None


@pytest.mark.parametrize("name", ["nobody/nothing", "nobody/nothing-4bit"])
def test_without_a_network_it_says_what_is_missing(hub: Path, name: str) -> None:
    for call in (lambda: load(name), lambda: load(TARGET, name), lambda: load(name, DRAFTER)):
        with pytest.raises(InputError, match=f"{name} is not in the Hub's cache here, and http"):
            call()


def test_online_is_whether_the_hub_takes_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    for proxy in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        assert online()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert not online()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert not online()
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert online()


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with the demo pair in its Hub cache, its own entry, no
    network."""
    demo_cache(tmp_path / "hub")
    own_registry(tmp_path, entry())
    return {"HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}


def command(machine: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dspine_mlx.cli", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | machine,
        check=False,
    )


@pytest.mark.slow
def test_the_commands_find_the_drafter(machine: dict[str, str]) -> None:
    drafted = ("generate", "--model", TARGET, "-p", "Ali has 3 caps.", "-m", "8")
    result = command(machine, *drafted, "--draft-model", "auto", "--verify-length", "3")
    assert f"Drafter: {DRAFTER}; licence: none found; tested: nothing." in result.stderr
    assert "tokens per round" in result.stderr
    assert "add --draft-model auto" in command(machine, *drafted).stderr
    facts = json.loads(command(machine, "inspect", TARGET, "--json").stdout)
    assert facts["drafters"] == [DRAFTER]
    listed = json.loads(command(machine, "models", TARGET, "--json").stdout)["drafters"]
    assert [(d["id"], d["readable"], d["contradictions"]) for d in listed] == [(DRAFTER, True, [])]
    assert listed[0]["here"].endswith(REVISION)
    nothing = command(machine, "models", "toy/other")
    assert (nothing.returncode, nothing.stdout[:30]) == (1, "No public drafter is known for")
    missing = command(machine, "generate", "--model", "mlx-community/Qwen3-8B-4bit", "-p", "x")
    assert missing.returncode == 2
    assert "mlx-community/Qwen3-8B-4bit is not in the Hub's cache here" in missing.stderr


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_table_shows_every_figure_whole(machine: dict[str, str], columns: int) -> None:
    status, output = on_terminal("models", columns=columns, environment=machine)
    assert status == 0
    shown = plain(output)
    assert "…" not in shown
    table = shown.partition("Tokens per round as")[0]
    assert all(len(line.rstrip()) <= columns for line in table.splitlines())
    for word in ("4.74", "2.94 to 3.41", "MIT", "dspark_gemma4", "yes"):
        assert word in table


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--draft-model", "auto"), f"--draft-model auto: {DRAFTER}"),
        ((), f"plain decoding: {DRAFTER} fits this model: add --draft-model auto"),
    ],
    ids=["auto", "alone"],
)
def test_a_server_takes_the_registrys_drafter_or_says_which_fits(
    flags: tuple[str, ...],
    wanted: str,
    tmp_path: Path,
    machine: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in machine.items():
        monkeypatch.setenv(name, value)
    with serving("dspine_mlx.server", tmp_path, "--model", TARGET, *flags, kind=Fresh) as server:
        assert usage(server, max_tokens=4)["completion_tokens"] > 0
        drafter = server.request("/health").body["draft_model"]
        assert (drafter is None) == (not flags)
        assert wanted in server.log.read_text()

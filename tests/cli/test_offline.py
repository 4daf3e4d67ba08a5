"""Without a network, every command says what it would need, before anything large is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspine_mlx.errors import InputError
from dspine_mlx.measure import prompts
from dspine_mlx.measure.prompts import load_suite
from dspine_mlx.models import needs
from dspine_mlx.models.needs import check_pair, is_here
from dspine_mlx.models.registry import entry_from
from tests.support.hub import DRAFTER, TARGET, demo_cache, entry, own_registry

LARGE = ("mlx_lm", "transformers")
PAIR = ("--model", "Qwen/Qwen3-8B", "--draft-model", "auto")
MISSING = "Qwen/Qwen3-8B and deepseek-ai/dspark_qwen3_8b_block7 are not in the Hub's cache here"
COMMANDS = {
    "generate": (("generate", "-p", "hi", *PAIR), MISSING),
    "chat": (("chat", *PAIR), MISSING),
    "bench": (("bench", "--suite", "P", *PAIR), MISSING),
    "live": (("bench", "--live", *PAIR), MISSING),
    "rows": (("bench", "--rows", "--model", "a/b"), "a/b is not in the Hub's cache here"),
    "mt-bench": (("bench", "--suite", "mt-bench"), "HuggingFaceH4/mt_bench_prompts is not in the"),
    "calibrate": (("calibrate", "--prompts", "P", *PAIR), MISSING),
    "serve": (("serve", *PAIR, "--port", "8000"), MISSING),
    "report": (("report", "--model", "a/b", "--draft-model", "c/d"), "a/b and c/d are not in"),
    "inspect": (("inspect", "a/b"), "a/b is not in the Hub's cache here"),
    "convert": (("convert", "--hf-path", "a/b", "--target", "c/d"), "a/b and c/d are not in"),
    "train run": (("train", "run", "out", "--model", "a/b", "--data", "P"), "a/b is not in"),
    "regenerate": (("train", "regenerate", "P", "out", "--model", "a/b"), "a/b is not in"),
    "eval": (("train", "eval", "P", "--model", "a/b", "--draft-model", "c/d"), "a/b and c/d are"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_missing_is_said_before_large_imports(name: str, tmp_path: Path) -> None:
    arguments, said = COMMANDS[name]
    (tmp_path / "P").write_text("hi\n")
    script = tmp_path / "start.py"
    script.write_text(
        "import sys\nfrom dspine_mlx.cli import main\n"
        f"try:\n    main()\nfinally:\n    print('large:', *({set(LARGE)} & sys.modules.keys()))\n"
    )
    result = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"dspine-mlx: {said}")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout.split() == ["large:"]
    assert {path.name for path in tmp_path.iterdir()} == {"P", "start.py"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache with the demo pair, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(demo_cache(tmp_path / "hub")))
    return tmp_path


def test_a_pair_that_is_here_needs_nothing(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [entry_from(entry(id="toy/far"), "here"), entry_from(entry(), "here")]
    monkeypatch.setattr(needs, "registry", lambda: known)
    check_pair(TARGET, "auto")  # the second one is here
    check_pair(TARGET, DRAFTER)
    check_pair(None, None)
    del known[1]
    with pytest.raises(InputError, match="^toy/far is not in the Hub's cache"):
        check_pair(TARGET, "auto")
    with pytest.raises(InputError, match="^nobody/nothing is not in"):
        check_pair("nobody/nothing", DRAFTER)


def test_weights_of_any_format_count_as_here(hub: Path) -> None:
    assert is_here(TARGET)
    snapshot = hub / "hub" / "models--a--b" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    refs = hub / "hub" / "models--a--b" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0")
    (snapshot / "config.json").write_text("{}")
    assert not is_here("a/b")
    (snapshot / "pytorch_model.bin").write_bytes(b"")
    assert is_here("a/b")


def test_mt_bench_is_read_from_the_cache(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = hub / "question.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"{n}", "more"]}) + "\n" for n in range(3)))
    monkeypatch.setattr(prompts, "try_to_load_from_cache", lambda *_, **__: str(file))
    found = load_suite("mt-bench", 2, print)
    assert [messages[0]["content"] for messages in found] == ["0", "1"]


def test_a_registry_of_the_users_own_counts(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(hub))
    own_registry(hub, entry(id="me/mine", targets=["toy/other"]))
    with pytest.raises(InputError, match="^toy/other and me/mine are not in"):
        check_pair("toy/other", "auto")

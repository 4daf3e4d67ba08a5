"""Reduced draft vocabularies from data to text."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from dspine_mlx.drafters.chain import ChainProposal
from dspine_mlx.errors import InputError
from dspine_mlx.generate import generate
from dspine_mlx.load import load_drafter
from dspine_mlx.target.model import Target
from dspine_mlx.train.run import Run, build
from recipes.ablation import Unrefined
from tests.support.runs import start, vocabulary, weights
from tests.support.tiny import tiny_dspine, tiny_target


@pytest.mark.parametrize("method", ["dspine", "dspark", "dflash"])
def test_a_reduced_draft_vocabulary_from_data_to_text(
    method: str, tmp_path: Path, target: Path, data: Path
) -> None:
    """Its tokens are the answers' most frequent ones, its head is the target's (a DSpark drafter's
    starts as that and learns), and the folder loads and decodes."""
    folder = tmp_path / "run"
    settings: dict[str, Any] = {"drafter__draft_vocab_size": 24, "train__learning_rate": 0.01}
    result = start(folder, target, data, method=method, **settings)
    assert result.exit_code == 0, result.output
    model, tokenizer = mlx_lm.load(str(target))
    answers = [json.loads(line)["completion"] for line in data.read_text().splitlines()]
    held_out = len(answers) // 10
    stop = tokenizer.eos_token_ids
    counts = Counter(t for text in answers[:-held_out] for t in tokenizer.encode(text))
    saved, ids = weights(folder), vocabulary(folder)
    kept = ids.tolist()
    assert kept == sorted(kept)
    assert {token for token, _ in counts.most_common(10)} | set(stop) <= set(kept)
    head = Target(model).head_rows(ids)
    drafter = load_drafter(folder / "drafter", model)
    if method == "dspark":
        assert saved["lm_head.weight"].shape == head.shape == (24, 32)
        assert 0 < mx.abs(saved["lm_head.weight"].astype(mx.float32) - head).max().item() < 0.2
    else:
        assert "lm_head.weight" not in saved
        states = mx.random.normal((3, 32), key=mx.random.key(0))
        own, every = drafter.target.head(states), Target(model).head(states)
        assert mx.allclose(own, every[:, ids], rtol=1e-5, atol=1e-5)
    prompt = tokenizer.encode("What is 3 + 1?")
    plain = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
    assert generate(model, tokenizer, prompt, drafter, max_tokens=12) == plain
    proposal = drafter.propose(prompt[0], drafter.no_features(), drafter.make_cache())
    proposal = proposal if isinstance(proposal, ChainProposal) else proposal.ranked()
    assert set(proposal.candidates.flatten().tolist()) <= set(kept)


def test_a_reduced_draft_vocabulary_as_published(tmp_path: Path, target: Path, data: Path) -> None:
    """Other readers expect offsets, and which of the target's tokens can be drafted."""
    folder, settings = tmp_path / "run", {"drafter__draft_vocab_size": 24}
    result = start(folder, target, data, "--export", "hf", method="dspark", **settings)
    assert result.exit_code == 0, result.output
    saved, ids = weights(folder), vocabulary(folder)
    assert saved["d2t"].dtype == mx.int64
    assert np.flatnonzero(saved["t2d"]).tolist() == ids.tolist()
    model, _ = mlx_lm.load(str(target))
    assert load_drafter(folder / "drafter", model).network.d2t.tolist() == ids.tolist()


def test_a_warm_start_brings_its_draft_vocabulary(tmp_path: Path, target: Path, data: Path) -> None:
    """Also where the new data's most frequent tokens are others."""
    first, others = tmp_path / "first", tmp_path / "others.jsonl"
    assert start(first, target, data, drafter__draft_vocab_size=24).exit_code == 0
    rows = [
        {"prompt": f"Say {i}.", "completion": "Maria has apples, all of them."} for i in range(20)
    ]
    others.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--warm-start", first / "drafter")
    result = start(tmp_path / "second", target, others, *options, drafter__draft_vocab_size=24)
    assert result.exit_code == 0, result.output
    assert vocabulary(tmp_path / "second").tolist() == vocabulary(first).tolist()


def test_a_dspark_head_follows_the_draft_vocabulary_of_a_warm_start(
    tmp_path: Path, target: Path, data: Path
) -> None:
    """A DFlash drafter brings its tokens but no head."""
    first, others = tmp_path / "first", tmp_path / "others.jsonl"
    assert start(first, target, data, method="dflash", drafter__draft_vocab_size=24).exit_code == 0
    row = json.dumps({"prompt": "Say it.", "completion": "Maria has apples, all of them."})
    others.write_text(f"{row}\n" * 20)
    settings: dict[str, Any] = {"drafter__draft_vocab_size": 24, "train__learning_rate": 1e-7}
    options = ("--warm-start", first / "drafter", "--dtype", "float32")
    result = start(tmp_path / "second", target, others, *options, method="dspark", **settings)
    assert result.exit_code == 0, result.output
    saved = weights(tmp_path / "second")
    model, _ = mlx_lm.load(str(target))
    ids = vocabulary(tmp_path / "second")
    assert ids.tolist() == vocabulary(first).tolist()
    assert mx.allclose(saved["lm_head.weight"], Target(model).head_rows(ids), atol=1e-4)


@pytest.mark.parametrize("method", ["dflash", "dspine"])
def test_a_resumed_run_keeps_its_draft_vocabulary_where_the_data_grew(
    method: str, tmp_path: Path, target: Path, data: Path
) -> None:
    """Head rows and labels are of the checkpoint's tokens."""
    folder, grown = tmp_path / "run", tmp_path / "grown.jsonl"
    grown.write_text(data.read_text())
    assert start(folder, target, grown, method=method, drafter__draft_vocab_size=24).exit_code == 0
    row = json.dumps({"prompt": "Say it.", "completion": "Maria has apples, all of them."})
    with grown.open("a") as file:
        file.write(f"{row}\n" * 40)
    drafter = build(Run.read(folder), folder).trainer.drafter
    assert drafter.network.d2t.tolist() == vocabulary(folder).tolist()
    states = mx.random.normal((3, 32), key=mx.random.key(0))
    own, every = drafter.target.head(states), drafter.verifier.head(states)
    assert mx.allclose(own, every[:, drafter.network.d2t], rtol=1e-5, atol=1e-5)


def test_a_layout_without_a_reduced_vocabulary_is_refused_before_training(
    tmp_path: Path, target: Path, data: Path
) -> None:
    options = ("--export", "hf", "--cache", tmp_path / "cache")
    result = start(tmp_path / "run", target, data, *options, drafter__draft_vocab_size=24)
    assert isinstance(result.exception, InputError)
    assert "draft_vocab_size is 24" in str(result.exception)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()


def test_without_refinement_a_reduced_vocabulary_keeps_its_tokens() -> None:
    drafter = tiny_dspine(tiny_target())
    drafter.network.d2t = 2 * mx.arange(20, dtype=mx.uint32) + 1
    drafter = drafter.network.bind(drafter.verifier)
    features = mx.random.normal((1, 4, drafter.network.feature_size), key=mx.random.key(1))
    refined = drafter.propose(7, features, drafter.make_cache()).ranked()
    drafter = Unrefined(drafter.network, drafter.target, drafter.verifier)
    base = drafter.propose(7, features, drafter.make_cache()).ranked()
    assert base.candidates.tolist() == refined.candidates.tolist()
    assert all(token % 2 for token in base.candidates.flatten().tolist())

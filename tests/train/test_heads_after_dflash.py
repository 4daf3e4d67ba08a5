"""Losses of DFlash2 and Domino against float64 NumPy, and training from a DFlash to a folder."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from dspine_mlx.checkpoints.files import read_tensors
from dspine_mlx.checkpoints.open import open_checkpoint
from dspine_mlx.convert.conversion import convert
from dspine_mlx.convert.reference_domino import next_state
from dspine_mlx.convert.verify import verify
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.generate import generate
from dspine_mlx.load import load_drafter
from dspine_mlx.train.blocks import Batch
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.losses import Schedule
from dspine_mlx.train.step import drafter_loss, forward
from tests.support.runs import start
from tests.support.training import SHAPE, random_batch
from tests.train.test_blocks import PREFIX, SELECTOR, build

CE = LossConfig(ce_weight=1.0)


def losses(
    drafter: Drafter, batch: Batch, backbone: float = 0.0
) -> tuple[float, dict[str, mx.array]]:
    schedule = Schedule(mx.array(1.0), mx.array(0.0), batch.weights.sum(), mx.array(backbone))
    function = nn.value_and_grad(
        drafter.network, lambda: drafter_loss(drafter, batch, schedule, CE)[0]
    )
    value, grads = function()
    return value.item(), dict(tree_flatten(grads))


def wide(drafter: Drafter) -> dict[str, np.ndarray]:
    parameters = tree_flatten(drafter.network.parameters())
    return {name: np.array(value).astype(np.float64) for name, value in parameters}


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def proposals(drafter: Drafter, batch: Batch) -> Any:
    """(weight, label, path of true tokens from the anchor on, slot, base logits, state) of each."""
    head = np.array(drafter.target.lm_head.weight).astype(np.float64)
    states = np.array(forward(drafter, batch, CE).base).astype(np.float64)
    weights, tokens = np.array(batch.weights), np.array(batch.tokens)
    for s, a, i in np.ndindex(*weights.shape):
        at = int(batch.anchors[s, a].item())
        if weights[s, a, i] > 0:
            path = tokens[s, at : at + i + 1].tolist()
            h = states[s, a, i]
            yield weights[s, a, i], int(tokens[s, at + i + 1]), path, i, head @ h, h


def test_dflash2_learns_among_the_best_after_the_true_predecessor() -> None:
    """CE over all tokens, and over the K best where the label is one of them; a sum over rows of
    their weights, over the sum of the weights."""
    drafter = build("dflash2", SELECTOR | {"selector_top_k": 12})
    batch = random_batch(SHAPE, drafter.config.num_proposals)
    value, grads = losses(drafter, batch)
    w, total, inside, at = wide(drafter), 0.0, 0, "candidate_selector."
    for weight, label, path, _, logits, h in proposals(drafter, batch):
        best = np.argsort(-logits)[:12]
        slot = w[f"{at}hidden_projection.weight"] @ h
        after = w[f"{at}predecessor_codebook.weight"][path[-1]] * slot
        scores = logits[best] + w[f"{at}successor_codebook.weight"][best] @ after
        loss = -log_softmax(logits)[label]
        if label in best:
            inside += 1
            loss -= log_softmax(scores)[best.tolist().index(label)]
        total += weight * loss
    assert inside > 3
    assert value == pytest.approx(total / batch.weights.sum().item(), rel=2e-5)
    assert all(mx.abs(grad).max().item() > 0 for grad in grads.values())


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("prefix", [0, 1])
def test_domino_learns_with_and_without_its_correction(
    shift: bool, share: float, prefix: int
) -> None:
    changes = PREFIX | {"shift_label": shift, "pure_draft_prefix_len": prefix}
    drafter = build("domino", changes)
    batch = random_batch(SHAPE, drafter.config.num_proposals)
    value, grads = losses(drafter, batch, share)
    w, total = wide(drafter), 0.0
    embedding = np.array(drafter.target.embed.weight).astype(np.float64)
    for weight, label, path, i, logits, h in proposals(drafter, batch):
        state = np.zeros(6)
        for token in path:
            state = next_state(w, embedding[token], state)
        x = w["embed_proj.0.weight"] @ np.concatenate([h, state])
        correction = w["embed_proj.2.weight"] @ (x / (1 + np.exp(-x)))
        final = logits + (correction if i >= prefix else 0)
        total -= weight * (1 - share) * log_softmax(final)[label]
        total -= weight * share * log_softmax(logits)[label]
    assert value == pytest.approx(total / batch.weights.sum().item(), rel=2e-5)
    learns = mx.abs(grads["embed_proj.2.weight"]).max().item() > 0
    assert learns == (share < 1)


def test_gradients_are_those_of_the_losses() -> None:
    """Along a random direction of all parameters, by central differences."""
    whole = SELECTOR | {"selector_top_k": SHAPE.V}  # the set of the best jumps
    for method, changes in (("dflash2", whole), ("domino", PREFIX)):
        drafter = build(method, dict(changes))
        batch = random_batch(SHAPE, drafter.config.num_proposals)
        _, grads = losses(drafter, batch, 0.4)
        start = drafter.network.parameters()
        direction = tree_map(lambda p: 0.1 * mx.random.normal(p.shape), start)
        slope = sum((grads[n] * v).sum().item() for n, v in tree_flatten(direction))
        values = []
        for step in (1e-3, -1e-3):
            drafter.network.update(tree_map(lambda p, v, x=step: p + x * v, start, direction))
            values.append(losses(drafter, batch, 0.4)[0])
        assert (values[0] - values[1]) / 2e-3 == pytest.approx(slope, rel=0.03, abs=0.02)


def test_the_backbones_share_falls_to_nothing() -> None:
    shares = [LossConfig(backbone_ratio=0.5).backbone(x) for x in (0, 0.25, 0.5, 1)]
    assert shares == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("method", ["dflash2", "domino"])
def test_from_a_dflash_to_a_published_folder(
    method: str, tmp_path: Path, target: Path, data: Path
) -> None:
    """A run that starts as a DFlash and is exported in the layout that others read: it converts,
    its round equals float64's, and it drafts."""
    first = tmp_path / "first"
    assert start(first, target, data, method="dflash").exit_code == 0
    folder = tmp_path / "run"
    warm = ("--warm-start", first / "drafter", "--export", "hf", "--dtype", "float32")
    settings = ("--set", "drafter.block_size=16") if method == "dflash2" else ()
    result = start(folder, target, data, *warm, *settings, method=method)
    assert result.exit_code == 0, result.output
    source = folder / "drafter"
    config = json.loads((source / "config.json").read_text())
    name, tensor = {
        "dflash2": ("DFlash2DraftModel", "candidate_selector.predecessor_codebook"),
        "domino": ("DominoDraftModel", "embed_proj.2.weight"),
    }[method]
    assert config["architectures"] == [name]
    assert tensor in read_tensors(source)
    convert(source, tmp_path / "out")
    assert verify(open_checkpoint(source), tmp_path / "out").passed
    model, tokenizer = mlx_lm.load(str(target))
    drafter = load_drafter(tmp_path / "out", model)
    prompt = tokenizer.encode("What is 3 + 1?")
    plain = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
    assert generate(model, tokenizer, prompt, drafter, max_tokens=12) == plain

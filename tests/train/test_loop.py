"""The loop: accumulation, resuming, checkpoints that survive anything, a drafter that overfits."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.generate import stream_generate
from dspine_mlx.target.model import Target
from dspine_mlx.train.config import LossConfig, TrainConfig
from dspine_mlx.train.data import Sequence
from dspine_mlx.train.features import FeatureCache, observe
from dspine_mlx.train.loop import CHECKPOINT, Source, Trainer, read_log, train
from dspine_mlx.train.objectives.dspine import OBJECTIVE
from dspine_mlx.train.start import start_layers
from tests.support import forked
from tests.support.checkpoints import Shape
from tests.support.tiny import random_prompt, tiny_dspine, tiny_target
from tests.train.test_blocks import fresh

pytestmark = pytest.mark.slow

CONFIG = TrainConfig(steps=6, batch_size=4, num_anchors=4, learning_rate=1e-3, save_every=3)


def sequences(count: int = 8, length: int = 24) -> list[Sequence]:
    """Random texts of different lengths."""
    return [
        Sequence(i + 1, np.array(random_prompt(length - i % 3, seed=i), np.int32), 8)
        for i in range(count)
    ]


def make(config: TrainConfig = CONFIG, loss: LossConfig = OBJECTIVE.loss) -> Trainer:
    drafter = tiny_dspine(tiny_target())
    drafter.network.transfer_codes.freeze()
    source = Source(sequences(), observe(drafter.target, drafter.config.target_layer_ids))
    return Trainer(drafter, source, config, loss)


def tensors(trainer: Trainer) -> dict[str, mx.array]:
    state = dict(tree_flatten(trainer.drafter.network.parameters()))
    return state | {f"optimizer.{n}": v for n, v in tree_flatten(trainer.optimizer.state)}


def same(a: Trainer, b: Trainer) -> bool:
    ours, theirs = tensors(a), tensors(b)
    return ours.keys() == theirs.keys() and all(
        mx.array_equal(ours[name], theirs[name]).item() for name in ours
    )


def run(trainer: Trainer, folder: Path, **options: Any) -> list[dict]:
    folder.mkdir(exist_ok=True)
    held_out = Source(sequences(3), trainer.source.observe)
    options = {"export": lambda: None} | options
    train(trainer, held_out, folder, **options)
    return list(read_log(folder / "log.jsonl"))


def test_accumulation_gives_the_gradient_of_the_whole_step() -> None:
    loss = replace(OBJECTIVE.loss, length_weight=0.5, length_start=0.0)
    whole, split = make(loss=loss), make(replace(CONFIG, accumulation=4), loss)
    first, second = whole.train_step(), split.train_step()
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
    assert first["norm"] == pytest.approx(second["norm"], rel=1e-4)


def test_a_resumed_run_repeats_an_uninterrupted_one(tmp_path: Path) -> None:
    config = replace(CONFIG, evaluate_every=2)
    loss = replace(OBJECTIVE.loss, length_weight=0.5, length_start=0.5)
    whole = make(config, loss)
    log = run(whole, tmp_path / "whole")
    first = make(config, loss)
    run(first, tmp_path / "parts", stop=lambda: first.step == 4)
    second = make(config, loss)
    network = second.drafter.network
    network.update({"fc": {"weight": mx.zeros_like(network.fc.weight)}})
    second.restore(tmp_path / "parts")
    assert second.step == 4
    assert run(second, tmp_path / "parts") == log
    assert same(whole, second)
    assert not same(whole, first)


def test_a_run_that_was_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The log is ahead of the checkpoint then, and its last line may be half written."""
    whole = make()
    log = run(whole, tmp_path / "whole")
    first = make()
    run(first, tmp_path / "parts", stop=lambda: first.step == 3)
    with (tmp_path / "parts" / "log.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "loss": -1}) + '\n{"step": 5, "lo')
    second = make()
    second.restore(tmp_path / "parts")
    assert run(second, tmp_path / "parts") == log
    assert same(whole, second)


DIE = """
import os, signal, sys
from pathlib import Path
import mlx.core as mx
from tests.train.test_loop import make, run
folder, how = Path(sys.argv[1]), sys.argv[2]
trainer = make()
run(trainer, folder, stop=lambda: trainer.step == 3)
whole = mx.save_safetensors

def half(path, *rest):
    whole(path, *rest)
    size = os.path.getsize(path)
    os.truncate(path, size // 2)
    os.kill(os.getpid(), signal.SIGKILL)

if how == "killed":
    mx.save_safetensors = half
else:
    import resource
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
trainer.train_step()
trainer.save(folder)
"""


@pytest.mark.parametrize("how", ["killed", "disk full"])
def test_the_last_checkpoint_survives(how: str, tmp_path: Path) -> None:
    result = forked.run("-c", DIE, str(tmp_path), how)
    assert result.returncode == (-signal.SIGKILL if how == "killed" else 1), result.stderr
    trainer = make()
    trainer.restore(tmp_path)
    assert trainer.step == 3
    again = make()
    for _ in range(3):
        again.train_step()
    assert same(trainer, again)
    run(trainer, tmp_path)  # and what is left of a broken one blocks nothing
    assert [p.name for p in tmp_path.iterdir() if CHECKPOINT in p.name] == [CHECKPOINT]


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    trainer = make(TrainConfig(steps=100, learning_rate=1.0))
    rates = []
    for trainer.step in range(100):
        rates.append(trainer.learning_rate())
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[52] == pytest.approx(0.5)
    assert rates[-1] < 1e-3
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_early_stop_after_patience(tmp_path: Path) -> None:
    """At a rate of 0 nothing improves: one export, then two evaluations without a better result."""
    trainer = make(TrainConfig(steps=50, learning_rate=0.0, evaluate_every=1, patience=2))
    exported: list[int] = []
    run(trainer, tmp_path, export=lambda: exported.append(trainer.step))
    assert trainer.finished
    assert (trainer.step, exported) == (3, [1])


def test_the_target_is_frozen() -> None:
    trainer = make()
    before = [mx.array(v) for _, v in tree_flatten(trainer.drafter.target.model.parameters())]
    codes = mx.array(trainer.drafter.network.transfer_codes.weight)
    for _ in range(2):
        trainer.train_step()
    after = [v for _, v in tree_flatten(trainer.drafter.target.model.parameters())]
    assert all(mx.array_equal(a, b).item() for a, b in zip(before, after, strict=True))
    assert mx.array_equal(codes, trainer.drafter.network.transfer_codes.weight).item()


def test_a_quantised_target_trains_like_its_dequantised_self() -> None:
    packed, plain = tiny_target(), tiny_target()
    nn.quantize(packed, group_size=32, bits=4)
    settings = {"group_size": 32, "bits": 4}
    wide = [
        (f"{name}.weight", mx.dequantize(m.weight, m.scales, m.biases, **settings))
        for name, m in packed.named_modules()
        if "scales" in m
    ]
    plain.load_weights(wide, strict=False)
    records = []
    for model in (packed, plain):
        drafter = tiny_dspine(model)
        OBJECTIVE.start(drafter.network, drafter.target)
        source = Source(sequences(), observe(drafter.target, drafter.config.target_layer_ids))
        trainer = Trainer(drafter, source, CONFIG, OBJECTIVE.loss)
        records.append([trainer.train_step() for _ in range(2)])
    for ours, wanted in zip(*records, strict=True):
        assert ours["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
        assert ours["norm"] == pytest.approx(wanted["norm"], rel=1e-2)


def test_the_cache_gives_the_features_of_the_target(tmp_path: Path) -> None:
    target = Target(tiny_target())
    texts, taps = sequences(), (0, 2)
    cache = FeatureCache(tmp_path / "cache", target, taps, texts)
    cache.fill(texts, lambda done, total: None)
    assert cache.size == os.path.getsize(tmp_path / "cache" / "rows.f16")
    for ours, wanted in zip(
        cache(texts[2:5], 32), observe(target, taps)(texts[2:5], 32), strict=True
    ):
        for row, text in enumerate(texts[2:5]):
            n = len(text.tokens)
            assert mx.allclose(ours[row, :n], wanted[row, :n], rtol=2e-3, atol=1e-3).item()
            assert not ours[row, n:].any().item()
    other = FeatureCache(tmp_path / "cache", target, (0, 1), texts)
    with pytest.raises(ValueError, match="other data, taps or target"):
        other.fill(texts, lambda done, total: None)


def test_start_copies_what_fits_and_opens_no_message() -> None:
    model = tiny_target()
    drafter = tiny_dspine(model, intermediate_size=64)
    OBJECTIVE.start(drafter.network, drafter.target)
    copied = start_layers(drafter.network, drafter.target, (1, 3))
    assert len(copied) == 2 * 11 + 1
    source = model.layers[3].self_attn.q_proj.weight
    assert mx.array_equal(drafter.network.layers[1].self_attn.q_proj.weight, source).item()
    assert not any(write.weight.any().item() for write in drafter.network.injection.writes)
    codes = drafter.network.transfer_codes.weight
    assert mx.allclose((codes**2).sum(axis=-1), mx.ones(codes.shape[0]), atol=1e-5).item()
    narrow = tiny_dspine(model)  # 48 wide, the target 64: its MLPs keep their own weights
    OBJECTIVE.start(narrow.network, narrow.target)
    assert not any(".mlp." in name for name in start_layers(narrow.network, narrow.target, (1, 3)))


def test_a_drafter_overfits(tokenizer: TokenizerWrapper) -> None:
    """Four texts of the target, learnt until the loop accepts more than 90 % of the drafts."""
    shape = Shape(H=32, I=64, hd=8, V=96, taps=(0, 2, 3), B=8)
    drafter = fresh("dspine", {"transfer_rank": 16, "message_size": 8}, shape)
    OBJECTIVE.start(drafter.network, drafter.target)
    model, texts = drafter.target.model, []
    prompts = [np.random.default_rng(i).integers(4, 96, 6).tolist() for i in range(4)]
    for i, prompt in enumerate(prompts):
        tokens = list(prompt)
        for _ in range(17):
            tokens.append(mx.argmax(model(mx.array([tokens]))[0, -1]).item())
        texts.append(Sequence(i, np.array(tokens, np.int32), len(prompt)))
    assert len({tuple(t.tokens[6:].tolist()) for t in texts}) == 4
    source = Source(texts, observe(drafter.target, drafter.config.target_layer_ids))
    config = TrainConfig(steps=100, batch_size=4, num_anchors=8, learning_rate=1e-2)
    trainer = Trainer(drafter, source, config, LossConfig(ce_start=1.0))
    untrained = accepted_share(drafter, tokenizer, prompts)
    while not trainer.finished:
        trainer.train_step()
    assert untrained < 0.2  # the texts are not ones that anything guesses
    assert accepted_share(drafter, tokenizer, prompts) > 0.9


def accepted_share(
    drafter: Drafter, tokenizer: TokenizerWrapper, prompts: list[list[int]]
) -> float:
    drafted = accepted = 0
    for prompt in prompts:
        model = drafter.target.model
        *_, last = stream_generate(
            model, tokenizer, prompt, drafter, max_tokens=16, verify_length=7
        )
        drafted, accepted = drafted + last.drafted, accepted + last.accepted
    return accepted / drafted

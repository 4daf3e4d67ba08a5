"""dspine-mlx train from data to a drafter that generates, on a tiny target."""

import json
import shutil
import signal
from itertools import takewhile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.errors import InputError
from dspine_mlx.generate import generate
from dspine_mlx.load import DEMO, load_drafter
from dspine_mlx.train.config import LossConfig, TrainConfig
from dspine_mlx.train.evaluate import Decoded, acceptance, lookup_length
from dspine_mlx.train.loop import Trainer
from dspine_mlx.train.run import SETTINGS, Run, build, new_run, spread
from dspine_mlx.train.settings import changed, parse_settings
from recipes.ablation import Unrefined
from tests.support.runs import call, equal, start, weights
from tests.support.tiny import random_prompt, tiny_dspine, tiny_target

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method", ["dspine", "dspark", "dflash", "dflash2", "domino"])
def test_a_run_leaves_a_drafter_that_generates(
    method: str, tmp_path: Path, target: Path, data: Path
) -> None:
    folder = tmp_path / "run"
    result = start(folder, target, data, "--plot", method=method)
    assert result.exit_code == 0, result.output
    model, tokenizer = mlx_lm.load(str(target))
    drafter = load_drafter(folder / "drafter", model)
    assert type(drafter.network).__name__.lower() == method
    assert ("earlier" in drafter.network) == (method == "dspine")
    prompt = tokenizer.encode("What is 3 + 1?")
    plain = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
    assert generate(model, tokenizer, prompt, drafter, max_tokens=12) == plain
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in log] == [1, 2, 3, 4]
    assert [("held_out_greedy" in r) for r in log] == [False, True, False, True]
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_finished_run_gives_its_drafter_again(
    tmp_path: Path, target: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the folder is gone: the best step's weights, in another layout if one is named. Before
    that it stays as it is."""
    folder = tmp_path / "run"
    accepted = iter([2.0, 1.5])  # of steps 2 and 4
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", lambda *_: {"held_out_greedy": next(accepted)})
        own = ("--dtype", "float32")
        assert start(folder, target, data, *own, drafter__injection_reach=1).exit_code == 0
    best, config = weights(folder), (folder / "drafter" / "config.json").read_text()
    last = build(Run.read(folder), folder).trainer.drafter
    assert not mx.array_equal(best["fc.weight"], last.network.fc.weight)
    result = call("run", folder, "--resume", "--export", "hf")
    assert result.exit_code == 0, result.output
    assert "move it away" in result.output
    assert (folder / "drafter" / "config.json").read_text() == config
    shutil.rmtree(folder / "drafter")
    result = call("run", folder, "--resume", "--export", "hf", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "move it away" not in result.output
    saved = weights(folder)
    assert "injection.receiver_gate.weight" in saved
    assert mx.array_equal(saved["fc.weight"], best["fc.weight"])


def test_a_finished_run_without_held_out_data_keeps_its_drafter(
    tmp_path: Path, target: Path
) -> None:
    data, folder = tmp_path / "few.jsonl", tmp_path / "run"
    data.write_text(json.dumps({"prompt": "Say it.", "completion": "Two and two."}) + "\n")
    assert start(folder, target, data, "--dtype", "float32").exit_code == 0
    before = weights(folder)
    result = call("run", folder, "--resume", "--dtype", "float16")
    assert "move it away" in result.output
    assert equal(weights(folder), before)
    result = call("run", folder, "--resume", "--export", "hf")
    assert "injection_reach is 2, which other readers" in str(result.exception)


def test_ctrl_c_saves_and_resume_ends_where_an_uninterrupted_run_does(
    tmp_path: Path, target: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(tmp_path / "whole", target, data).exit_code == 0
    step = Trainer.train_step

    def interrupted(self: Trainer) -> Any:
        record = step(self)
        if self.step == 3:
            signal.raise_signal(signal.SIGINT)
        return record

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", interrupted)
        result = start(tmp_path / "parts", target, data)
    assert result.exit_code == 130
    assert f"dspine-mlx train run {tmp_path / 'parts'} --resume" in result.output
    assert call("run", tmp_path / "parts", "--resume").exit_code == 0
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("whole", "parts")]
    assert logs[0] == logs[1]


def test_both_layouts_hold_the_same_drafter(tmp_path: Path, target: Path, data: Path) -> None:
    start(tmp_path / "mlx", target, data, drafter__injection_reach=1)
    start(tmp_path / "hf", target, data, "--export", "hf")
    published = weights(tmp_path / "hf")
    injection = {n.removeprefix("injection.") for n in published if n.startswith("injection.")}
    assert injection == {
        *(f"readouts.{i}.weight" for i in range(2)),
        *(f"writes.{i}.weight" for i in range(2)),
        *(f"{n}.weight" for n in ("message", "receiver_gate", "predecessor_gate")),
        "bias",
    }
    assert published["transfer_codes"].shape == (2048, 16)
    assert published["transfer_ready"].item() is True
    assert len([n for n in published if n.startswith("layers.")]) == 2 * 11
    config = json.loads((tmp_path / "hf" / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["DSpineDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 2]}
    assert config["dspine_config"]["transfer_rank"] == 16
    model, _ = mlx_lm.load(str(target))
    mlx, hf = (load_drafter(tmp_path / name / "drafter", model).network for name in ("mlx", "hf"))
    assert equal(dict(tree_flatten(mlx.parameters())), dict(tree_flatten(hf.parameters())))


def test_a_dspark_says_what_it_is_where_specforge_does(
    tmp_path: Path, target: Path, data: Path
) -> None:
    assert start(tmp_path / "run", target, data, "--export", "hf", method="dspark").exit_code == 0
    config = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())
    assert config["dflash_config"] == {
        "mask_token_id": 3,
        "target_layer_ids": [0, 2],
        "projector_type": "dspark",
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    assert config["markov_rank"] == 4


def test_warm_start_takes_the_backbone_of_a_dflash(
    tmp_path: Path, target: Path, data: Path
) -> None:
    assert start(tmp_path / "dflash", target, data, method="dflash").exit_code == 0
    warm = ("--warm-start", tmp_path / "dflash" / "drafter")
    still = start(tmp_path / "dspine", target, data, *warm, train__learning_rate=0.0)
    assert still.exit_code == 0, still.output
    before, after = weights(tmp_path / "dflash"), weights(tmp_path / "dspine")
    assert equal(before, {name: after[name] for name in before})
    other = start(tmp_path / "other", target, data, *warm, drafter__intermediate_size=40)
    assert isinstance(other.exception, InputError)
    assert "can't start this drafter" in str(other.exception)
    assert "layers.1.mlp.up_proj.weight" in str(other.exception)


def test_the_cache_and_the_target_give_the_same_losses(
    tmp_path: Path, target: Path, data: Path
) -> None:
    start(tmp_path / "online", target, data)
    start(tmp_path / "cached", target, data, "--cache", tmp_path / "features")
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / n / "log.jsonl").read_text().splitlines()]
        for n in ("online", "cached")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_mistakes_are_told_in_one_sentence(tmp_path: Path, target: Path, data: Path) -> None:
    (tmp_path / "there").mkdir()
    for result, wanted in [
        (call("run", tmp_path / "new"), "needs --model and --data"),
        (call("run", tmp_path / "new", "--resume"), "is no training run"),
        (start(tmp_path / "there", target, data), "exists already"),
        (start(tmp_path / "new", target, data, train__steps=0), "steps is 0"),
        (start(tmp_path / "new", target, data, train__step=5), "no setting step"),
        (start(tmp_path / "new", target, data, train__steps="5"), "steps is '5'; it must be int"),
        (start(tmp_path / "new", target, data, loss__alignment="x"), "alignment is 'x'"),
        (start(tmp_path / "new", target, data, drafter__rank=5), "has no setting rank"),
        (start(tmp_path / "new", target, data, method="eagle"), "the method is 'eagle'"),
        (start(tmp_path / "new", target, data, "--target-layers", "a,b"), "whole numbers"),
        (start(tmp_path / "new", target, data, "--target-layers", "1"), "1 target layers were"),
        (start(tmp_path / "new", target, data, "--warm-start", tmp_path / "x"), "no folder"),
        (start(tmp_path / "new", target, tmp_path / "none"), "no data file"),
    ]:
        assert isinstance(result.exception, InputError), (wanted, result.exception)
        assert wanted in str(result.exception)
    assert not (tmp_path / "new").exists()


def test_regenerate_writes_the_targets_own_answers(
    tmp_path: Path, target: Path, data: Path
) -> None:
    """Greedy: mlx-lm's text. A run that was cut off inside a line goes on and loses nothing."""
    output, short = tmp_path / "own.jsonl", ("--max-tokens", 8, "--batch-size", 3)
    args = ("regenerate", data, output, "--model", target, "--temperature", 0, *short)
    assert call(*args).exit_code == 0
    whole = output.read_bytes()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert sorted(row["line"] for row in rows) == list(range(1, 21))
    model, tokenizer = mlx_lm.load(str(target))
    for row in rows[:3]:
        question, answer = row["messages"]
        assert question["content"] == f"What is {row['line'] - 1} + 1?"
        prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True)
        plain = [t for t, _ in zip(generate_step(mx.array(prompt), model), range(8), strict=False)]
        assert answer["content"] == tokenizer.decode([token for token, _ in plain])
    kept = b"\n".join(whole.split(b"\n")[:7]) + b"\n"
    output.write_bytes(kept + whole[len(kept) : len(kept) + 30])
    assert call(*args).exit_code == 0
    again = output.read_bytes()
    assert again.startswith(kept)
    assert sorted(again.splitlines()) == sorted(whole.splitlines())
    (tmp_path / "foreign.jsonl").write_text('{"text": "x"}\n')
    foreign = call("regenerate", data, tmp_path / "foreign.jsonl", "--model", target)
    assert "not written by regenerate" in str(foreign.exception)


def test_regenerate_answers_every_turn_after_its_own_earlier_answers(
    tmp_path: Path,
) -> None:
    """Greedy: what mlx-lm says to the conversation so far. A cut answer ends it."""
    question = (
        "Maria has 9 toys. Her sister has 3 fewer toys than she has. How many toys do they have?"
    )
    says = [("user", question), ("assistant", "a"), ("user", question)]
    says += [("assistant", "b"), ("user", "Thanks.")]
    messages = [{"role": role, "content": content} for role, content in says]
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"messages": messages}) + "\n")
    model, tokenizer = mlx_lm.load(str(DEMO / "target"))

    def greedy(conversation: list[dict[str, str]], count: int) -> str:
        prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
        step = generate_step(mx.array(prompt), model, max_tokens=count)
        ids = takewhile(lambda token: token not in tokenizer.eos_token_ids, (t for t, _ in step))
        return tokenizer.decode(list(ids))

    def regenerated(name: str, count: int, *more: Any) -> dict:
        args = ("--model", DEMO / "target", "--temperature", 0, "--max-tokens", count, *more)
        assert call("regenerate", data, tmp_path / name, *args).exit_code == 0
        return json.loads((tmp_path / name).read_text())

    first = {"role": "assistant", "content": greedy(messages[:1], 200)}
    second = {"role": "assistant", "content": greedy([messages[0], first, messages[2]], 200)}
    row = regenerated("whole.jsonl", 200)
    assert row["messages"] == [messages[0], first, messages[2], second]
    assert row["finish_reason"] == "stop"
    assert regenerated("drafted.jsonl", 200, "--draft-model", DEMO / "drafter") == row
    cut = regenerated("cut.jsonl", 2)
    assert cut["messages"] == [
        messages[0],
        {"role": "assistant", "content": greedy(messages[:1], 2)},
    ]
    assert cut["finish_reason"] == "length"


def test_eval_reports_the_loop_beside_prompt_lookup(
    tmp_path: Path, target: Path, data: Path
) -> None:
    start(tmp_path / "run", target, data)
    pair = ("--model", target, "--draft-model", tmp_path / "run" / "drafter")
    result = call("eval", data, *pair, "--prompts", 2, "--max-tokens", 10, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output.splitlines()[-1])
    for name in ("greedy", "sampled"):
        low, high = report[name]["interval"]
        assert 1 <= low <= report[name]["acceptance_length"] <= high <= 5
        assert len(report[name]["slots"]) == 4
        assert report[name]["prompt_lookup"] >= 1


def test_prompt_lookup_by_hand() -> None:
    """After the first token: 1 2 3 is found, 4 5 is drafted of which 4 is accepted, and 9 follows.
    Then nothing is found, twice."""
    text = Decoded([1, 2, 3, 4, 5, 1, 2], [3, 4, 9, 8, 7], 0, 0)
    assert lookup_length([text], draft=2) == pytest.approx(4 / 3)
    assert lookup_length([Decoded([1, 2], [3, 4], 0, 0)], draft=2) == 1


def test_acceptance_is_weighted_by_rounds() -> None:
    texts = [Decoded([], [], accepted=30, rounds=10), Decoded([], [], accepted=0, rounds=20)]
    length, low, high = acceptance(texts)
    assert length == pytest.approx(2.0)
    assert (low, high) == (1.0, 4.0)  # the resamples with one prompt twice
    same = [Decoded([], [], accepted=30, rounds=10)] * 5
    assert acceptance(same) == (4.0, 4.0, 4.0)


def test_taps_are_spread_as_the_papers_do() -> None:
    assert spread(36, 5) == [1, 9, 17, 25, 33]
    assert spread(6, 3) == [1, 2, 3]
    assert spread(2, 1) == [1]


def test_a_new_dspine_has_the_extension_unless_it_is_to_be_as_published(tmp_path: Path) -> None:
    def drafter(*settings: str, published: bool = False) -> dict[str, Any]:
        return new_run("dspine", "model", "data", list(settings), published=published).drafter

    assert drafter() == {"injection_reach": 2}
    assert drafter("drafter.injection_reach=1") == {"injection_reach": 1}
    assert drafter(published=True) == {}
    assert new_run("dspark", "model", "data", [], published=False).drafter == {}
    run = new_run("dspine", "model", "data", [], published=False)
    run.save(tmp_path / "run")
    assert Run.read(tmp_path / "run").drafter == {"injection_reach": 2}


@pytest.mark.parametrize("name", ["distribution", "law"])
def test_the_earlier_name_of_a_reference_is_read(name: str, tmp_path: Path) -> None:
    """On the command line, and in a stored run."""
    settings = [f"loss.reference={name}", "loss.ce_weight=0.5"]
    run = new_run("dspine", "model", "data", settings, published=True)
    assert (run.loss.reference, run.loss.ce_weight) == ("distribution", 0.5)
    run.save(tmp_path / "run")
    path = tmp_path / "run" / SETTINGS
    path.write_text(path.read_text().replace('"distribution"', f'"{name}"'))
    assert Run.read(tmp_path / "run") == run


def test_settings_are_checked_by_type() -> None:
    sections = parse_settings(
        ["loss.ce_start=1", "train.betas=[0.9, 0.95]", "loss.alignment=token"]
    )
    assert changed(LossConfig(), sections["loss"]) == LossConfig(ce_start=1, alignment="token")
    assert changed(TrainConfig(), sections["train"]).betas == (0.9, 0.95)
    for name, value in (
        ("betas", [0.9]),
        ("steps", 1.5),
        ("checkpoint_layers", 1),
        ("steps", True),
    ):
        with pytest.raises(InputError, match=f"{name} is"):
            changed(TrainConfig(), {name: value})
    for text in (
        *("train.save_every=0", "train.evaluate_every=-1", "train.patience=0", "train.seed=-1"),
        *("train.learning_rate=-1", "train.learning_rate=NaN", "train.clip=1e400", "train.clip=-1"),
        *("train.warmup_ratio=2", "train.betas=[0.9, 1]", "train.betas=[NaN, 0]", "train.steps=0"),
        *("train.max_length=0", "train.short_block_size=-2", f"train.steps={10**12}"),
        *("loss.ce_weight=Infinity", f"loss.ce_weight={10**400}", "loss.ce_end=" + "[" * 10**5),
    ):
        section, _, name = text.partition("=")[0].partition(".")
        config = LossConfig() if section == "loss" else TrainConfig()
        with pytest.raises(InputError, match=f"{name} (is|are)"):
            changed(config, parse_settings([text])[section])
    for text in ("steps=1", "train.steps", "other.steps=1"):
        with pytest.raises(InputError, match="SECTION"):
            parse_settings([text])


def test_a_run_file_says_all(tmp_path: Path) -> None:
    run = Run(
        "m", "d", TrainConfig(betas=(0.8, 0.9)), LossConfig(ce_start=1.0), target_layers=(1, 2)
    )
    run.save(tmp_path / "run")
    assert Run.read(tmp_path / "run") == run


def test_the_unrefined_variant_drafts_from_base_scores(tokenizer: TokenizerWrapper) -> None:
    """recipes/ablation.py judges drafters trained without refinement by this."""
    model = tiny_target()
    drafter = tiny_dspine(model)
    prompt = random_prompt(9)
    features = drafter.target.forward(mx.array(prompt), make_prompt_cache(model), (0, 2))[1]
    refined = drafter.propose(mx.array([7]), features, drafter.make_cache()).ranked()
    drafter = Unrefined(drafter.network, drafter.target, drafter.verifier)
    base = drafter.propose(mx.array([7]), features, drafter.make_cache()).ranked()
    assert mx.array_equal(base.candidates, refined.candidates).item()
    assert mx.allclose(base.first, refined.first, atol=1e-6).item()
    assert mx.array_equal(base.transitions[:, 0], base.transitions[:, -1]).item()
    assert not mx.allclose(base.transitions, refined.transitions, atol=1e-3).item()
    plain = mlx_lm.generate(model, tokenizer, prompt, max_tokens=8)
    assert generate(model, tokenizer, prompt, drafter, max_tokens=8) == plain

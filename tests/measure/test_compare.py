import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.cli import bench_runs
from dspine_mlx.cli.bench_runs import add_energy, analyse, load_pair, run_all
from dspine_mlx.cli.bench_tables import comparison as comparison_cells
from dspine_mlx.cli.bench_tables import label, show_depth
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO
from dspine_mlx.measure import compare as compare_module
from dspine_mlx.measure.compare import (
    Comparison,
    Measurement,
    Models,
    add_margins,
    compare,
    divergence,
    divergence_margin,
    make_run,
    out_of_memory,
    summaries,
    verify_length,
)
from dspine_mlx.round.sampler import Sampler
from tests.support.tiny import plain_steps, random_prompt, scripted


@pytest.fixture(scope="module")
def text(model: nn.Module, tokenizer: TokenizerWrapper) -> list[int]:
    prompt = random_prompt(6)
    return prompt + [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=50)]


@pytest.fixture
def pair(model: nn.Module, tokenizer: TokenizerWrapper, text: list[int]) -> Models:
    return Models(model, tokenizer, scripted(model, text, "right"), Sampler())


def test_modes_are_interleaved_and_compared_with_plain(
    pair: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    measured = compare_module.measure

    def recorded(run: Any, prompt: list[int], max_tokens: int, seed: int) -> Measurement:
        order.append(id(run))
        return measured(run, prompt, max_tokens, seed)

    monkeypatch.setattr(compare_module, "measure", recorded)
    steps = list(compare(pair, ["fixed:7", "plain"], [random_prompt(6)], max_tokens=36, repeat=3))
    comparison = steps[-1]
    assert comparison.modes == ["plain", "fixed:7"]
    assert order == order[:2] * 3
    assert order[0] != order[1]
    summary = comparison.summary("fixed:7")
    assert summary["identical"] == summary["texts"] == 3
    assert summary["acceptance_length"] == 36 / 5  # 4 x 8 + 4 tokens
    assert comparison.summary("plain")["speedup"] == 1


def test_a_speedup_is_the_median_over_pairs_of_runs() -> None:
    def run(speed: float, tokens: list[int]) -> Measurement:
        return Measurement(0.1, speed, speed / 2, tokens * 32, 2.0, 1.0)

    comparison = Comparison(
        ["plain", "auto"],
        {
            "plain": [[run(10, [1, 2]), run(20, [1, 2])], [run(10, [3])]],
            "auto": [[run(30, [1, 2]), run(20, [1, 2])], [run(20, [4])]],
        },
    )
    comparison.runs["fixed:3"] = [[run(60, [1, 2]), run(10, [1, 2])], [run(5, [3])]]
    assert comparison.summary("fixed:3")["auto_speedup"] == 2  # of 0.5, 2 and 4
    summary = comparison.summary("auto")
    assert summary["speedup"] == 2
    assert summary["speedup_range"] == [1, 3]
    assert (summary["auto_speedup"], comparison.summary("plain")["auto_speedup"]) == (1, 2)
    assert (summary["identical"], summary["texts"]) == (2, 3)
    assert (summary["tokens_per_second"], summary["call_tokens_per_second"]) == (20, 10)
    assert list(comparison.divergences("auto")) == [(1, 0)]
    del comparison.runs["auto"]
    assert comparison.summary("plain")["auto_speedup"] is None


def test_divergences_and_margins(pair: Models) -> None:
    assert divergence([1, 2, 3], [1, 2, 4]) == 2
    assert divergence([1, 2], [1, 2, 4]) == 2
    prompt = random_prompt(6)
    plain = [token for token, _ in plain_steps(pair.model, pair.tokenizer, prompt, max_tokens=5)]
    other = (plain[3] + 1) % 2048
    assert divergence_margin(pair, prompt, plain, 3, plain[3]) == 0
    logits = pair.model(mx.array([prompt + plain[:3]]))[0, -1]
    margin = (logits[plain[3]] - logits[other]).item()
    assert margin > 0
    assert divergence_margin(pair, prompt, plain, 3, other) == pytest.approx(margin, rel=1e-4)


def test_summaries_name_where_each_text_diverges(pair: Models) -> None:
    prompt = random_prompt(6)
    plain = [token for token, _ in plain_steps(pair.model, pair.tokenizer, prompt, max_tokens=4)]
    other = [*plain[:2], (plain[2] + 1) % 2048, 7]

    def runs(tokens: list[int]) -> list[list[Measurement]]:
        return [[Measurement(0.1, 10, 9, tokens, 2.0, 1.0, Counter({3: 2, 1: 1}))]]

    comparison = Comparison(
        ["plain", "auto", "fixed:2"],
        {"plain": runs(plain), "auto": runs(other), "fixed:2": runs(plain[:3])},
    )
    listed = summaries(comparison, greedy=True)
    assert [[place["margin"] for place in row["forks"]] for row in listed] == [
        [],
        [None],
        [None],
    ]
    add_margins(listed, comparison, pair, [prompt])
    rows = {row["way"]: row for row in listed}
    margin = divergence_margin(pair, prompt, plain, 2, other[2])
    assert rows["plain"]["forks"] == []
    assert rows["auto"]["forks"] == [{"prompt": 1, "token": 3, "margin": margin}]
    assert rows["fixed:2"]["forks"] == [{"prompt": 1, "token": 4, "margin": None}]
    assert rows["auto"]["verify_lengths"] == {1: 1, 3: 2}
    names, cells = comparison_cells(list(rows.values()))
    assert column(names, cells, "fork") == ["", f"3 ({margin:.2g})", "4"]
    assert column(names, cells, "speed-up") == ["-"] * 3  # of 3 and 4 tokens
    for row, speed in zip(listed, (2.5, 1.0, None), strict=True):
        row["auto_speedup"] = speed
    assert column(*comparison_cells(listed), "auto") == ["2.50", "1.00", "-"]
    for row in listed:
        row["auto_speedup"] = None
    assert "auto" not in comparison_cells(listed)[0]
    auto = summaries(comparison, greedy=False)[1]
    assert (auto["identical"], auto["forks"]) == (None, [])


def column(names: list[str], rows: list[list[str]], name: str) -> list[str]:
    return [row[names.index(name)] for row in rows]


def test_texts_below_32_tokens_have_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    def runs(speed: float, *lengths: int) -> list[list[Measurement]]:
        return [[Measurement(0.1, speed, speed, [1] * n, 2.0, 1.0)] for n in lengths]

    short = Comparison(["plain", "auto"], {"plain": runs(1, 31, 31), "auto": runs(178, 31, 31)})
    some = Comparison(["plain", "auto"], {"plain": runs(1, 31, 32), "auto": runs(2, 31, 32)})
    for comparison, speedup, told in ((short, None, 0), (some, 2, 1)):
        row = comparison.summary("auto")
        assert (row["speedup"], row["texts_in_ratios"], row["texts"]) == (speedup, told, 2)
        modes = [comparison.summary(mode) | {"forks": []} for mode in comparison.modes]
        show_depth({"depth": 0, "ways": modes, "dropped": {}, "splits": []})
        said = capsys.readouterr().out
        assert f"{4 - 2 * told} of 4 texts have fewer than 32 tokens" in said
        assert ("2.00 (2.00-2.00)" in said) == bool(told)
        assert "178.00" not in said


def test_ctrl_c_after_the_measurement_keeps_it(
    pair: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_runs, "splits", interrupted)
    one = [[Measurement(0.1, 10, 9, [1, 2], 2.0, 1.0)]]
    comparison = Comparison(["plain", "auto"], {"plain": one, "auto": one})
    result = analyse(comparison, pair, [random_prompt(6)], 8)
    assert [row["way"] for row in result["ways"]] == ["plain", "auto"]
    assert "Interrupted" in capsys.readouterr().err
    assert analyse(comparison, pair, [random_prompt(6)], 0) == result


@pytest.mark.parametrize(("tokens", "rounds"), [(15, 5), (16, 6)])
def test_mlx_lms_own_speculative_decoding_is_a_mode(pair: Models, tokens: int, rounds: int) -> None:
    """The target is its own draft model, so every draft is accepted: 2 + 1 tokens per round."""
    own = replace(pair, model=mlx_lm.load(str(DEMO / "target"))[0], drafter=None)
    mode = f"mlx-lm-draft:{DEMO / 'target'}"
    *_, comparison = compare(own, [mode], [random_prompt(6)], max_tokens=tokens, repeat=1)
    row = comparison.summary(mode)
    assert row["acceptance_length"] == tokens / rounds
    assert (row["identical"], row["texts"]) == (1, 1)
    assert label(mode) == "mlx-lm-draft:target"
    with pytest.raises(InputError, match="there is no folder ./nowhere"):
        make_run("mlx-lm-draft:./nowhere", own)


def test_mlx_lm_needs_a_draft_model_with_the_targets_vocabulary(
    pair: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small:
        vocab_size = 7

    monkeypatch.setattr(compare_module, "open_target", lambda *_: (pair.model, Small()))
    with pytest.raises(InputError, match="has a vocabulary of 7 tokens, the target's has 2048"):
        make_run(f"mlx-lm-draft:{DEMO / 'target'}", pair)


OUT_OF_MEMORY = [
    MemoryError(),
    RuntimeError("[malloc] Unable to allocate 8589934592 bytes."),
    RuntimeError("[metal::malloc] Attempting to allocate 9 bytes which is greater than the ..."),
    RuntimeError("[metal::malloc] Resource limit (499000) exceeded."),
    RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (00000008:...)"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_mlx_has_several_words_for_a_lack_of_memory(error: Exception) -> None:
    assert out_of_memory(error)


def test_a_mode_that_runs_out_of_memory_is_dropped_alone(
    pair: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, error = compare_module.make_run, OUT_OF_MEMORY[1]

    def limited(mode: str, pair: Models) -> Any:
        run = made(mode, pair)

        def running(prompt: list[int], n: int, progress: Any) -> Iterator[Any]:
            yield from run(prompt, n, progress)
            if mode == "fixed:3" and n > 8:  # not in the warm-up
                raise error

        return running

    monkeypatch.setattr(compare_module, "make_run", limited)
    prompts = [random_prompt(6)] * 2
    *_, comparison = compare(pair, ["fixed:3", "fixed:7"], prompts, max_tokens=12, repeat=2)
    assert comparison.modes == ["plain", "fixed:7"]
    assert comparison.dropped == {"fixed:3": f"out of memory: {error}"}
    assert comparison.summary("fixed:7")["identical"] == 4


@pytest.mark.parametrize("error", [RuntimeError("[conv] a bug"), KeyError("a bug")], ids=repr)
def test_other_errors_are_not_taken_for_a_lack_of_memory(error: Exception) -> None:
    comparison = Comparison(["plain", "auto"], {"plain": [], "auto": []})
    with pytest.raises(type(error), match="a bug"), comparison.surviving("auto"):
        raise error
    with pytest.raises(MemoryError), comparison.surviving("plain"):
        raise MemoryError
    assert (comparison.modes, comparison.dropped) == (["plain", "auto"], {})


def test_a_target_that_cant_be_drafted_for_is_measured_plainly(
    pair: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caches can't roll back, which only a try shows."""

    def refused(*args: Any, **options: Any) -> Iterator[Any]:
        raise InputError("can't roll back OddCache to an accepted prefix")
        yield

    monkeypatch.setattr(compare_module, "stream_generate", refused)
    *_, comparison = compare(pair, ["auto"], [random_prompt(6)], max_tokens=5, repeat=1)
    assert comparison.modes == ["plain"]
    assert comparison.dropped == {"auto": "can't roll back OddCache to an accepted prefix"}


def test_a_drafter_that_does_not_fit_leaves_mlx_lms_modes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "drafter"
    shutil.copytree(DEMO / "drafter", wrong)
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"num_target_layers": 7}))
    modes = ["plain", "auto", "fixed:3", "mlx-lm-draft:x"]
    pair, kept = load_pair(str(DEMO / "target"), str(wrong), 0.0, modes)
    assert (pair.drafter, kept) == (None, ["plain", "mlx-lm-draft:x"])
    said = capsys.readouterr().err
    assert said.startswith("Nothing is drafted, only mlx-lm's own decoding is measured:")
    assert "it was made for 7 target layers, the target has 6" in said
    pair, kept = load_pair(str(DEMO / "target"), None, 0.0, modes)
    assert (pair.drafter, kept) == (None, ["plain", "mlx-lm-draft:x"])
    with pytest.raises(InputError, match="there is no folder ./nowhere"):
        load_pair(str(DEMO / "target"), "./nowhere", 0.0, modes)


@pytest.mark.parametrize("mode", ["fast", "fixed:", "fixed:x", "auto:3x", "mlx-lm-draft:"])
def test_unknown_modes_are_refused(pair: Models, mode: str) -> None:
    with pytest.raises(InputError, match="modes are plain, auto, fixed:N"):
        make_run(mode, pair)


def test_modes_on_offer(pair: Models) -> None:
    assert [verify_length(mode) for mode in ("plain", "mlx-lm-draft:m", "auto", "fixed:12")] == [
        None,
        None,
        "auto",
        12,
    ]
    with pytest.raises(InputError, match="auto needs a drafter"):
        make_run("auto", replace(pair, drafter=None))


def test_ctrl_c_keeps_what_was_measured() -> None:
    first = Comparison(["plain"])

    def steps() -> Iterator[Comparison]:
        yield first
        raise KeyboardInterrupt

    assert run_all(steps(), "depth 0", 3) == (first, False)
    assert run_all(iter([first]), "depth 0", 1) == (first, True)


def test_energy_is_measured_for_root_on_a_mac_only(
    pair: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, counted = [random_prompt(6)], []

    def joules(run: Any, prompts: list[list[int]]) -> float:
        counted.append(run(prompts[0]))
        return 0.25

    monkeypatch.setattr(bench_runs.energy, "joules_per_token", joules)
    for mac, root, lines in ((False, True, 0), (True, False, 1), (True, True, 0)):
        monkeypatch.setattr(bench_runs.energy, "on_mac", lambda mac=mac: mac)
        monkeypatch.setattr(bench_runs.energy, "is_root", lambda root=root: root)
        rows: list[dict[str, Any]] = [{"way": "plain"}, {"way": "fixed:7"}]
        add_energy(rows, pair, prompts, 5)
        assert len(capsys.readouterr().err.splitlines()) == lines
        wanted = 0.25 if mac and root else math.nan
        assert [row.get("joules_per_token", math.nan) for row in rows] == pytest.approx(
            [wanted] * 2, nan_ok=True
        )
    assert counted == [5, 5]

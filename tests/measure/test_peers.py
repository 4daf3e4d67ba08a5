import io
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from dspine_mlx.load import DEMO
from tests.bench.peers.code_lines import code_lines, python_lines
from tests.bench.peers.compare import Book, Mode, Worker, modes_for
from tests.bench.peers.draft_lm import cut
from tests.bench.peers.report import divergences, markdown, ours, summary
from tests.bench.peers.worker import answer, parser, replies
from tests.support.tiny import random_prompt

pytestmark = pytest.mark.slow


def run(mode: str, prompt: int, round_: int, tokens: list[int], seconds: float) -> dict[str, Any]:
    place = {"way": mode, "prompt": prompt, "round": round_}
    took = {"tokens": tokens, "seconds": seconds, "cpu_seconds": 3.0, "rounds": 2}
    return place | took | {"memory": seconds / 10}


RECORDS = [
    {"ways": ["mlx-lm", "fast", "broken"]},
    run("mlx-lm", 0, 0, [1, 2, 3, 4], 4.0),
    run("mlx-lm", 0, 1, [1, 2, 3, 4], 2.0),
    run("mlx-lm", 1, 0, [5, 6], 1.0),
    {"way": "fast", "version": "1.2", "code_lines": 30},
    run("fast", 0, 0, [1, 2, 3, 4], 1.0),
    run("fast", 0, 1, [1, 2, 3, 4], 1.0),
    run("fast", 1, 0, [5, 7], 1.0),
    {"way": "fast", "prompt": 1, "margin": 0.00123},
    run("broken", 0, 0, [1], 1.0),
    {"way": "broken", "error": "RuntimeError: no Metal | back-end"},
]


def test_a_row_compares_with_plain_decoding_of_the_same_prompt_and_round() -> None:
    row = summary(RECORDS, "fast")
    assert row["tokens_per_second"] == 4.0  # of 4, 4 and 2
    assert row["speedup"] == 2.0  # of 4, 2 and 1
    assert row["speedup_range"] == [1.0, 4.0]
    assert row["cpu_speedup"] == 1.0
    assert row["tokens_per_round"] == 10 / 6
    assert (row["identical"], row["texts"]) == (2, 3)
    assert row["forks"] == [{"prompt": 1, "after": 1, "margin": 0.00123}]
    assert row["peak_memory_gb"] == 0.1
    assert (row["version"], row["code_lines"]) == ("1.2", 30)
    assert summary(RECORDS, "mlx-lm")["speedup"] == 1.0


def test_packages_are_compared_alike_text_by_text() -> None:
    """A text of more tokens may take longer."""
    records = [
        run("dspine-mlx, D, 7 tokens", 0, 0, [1, 2], 1.0),
        run("dspine-mlx, D, 7 tokens", 0, 1, [1, 2], 1.0),
        run("dspine-mlx, D, 7 tokens", 1, 0, [1, 2], 1.0),
        run("dspine-mlx, D, own length", 0, 0, [1, 2], 100.0),
        run("other, D, 7 tokens", 0, 0, [1, 2], 9.0),
        run("other, D, 7 tokens", 0, 1, [1, 2], 0.5),
        run("other, D, 7 tokens", 1, 0, [1, 2, 3], 3.0),
        run("other, E, 7 tokens", 0, 0, [1, 2], 1.0),
    ]
    assert ours(records, "other, D, 7 tokens") == 2.0  # of 9, 0.5 and 2
    assert ours(records, "other, E, 7 tokens") is None
    assert ours(records, "dspine-mlx, D, 7 tokens") is None
    row = {"way": "x", "version": "1", "code_lines": 1} | summary(RECORDS, "fast") | {"ours": 1.234}
    assert markdown([row]).splitlines()[-1].split(" | ")[5] == "1.23"


@pytest.mark.parametrize(
    ("other", "after"),
    [([1, 2, 9, 4], 2), ([9, 2, 3, 4], 0), ([1, 2], 2), ([1, 2, 3, 4, 5], 4)],
)
def test_a_divergence_is_after_the_last_shared_token(other: list[int], after: int) -> None:
    records = [run("mlx-lm", 0, 0, [1, 2, 3, 4], 1.0), run("other", 0, 0, other, 1.0)]
    assert list(divergences(records, "other")) == [(0, after)]
    assert not list(divergences(records, "mlx-lm"))


def test_the_table_has_a_row_for_every_mode_and_says_why_one_has_no_figures() -> None:
    lines = markdown([summary(RECORDS, mode) for mode in RECORDS[0]["ways"]]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert {len(line) for line in cells} == {11}
    assert cells[3] == [
        "fast",
        "1.2",
        "4.0",
        "2.00",
        "1.00",
        "",
        "1.67",
        "2/3",
        "after 1 (0.0012)",
        "0.100",
        "30",
    ]
    assert cells[4][0] == "broken"
    assert "RuntimeError: no Metal / back-end" in cells[4]


def test_an_interrupted_run_goes_on_but_not_with_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    settings = {"ways": ["mlx-lm"], "rounds": 2}
    Book(path, settings).add(run("mlx-lm", 0, 0, [1], 1.0))
    assert Book(path, settings).records == [settings, run("mlx-lm", 0, 0, [1], 1.0)]
    with pytest.raises(Exception, match="other settings"):
        Book(path, settings | {"rounds": 3})


def test_whole_blocks_hold_one_more_token_in_dspark(tmp_path: Path) -> None:
    for kind in ("DSpark", "DFlash"):
        (tmp_path / kind).mkdir()
        config = {"architectures": [f"{kind}DraftModel"], "block_size": 8}
        (tmp_path / kind / "config.json").write_text(json.dumps(config))
    modes = list(modes_for([tmp_path / "DSpark", tmp_path / "DFlash"], None))
    lengths = {
        (w.package, w.draft_model and w.draft_model.name): w.length for w in modes if w.length
    }
    assert lengths == {
        ("dspine_mlx", "DSpark"): 8,
        ("mlx_dspark", "DSpark"): 8,
        ("dspine_mlx", "DFlash"): 7,
        ("mlx_dspark", "DFlash"): 7,
        ("dflash_mlx", "DFlash"): 7,
        ("dflash", "DFlash"): 7,
    }
    assert modes[0].package == "mlx_lm"
    assert modes[0].draft_model is None


SOURCE = '''"""Docstring
of two lines."""

# comment
x = """text
in two lines"""  # comment


def f():
    "docstring"
    return (
        x
    )
'''


def test_code_lines_leave_out_comments_and_docstrings(tmp_path: Path) -> None:
    assert python_lines(SOURCE) == {5, 6, 9, 11, 12, 13}
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "inner" / "a.py").write_text(SOURCE)
    (tmp_path / "package" / "k.metal").write_text("// comment\n\nfloat x = 1; // one\n")
    (tmp_path / "package" / "notes.md").write_text("x\n")
    assert code_lines(tmp_path / "package") == 7


def test_a_small_model_is_the_targets_first_layers(tmp_path: Path) -> None:
    cut(DEMO / "target", tmp_path / "small", 1)
    small, target = (mlx_lm.load(str(f))[0] for f in (tmp_path / "small", DEMO / "target"))
    prompt = mx.array([random_prompt(5)])
    inner = target.model
    hidden = inner.norm(inner.layers[0](inner.embed_tokens(prompt), "causal"))
    assert mx.array_equal(small(prompt), inner.embed_tokens.as_linear(hidden))
    assert len(small.layers) == 1


def test_workers_answer_with_the_text_and_what_it_took() -> None:
    request = json.dumps({"prompt": random_prompt(9), "max_tokens": 12})
    drafted = ("--draft-model", str(DEMO / "drafter"), "--length", "3")
    texts = []
    for mode, options in (("mlx_lm", ()), ("dspine_mlx", drafted)):
        arguments = parser().parse_args([mode, "--target", str(DEMO / "target"), *options])
        facts, reply = replies(arguments, io.StringIO(request))
        assert (Path(facts["folder"]) / "__init__.py").exists()
        texts.append(reply["tokens"])
        assert reply["seconds"] > 0
        assert reply["cpu_seconds"] > 0
        assert reply["memory"] > 5e-3  # float16 weights of 2.8M parameters
        assert reply["rounds"] <= len(reply["tokens"]) + 1
    assert texts[0] == texts[1]


def test_an_end_token_is_not_part_of_the_text() -> None:
    assert answer(lambda prompt, n: ([*prompt, 7], 2), {7}, [1, 2], 3)["tokens"] == [1, 2]
    assert answer(lambda prompt, n: ([7, *prompt], 2), {7}, [1, 2], 3)["tokens"] == [7, 1, 2]


def test_a_mode_that_fails_says_why(tmp_path: Path) -> None:
    with Worker(Mode("x", "dspine_mlx", tmp_path), DEMO / "target", tmp_path) as worker:
        reply = worker.read()
    assert reply["error"].startswith("InputError: ")
    assert str(tmp_path) in reply["error"]

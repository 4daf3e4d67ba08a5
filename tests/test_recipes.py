"""The ablation's table, from results by prompt."""

import json
import random
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from recipes import word_problems
from recipes.ablation import BEYOND, MIXES, TABLE, against, main, table

ROOT = Path(__file__).parent.parent


def record(name: str, seed: int, pairs: list[list[int]]) -> dict:
    counts = {"greedy": pairs, "sampled": pairs, "greedy_lookup": 1.5, "sampled_lookup": 1.25}
    return {"name": name, "seed": seed, "processor_seconds": 90.0, **counts}


def test_the_table_pools_seeds_and_pairs_prompts(tmp_path: Path) -> None:
    """1 + accepted / rounds over all texts, and how many times DSpine's of the same seed."""
    rows = [record("DSpine", 0, [[10, 10], [30, 10]]), record("DSpine", 1, [[20, 10], [20, 10]])]
    rows.append(record("DFlash", 1, [[5, 10], [5, 10]]))
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    _, _, dflash, dspine = table(tmp_path, ["DFlash", "DSpark", "DSpine"]).splitlines()
    cells = [cell.strip() for cell in dflash.strip("|").split("|")]
    assert cells == ["DFlash", "1", *["1.50 (1.50 to 1.50)"] * 2] + [
        *["-50.0 % (-50.0 to -50.0)"] * 2,
        "1.50, 1.25",
        "1.5",
    ]
    assert dspine.startswith("| DSpine | 2 | 3.00 (")


def test_only_common_seeds_are_compared() -> None:
    dspine = [record("DSpine", 0, [[10, 10]]), record("DSpine", 1, [[30, 10]])]
    dspark = record("DSpark", 1, [[10, 10]]) | {"sampled": [[30, 10]]}
    assert against([dspark], dspine, "greedy") == "-50.0 % (-50.0 to -50.0)"
    assert against([dspark], dspine, "sampled") == "+0.0 % (+0.0 to +0.0)"
    assert against([record("DSpark", 2, [[10, 10]])], dspine, "greedy") == ""


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [("--set", "loss.ce_weight=1", "losses belong"), ("--only", "DSpin", "no variant 'DSpin'")],
)
def test_what_would_be_ignored_is_refused(option: str, value: str, reason: str) -> None:
    files = ("runs", "--model", "none", "--data", "none", "--held-out", "none")
    program = typer.Typer()
    program.command()(main)
    result = CliRunner().invoke(program, [*files, option, value])
    assert result.exit_code == 2
    assert reason in result.output


@pytest.mark.parametrize(
    ("name", "rows"),
    [("demo", TABLE), ("demo", MIXES), ("smollm2", TABLE[:3]), ("demo-2012", BEYOND)],
)
def test_the_page_has_the_tables_of_the_results(name: str, rows: list[str]) -> None:
    page = (ROOT / "docs" / "notes" / "training-results.md").read_text(encoding="utf-8")
    assert table(ROOT / "recipes" / "results" / name, rows) in page


def test_questions_are_distinct_and_end_where_a_template_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(rng: random.Random, difficulty: float) -> dict:
        return {"question": f"a {rng.randint(1, 6)}"}

    def page(rng: random.Random, difficulty: float) -> dict:
        return {"question": f"page {rng.randint(1, 10**6)}"}

    monkeypatch.setattr(word_problems, "templates", lambda: [page, die])
    both = list(word_problems.questions(12, seed=1))
    assert sorted(both[1::2]) == [f"a {n}" for n in range(1, 7)]
    assert all(text.startswith("page") for text in both[::2])
    with pytest.raises(ValueError, match="die has no 7 distinct questions"):
        list(word_problems.questions(14, seed=1))
    assert set(word_problems.questions(6, seed=1, chosen=[1])) == {f"a {n}" for n in range(1, 7)}

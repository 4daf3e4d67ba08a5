"""The predicted tables of the notes on kernels are what the scripts print now."""

import re

import pytest

from tests.bench import predicted_speeds, verify_attention, verify_rows
from tests.bench.verify_rows import LARGE, SHOWN, predicted, raced, stock, tile
from tests.support.documentation import ROOT

PAGE = (ROOT / "docs" / "notes" / "kernels.md").read_text(encoding="utf-8")


def test_tables_are_what_the_scripts_print(capsys: pytest.CaptureFixture[str]) -> None:
    verify_rows.main()
    verify_attention.main()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(printed) > 90
    assert [line for line in printed if line not in PAGE.splitlines()] == []


@pytest.mark.slow
def test_simulated_speeds_are_what_the_script_prints() -> None:
    """To 0.01: other machines may round a half the other way."""
    shown = [line for line in PAGE.splitlines() if re.match(r"\| M\d.* bits \| \d", line)]
    printed = list(predicted_speeds.rows())
    assert len(shown) == len(printed) == 12
    for line, other in zip(shown, printed, strict=True):
        assert re.sub(r"\d\.\d\d", "", line) == re.sub(r"\d\.\d\d", "", other)
        figures = [list(map(float, re.findall(r"\d\.\d\d", text))) for text in (line, other)]
        assert figures[0] == pytest.approx(figures[1], abs=0.0101), other


@pytest.mark.parametrize("chip", SHOWN)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_race_never_chooses_what_is_slower(chip: str, bits: int) -> None:
    for rows in range(1, 17):
        assert raced(chip, rows, bits, LARGE) <= stock(chip, rows, bits, LARGE)


def test_bytes_bound_what_arithmetic_does_not() -> None:
    """By hand: 17408 x 5120 at 8 bits are 94.7 MB with scales, read at 80 % of 68 GB/s in 1.74 ms,
    and a launch; 16 rows take 19.2 operations per weight at 80 % of 1.3e12 per second, 1.65 ms."""
    assert tile("M1", 16, 8, LARGE) == pytest.approx(2.5e-6 + 17408 * 5120 * 1.0625 / (0.8 * 68e9))
    one = next(entry for entry in predicted() if entry["name"] == "M1, 8 bits, kernels")
    assert one["rows"]["16"] == pytest.approx(1.0, abs=1e-3)


def test_attention_by_hand() -> None:
    """8 rows of 4 heads are 4 tiles. Each takes 10 operations for each of 2 x 8 x 128 x 8192 values
    at 80 % of 1.3e12 per second; a head of 512 columns takes two simdgroups, so K/V are read twice
    for 8 tiles."""
    few, _, wide = verify_attention.LAYERS
    values = 2 * 8 * 128 * 8192
    assert verify_attention.parts("M1", 8, few) == pytest.approx(
        5e-6 + values * 40 / (0.8 * 1.3e12)
    )
    read = 2 * 2 * 4 * 512 * 8192 * 2 / (0.8 * 68e9)
    assert verify_attention.parts("M1", 8, wide) == pytest.approx(
        5e-6 + max(read, 2 * 4 * 512 * 8192 * 80 / (0.8 * 1.3e12))
    )

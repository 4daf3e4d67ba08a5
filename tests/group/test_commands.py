"""Commands of two processes: what rank 0 prints, and that the other prints nothing."""

import json
from pathlib import Path

import pytest

from tests.support.ranks import Ended, Ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

TURNS = "Tom buys 4 boxes of 6 pens. How many pens?\nAnd 3 boxes?\n/reset\nAnd 2 boxes?\n/quit\n"

CALIBRATE = """
import sys
from dspine_mlx.cli import main
from dspine_mlx.verify_length import fit

fit.LEAST_ROUNDS = 4  # so that two texts are enough
sys.argv = {words}
main()
"""
AUTO = """
from dspine_mlx.generate import stream_generate
from dspine_mlx.group.meet import meet
from dspine_mlx.load import DEMO
from dspine_mlx.verify_length.schedule import prepare

group = meet()
if group.follows:
    group.follow(str(DEMO / "target"), {"trust_remote_code": False})
with group.leading():
    model, tokenizer, drafter = group.load(str(DEMO / "target"), str(DEMO / "drafter"))
    schedule = prepare(drafter, profile=False)
    print(schedule.calibrations["greedy"].rounds)
    assert schedule.policy(drafter, None).chances.calibration == schedule.calibrations["greedy"]
    for length in ("auto", 0):
        texts = stream_generate(
            model, tokenizer, "Tom buys 4", drafter, max_tokens=12, verify_length=length
        )
        print([r.token for r in texts])
"""


def command(n: int, words: list[str], folder: Path, typed: str = "") -> list[Ended]:
    """The ranks of a command that reads from rank 0's standard input."""
    lines = folder / "typed"
    lines.write_text(typed)
    return Ranks([["-m", "dspine_mlx.cli", *words]] * n, folder, lines).end()


def test_a_chat_goes_on_from_turn_to_turn(tmp_path: Path) -> None:
    words = ["chat", "-m", "20", "--verify-length", "5"]
    lead, other = command(2, words, tmp_path, TURNS)
    (alone,) = command(1, words, tmp_path, TURNS)
    assert lead.out == alone.out
    assert lead.out.count("\n") >= 3
    assert [(e.status, e.said) for e in (lead, other)] == [(0, []), (0, [])]
    assert other.out == ""


def test_bench_compares_with_mlx_lms_own_decoding_in_the_group(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a b c\n")
    found = tmp_path / "found.json"
    words = ["bench", "--suite", str(tmp_path / "prompts.txt"), "-m", "12", "--repeat", "1"]
    words += ["--compare", "fixed:4", "--json", str(found)]
    lead, other = command(2, words, tmp_path)
    assert (lead.status, other.status, other.out) == (0, 0, ""), lead.err
    (result,) = json.loads(found.read_text())["results"]
    plain, fixed = result["ways"]
    assert (plain["way"], fixed["way"]) == ("plain", "fixed:4")
    assert fixed["identical"] == fixed["texts"] == 1
    assert result["splits"][0]["rounds"] > 0


def test_calibrate_writes_what_auto_reads(tmp_path: Path) -> None:
    fitted, held_out = tmp_path / "fitted.txt", tmp_path / "held-out.txt"
    fitted.write_text("Tom buys 2 boxes of 9 pens. How many?\nAnn has 5 cats. She gives away 2.\n")
    held_out.write_text("Tom buys 4 boxes of 6 pens. How many?")
    words = ["dspine-mlx", "calibrate", "--prompts", str(fitted), "--held-out", str(held_out)]
    words += ["-m", "24", "--temps", "0", "--json"]
    commands = [["-c", CALIBRATE.format(words=words)], ["-m", "dspine_mlx.cli", *words[1:]]]
    lead, other = Ranks(commands, tmp_path).end()
    assert (lead.status, other.status, other.out) == (0, 0, ""), lead.err
    written = json.loads(lead.out)
    (file,) = (tmp_path / ".cache" / "dspine-mlx").glob("calibration-*.json")
    assert written["file"] == str(file)
    rounds = written["modes"]["greedy"]["rounds"]
    assert rounds >= 4
    lead, other = Ranks([["-c", AUTO]] * 2, tmp_path).end()
    assert (lead.status, other.status, other.out) == (0, 0, ""), lead.err
    read, auto, plain = map(json.loads, lead.out.splitlines())
    assert read == rounds
    assert auto == plain


def test_doctor_describes_the_group(tmp_path: Path) -> None:
    lead, other = command(2, ["doctor", "--json"], tmp_path)
    findings = {f["name"]: f["detail"] for f in json.loads(lead.out)["findings"]}
    assert findings["group"].startswith("2 ranks on ")
    assert (other.status, other.out) == (0, "")

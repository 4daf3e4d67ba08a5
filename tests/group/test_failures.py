"""What ends a group: each case in bounded time, with one sentence and a status."""

import json
import signal
from pathlib import Path

import pytest

from tests.support.families import build
from tests.support.ranks import Ranks, run_ranks, save_target

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

GENERATE = ["-m", "dspine_mlx.cli", "generate", "-p", "a b c", "--ignore-chat-template"]
ENDLESS = ["-m", "4000", "--quiet"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_target(build("qwen3"), tmp_path_factory.mktemp("target") / "random"))


def running(target: str, folder: Path, patience: str = "100") -> Ranks:
    """A group in the middle of a long text."""
    arguments = [*GENERATE, "--model", target, "--patience", patience, *ENDLESS]
    ranks = Ranks([arguments] * 2, folder)
    assert ranks.out[0].read(1)
    return ranks


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_ends_the_others(lost: int, target: str, tmp_path: Path) -> None:
    ranks = running(target, tmp_path)
    ranks.processes[lost].kill()
    ended = ranks.end(60)
    assert ended[lost].status == -signal.SIGKILL
    assert ended[1 - lost].status == 1
    assert len(ended[1 - lost].said) == 1
    assert f"rank {1 - lost} of 2 lost another rank" in ended[1 - lost].said[0]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_ends_the_others(stopped: int, target: str, tmp_path: Path) -> None:
    ranks = running(target, tmp_path, patience="12")
    ranks.processes[stopped].send_signal(signal.SIGSTOP)
    try:
        status = ranks.processes[1 - stopped].wait(60)
    finally:
        ranks.processes[stopped].kill()
    ended = ranks.end(60)
    assert status == 1
    assert len(ended[1 - stopped].said) == 1
    assert "has waited 12 seconds for another rank" in ended[1 - stopped].said[0]


def test_an_interrupt_ends_all(target: str, tmp_path: Path) -> None:
    ranks = running(target, tmp_path)
    for process in ranks.processes:  # a terminal's Ctrl-C reaches all of a launch's processes
        process.send_signal(signal.SIGINT)
    lead, other = ranks.end(60)
    assert lead.status != 0
    assert other.out == ""
    assert (other.status, len(other.said)) in ((0, 0), (1, 1))  # 1: as a lost rank ends it


def test_a_reader_that_leaves_ends_all(target: str, tmp_path: Path) -> None:
    ranks = running(target, tmp_path)
    ranks.out[0].close()
    lead, other = ranks.end(60)
    assert lead.status != 0
    assert (other.status, other.said) == (0, [])


def test_a_rank_that_does_not_come(target: str, tmp_path: Path) -> None:
    ranks = Ranks([[*GENERATE, "--model", target, "--patience", "3"], ["-c", "0"]], tmp_path)
    lead, _ = ranks.end(60)
    assert lead.status not in (0, None)
    assert len(lead.said) == 1
    assert "waited 3 seconds for the others of its group to start" in lead.said[0]


def test_other_weights_on_one_rank(target: str, tmp_path: Path) -> None:
    other = str(save_target(build("qwen3", seed=1), tmp_path / "other"))
    ranks = Ranks([[*GENERATE, "--model", one] for one in (target, other)], tmp_path)
    lead, follower = ranks.end()
    assert lead.status == 2
    assert len(lead.said) == 1
    assert "rank 1 has other weights" in lead.said[0]
    assert (follower.status, follower.said, follower.out) == (0, [], "")


def test_refusals_are_rank_0s_alone(target: str, tmp_path: Path) -> None:
    """Before anything is loaded, and after the target is: one sentence, by one rank."""
    cases = {
        "can't split by layers": ["--model", target, "--pipeline"],
        "max_tokens is 0": ["--model", target, "-m", "0"],
        str(tmp_path / "none"): ["--model", target, "--draft-model", str(tmp_path / "none")],
    }
    for sentence, options in cases.items():
        lead, follower = run_ranks(2, [*GENERATE, *options], tmp_path)
        assert lead.status == 2, lead.err
        assert len(lead.said) == 1
        assert sentence in lead.said[0]
        assert (follower.status, follower.said, follower.out) == (0, [], "")


def test_one_text_in_json(tmp_path: Path) -> None:
    """The pair that ships, drafted for by two processes; only rank 0 prints."""
    arguments = [*GENERATE, "-m", "16", "--json", "--verify-length", "7"]
    lead, follower = run_ranks(2, arguments, tmp_path)
    (alone,) = run_ranks(1, arguments, tmp_path)
    two, one = json.loads(lead.out), json.loads(alone.out)
    assert (two["ranks"], one["ranks"]) == (2, 1)
    assert two["tokens"] == one["tokens"]
    assert two["verify_lengths"] == one["verify_lengths"]
    assert (lead.status, follower.status, follower.out) == (0, 0, "")

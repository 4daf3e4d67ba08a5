"""What ends a group: each case in bounded time, with one sentence and a status."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.families import build
from tests.support.ranks import Ranks, run_ranks, save_target, taken, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

GENERATE = ["-m", "dspine_mlx.cli", "generate", "-p", "a b c", "--ignore-chat-template"]
ENDLESS = ["-m", "4000", "--quiet"]
OFTEN = """
import sys
from dspine_mlx.cli import main
from dspine_mlx.group import channel

class Often(channel.Heartbeat):
    def __init__(self, beat, seconds):
        super().__init__(lambda: (beat(), print("wait", file=sys.stderr, flush=True)), 0.05)

channel.Heartbeat = Often
sys.argv = {words}
main()
"""  # a rank 0 whose signs of life are frequent, and counted

LOADING = """
import sys
from dspine_mlx.cli import main
from dspine_mlx.group import shards

def load(*args, **options):
    from threading import Event
    print("loading", file=sys.stderr, flush=True)
    {then}

shards.sharded_load = load
sys.argv = {words}
main()
"""  # a rank whose target does not load
FOR_EVER = "Event().wait()"
IN_STEP = """
import sys
from threading import Event
from dspine_mlx.cli import one_sentence
from dspine_mlx.group.in_step import plain_in_step
from dspine_mlx.group.meet import meet
from dspine_mlx.round.sampler import Sampler

sys.excepthook = one_sentence
group = meet()
if group.follows:
    group.follow({target!r}, {{"trust_remote_code": False}})
with group.leading():
    _, tokenizer, none = group.load({target!r}, None)
    for _ in plain_in_step(none.verifier, tokenizer, [5, 6], Sampler(), max_tokens=4000):
        print("decoding", file=sys.stderr, flush=True)
        Event().wait()
"""  # a rank 0 that is at work which the others do by themselves


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_target(build("qwen3"), tmp_path_factory.mktemp("target") / "random"))


def loading(target: str, then: str) -> list[str]:
    words = ["dspine-mlx", *GENERATE[2:], "--model", target]
    return ["-c", LOADING.format(words=words, then=then)]


def running(target: str, folder: Path, patience: str = "100", split: tuple[str, ...] = ()) -> Ranks:
    """A group in the middle of a long text."""
    arguments = [*GENERATE, "--model", target, "--patience", patience, *ENDLESS, *split]
    ranks = Ranks([arguments] * 2, folder)
    assert ranks.out[0].read(1)
    return ranks


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target that can be a pipeline."""
    dense = build("qwen3_moe", mlp_only_layers=[0, 1, 2, 3])
    return str(save_target(dense, tmp_path_factory.mktemp("layers") / "random", parts=2))


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("split", [(), ("--pipeline",)], ids=["tensors", "layers"])
def test_a_killed_rank_ends_the_others(
    lost: int, split: tuple[str, ...], layers: str, tmp_path: Path
) -> None:
    ranks = running(layers, tmp_path, split=split)
    ranks.processes[lost].kill()
    ended = ranks.end(60)
    assert ended[lost].status == -signal.SIGKILL
    assert ended[1 - lost].status == 1
    assert len(ended[1 - lost].said) == 1
    assert f"rank {1 - lost} of 2 lost another rank" in ended[1 - lost].said[0]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_killed_while_it_loads_ends_the_others(
    lost: int, target: str, tmp_path: Path
) -> None:
    commands = [[*GENERATE, "--model", target]] * 2
    commands[lost] = loading(target, FOR_EVER)
    ranks = Ranks(commands, tmp_path)
    wait_until(lambda: "loading" in ranks.err(lost).read_text())
    ranks.processes[lost].kill()
    other = ranks.end(60)[1 - lost]
    assert other.status == 1
    assert len(other.said) == 1
    assert f"rank {1 - lost} of 2 lost another rank" in other.said[0]


def test_a_rank_that_can_not_load_its_part(target: str, tmp_path: Path) -> None:
    commands = [[*GENERATE, "--model", target], loading(target, "raise ValueError('no room')")]
    lead, other = Ranks(commands, tmp_path).end(60)
    assert lead.status == 2
    assert len(lead.said) == 1
    assert lead.said[0].endswith(f"rank 1: {target} can't be loaded as a target: no room")
    assert (other.status, other.said, other.out) == (0, [], "")


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


def interrupted(ranks: Ranks) -> list[int]:
    """The statuses of all ranks after a terminal's Ctrl-C, which all end without a word."""
    for process in ranks.processes:
        process.send_signal(signal.SIGINT)
    ended = ranks.end(60)
    for one in ended:
        assert one.said == []
        assert "Traceback" not in one.err
    return [one.status for one in ended]


def test_an_interrupt_of_a_text(target: str, tmp_path: Path) -> None:
    assert interrupted(running(target, tmp_path)) == [128 + signal.SIGINT, 0]


def test_an_interrupt_while_ranks_meet(target: str, tmp_path: Path) -> None:
    ranks = Ranks([[*GENERATE, "--model", target]] * 2, tmp_path, late=1)
    wait_until(lambda: taken(ranks.ports[0]))
    assert interrupted(ranks) == [-signal.SIGINT]


def test_an_interrupt_while_targets_load(target: str, tmp_path: Path) -> None:
    ranks = Ranks([loading(target, FOR_EVER)] * 2, tmp_path)
    wait_until(lambda: all("loading" in ranks.err(rank).read_text() for rank in (0, 1)))
    assert interrupted(ranks) == [128 + signal.SIGINT, -signal.SIGINT]


def test_an_interrupt_of_work_in_step(target: str, tmp_path: Path) -> None:
    """The others can't be told, and find rank 0 lost; they know why."""
    ranks = Ranks([["-c", IN_STEP.format(target=target)]] * 2, tmp_path)
    wait_until(lambda: "decoding" in ranks.err(0).read_text())
    assert interrupted(ranks) == [128 + signal.SIGINT] * 2


def test_a_reader_that_leaves_ends_all(target: str, tmp_path: Path) -> None:
    ranks = running(target, tmp_path)
    ranks.out[0].close()
    lead, other = ranks.end(60)
    assert lead.status != 0
    assert (other.status, other.said) == (0, [])


def test_a_rank_that_comes_too_late(target: str, tmp_path: Path) -> None:
    arguments = [*GENERATE, "--model", target, "--patience", "3"]
    ranks = Ranks([arguments] * 2, tmp_path, late=1)
    ranks.processes[0].wait(60)
    ranks.start(1, arguments)
    for one in ranks.end(60):
        assert one.status not in (0, None)
        assert len(one.said) == 1
        assert "waited 3 seconds for the others of its group to start" in one.said[0]


def test_a_rank_0_that_is_stopped_between_texts(tmp_path: Path) -> None:
    """Followers wait for as long as a person types, and not for a machine that does nothing."""
    typed = tmp_path / "typed"
    os.mkfifo(typed)
    keyboard = os.open(typed, os.O_RDWR)
    words = ["dspine-mlx", "chat", "-m", "4", "--verify-length", "3", "--patience", "6"]
    follower = ["-m", "dspine_mlx.cli", *words[1:]]
    ranks = Ranks([["-c", OFTEN.format(words=words)], follower], tmp_path, typed)
    for turn in (1, 2):
        os.write(keyboard, b"And 2 boxes?\n")
        assert ranks.out[0].readline()
        wait_until(lambda turn=turn: beats(ranks) >= 3 * turn)  # type: ignore[misc]
    ranks.processes[0].send_signal(signal.SIGSTOP)
    try:
        status = ranks.processes[1].wait(60)
    finally:
        ranks.processes[0].kill()
        os.close(keyboard)
    _, other = ranks.end(60)
    assert status == 1
    assert len(other.said) == 1
    assert "has waited 6 seconds for another rank" in other.said[0]


def beats(ranks: Ranks) -> int:
    return ranks.err(0).read_text().count("wait")


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
    weightless = shutil.copytree(target, tmp_path / "weightless")
    (weightless / "model.safetensors").write_bytes(b"")
    cases = {
        "can't split by layers": ["--model", str(weightless), "--pipeline"],
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
    """The pair that ships, drafted for by two processes, of which one comes late and has no
    drafter; only rank 0 prints."""
    arguments = [*GENERATE, "-m", "16", "--json", "--verify-length", "7"]
    ranks = Ranks([arguments] * 2, tmp_path, late=1)
    wait_until(lambda: taken(ranks.ports[0]))  # rank 0 waits for the other
    ranks.start(1, [*arguments, "--draft-model", str(tmp_path / "none")])
    lead, follower = ranks.end()
    (alone,) = run_ranks(1, arguments, tmp_path)
    two, one = json.loads(lead.out), json.loads(alone.out)
    assert (two["ranks"], one["ranks"]) == (2, 1)
    assert two["tokens"] == one["tokens"]
    assert two["verify_lengths"] == one["verify_lengths"]
    assert (lead.status, follower.status, follower.out) == (0, 0, "")

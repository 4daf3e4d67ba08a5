"""The chat on a pseudo-terminal and through a pipe, with the pair that ships."""

import os
import signal
import stat
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.cli.chat_loop import stopping
from dspine_mlx.cli.last_round import LastRound
from dspine_mlx.round.policy import Fixed, Policy
from dspine_mlx.round.select import Draft, Evidence
from tests.support import forked
from tests.support.terminal import Terminal

QUESTION = "Tom has 4 apples and buys 3 more. How many apples does he have?"
CHAT = ("chat", "-m", "40", "--verify-length", "5")
GREEN = "\x1b[32m"


@pytest.mark.slow
def test_a_conversation_on_a_terminal(tmp_path: Path) -> None:
    with Terminal(*CHAT, home=tmp_path) as terminal:
        terminal.expect(">")
        terminal.quiet()
        terminal.send(f"{QUESTION}\r")
        shown = terminal.expect(" tokens/s] >")
        assert " tokens per round, " in shown
        assert GREEN in terminal.raw
        terminal.quiet()
        terminal.send("/explain\r")
        for word in ("slot", "token", "chance", "' "):
            terminal.expect(word)
        terminal.quiet()
        terminal.send("/drafter off\r")
        terminal.expect("plain decoding")
        terminal.quiet()
        terminal.send("first line\nsecond line\r")  # Ctrl-J is a new line
        shown = terminal.expect(" tokens/s] >")
        while "tokens per round" in shown.rpartition("[")[2]:  # the line above, drawn again
            shown = terminal.expect(" tokens/s] >")
        terminal.quiet()
        terminal.send("/drafter on\r")
        terminal.expect("drafting")
        terminal.quiet()
        terminal.send("/system Answer briefly.\r")
        terminal.expect("system: Answer briefly.")
        terminal.quiet()
        terminal.send("/nonsense\r")
        terminal.expect("there is no /nonsense")
        terminal.quiet()
        terminal.send("/reset\r")
        terminal.expect("a new conversation")
        terminal.quiet()
        terminal.send("\x04")  # Ctrl-D
        assert terminal.ended() == 0
    history = tmp_path / ".cache" / "dspine-mlx" / "chat-history"
    assert "+first line\n+second line\n" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 120])
def test_ctrl_c_ends_an_answer_or_a_line_and_not_the_chat(tmp_path: Path, columns: int) -> None:
    with Terminal("chat", "-m", "300", "--verify-length", "3", home=tmp_path, columns=columns) as t:
        t.expect(">")
        t.quiet()
        t.send("dropped\x03")
        t.quiet()
        t.send(f"{QUESTION}\r")
        while GREEN not in t.raw:
            assert t.read(30)
        t.send("\x03")
        t.expect("tokens/s] >")
        t.quiet()
        t.send("/help\r")
        t.expect("/quit")
        t.quiet()
        t.send("/quit\r")
        assert t.ended() == 0


@pytest.mark.slow
def test_earlier_messages_come_back_with_the_arrow_keys(tmp_path: Path) -> None:
    folder = tmp_path / ".cache" / "dspine-mlx"
    folder.mkdir(parents=True)
    (folder / "chat-history").write_text("\n# 2026-01-01\n+/system from before\n")
    with Terminal(*CHAT, home=tmp_path) as terminal:
        terminal.expect(">")
        terminal.quiet()
        terminal.send("\x1b[A\r")
        terminal.expect("system: from before")


@pytest.mark.slow
def test_a_pipe_gives_a_message_per_line(tmp_path: Path) -> None:
    typed = f"{QUESTION}\n/drafter off\n\n{QUESTION}\n/quit\nnever\n"
    command = ("-m", "dspine_mlx.cli", *CHAT)
    result = forked.run(*command, typed=typed, env={"HOME": str(tmp_path)}, check=True)
    answers = result.stdout.split("plain decoding\n")
    assert len(answers) == 2
    assert all(answer.strip() for answer in answers)
    assert "\x1b" not in result.stdout


def test_ctrl_c_asks_first_and_ends_the_program_then() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stopping() as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_last_round_says_what_became_of_each_token(tokenizer: TokenizerWrapper) -> None:
    tokens = mx.array(tokenizer.encode(" apples he has left", add_special_tokens=False)[:4])
    chances = [0.9, 0.75, 0.5, 0.125]
    draft = Draft(tokens, tokens[:, None], None, Evidence(tokens, mx.array(chances)))
    last = LastRound(Fixed(3))
    assert isinstance(last, Policy)
    assert last.rows(tokenizer) == []
    assert last.choose(draft, None, 10, 0, 0.0) == (None, 3)
    last.learn(1, 3)
    rows = last.rows(tokenizer)
    assert [row[2] for row in rows] == ["90%", "75%", "50%", "12%"]
    assert [row[3] for row in rows] == [
        "accepted",
        "rejected",
        "after the rejected one",
        "not offered",
    ]
    assert [row[1] for row in rows] == [repr(tokenizer.decode([t])) for t in tokens.tolist()]
    last.learn(3, 3)
    assert [row[3] for row in last.rows(tokenizer)] == ["accepted"] * 3 + ["not offered"]

"""The chat's screen: reading messages, showing answers, and commands."""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from rich.console import Console

from dspine_mlx.cli.chat_input import lines_of, prompted
from dspine_mlx.cli.conversation import Conversation
from dspine_mlx.cli.last_round import LastRound
from dspine_mlx.cli.prompting import readable
from dspine_mlx.cli.screen import console, print_table
from dspine_mlx.cli.summary import drafted_style
from dspine_mlx.errors import InputError
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.statistics import GenerationResponse
from dspine_mlx.verify_length.schedule import policy_for

COMMANDS = {
    "/drafter off|on": "decode plainly, or draft again",
    "/explain": "the last round as a table, and why the answer was drafted or not",
    "/system TEXT": "set the system message; without TEXT show it, with - remove it",
    "/reset": "forget the conversation, keep the system message",
    "/help": "this list",
    "/quit": "end the chat, as Ctrl-D does",
}


class Quit(Exception):
    """The user ends the chat."""


@dataclass
class Chat:
    """A conversation on a terminal, or of lines from a pipe."""

    conversation: Conversation
    sampler: Sampler
    length: int | str
    options: dict[str, Any]
    drafting: bool = True
    last: GenerationResponse | None = None
    last_round: LastRound | None = None

    def __post_init__(self) -> None:
        self.screen: Console = console()
        self.style = drafted_style(self.screen)

    def run(self) -> None:
        typed = sys.stdin is not None and sys.stdin.isatty()
        if typed:
            self.say("/help lists the commands; Ctrl-D ends the chat")
        messages = prompted(self.figures) if typed else lines_of(sys.stdin)
        while (message := self.next_of(messages)) is not None:
            try:
                self.take(readable("the message", message))
            except InputError as error:
                self.say(str(error))
            except Quit:
                return

    def next_of(self, messages: Iterator[str]) -> str | None:
        """The next message, for which other ranks may wait as long as this one does."""
        with self.conversation.waiting():
            return next(messages, None)

    def take(self, message: str) -> None:
        """A message, or a command: a slash and one word."""
        command = re.match(r"(/[a-z]+)(?:\s+(.*))?$", message.strip(), re.DOTALL)
        if command:
            self.command(command[1], (command[2] or "").strip())
        elif message.strip():
            self.answer(message)

    def say(self, line: str) -> None:
        self.screen.print(line, markup=False, style="dim", soft_wrap=True)

    # ---- answers

    def answer(self, message: str) -> None:
        policy: LastRound | int = 0
        if self.conversation.drafter is not None and self.drafting and self.length != 0:
            policy = LastRound(policy_for(self.length, self.conversation.drafter, self.sampler))
        options = {**self.options, "sampler": self.sampler, "verify_length": policy}
        self.last_round = policy if isinstance(policy, LastRound) else None
        with stopping() as stopped:
            for response in self.conversation.answer(message, stopped, **options):
                self.last = response
                tint = self.style if response.from_draft else None
                self.screen.out(response.text, style=tint, end="", highlight=False)
                self.screen.file.flush()
        self.screen.print()

    def figures(self) -> str:
        """Of the last answer, for the prompt's line."""
        if self.last is None:
            return ""
        speed = f"{self.last.generation_tps:.1f} tokens/s"
        if not self.last.statistics.rounds:
            return speed
        return f"{self.last.acceptance_length:.2f} tokens per round, {speed}"

    # ---- commands

    def command(self, name: str, rest: str) -> None:
        commands: dict[str, Callable[[str], None]] = {
            "/drafter": self.drafter,
            "/explain": self.explain,
            "/system": self.system,
            "/reset": self.reset,
            "/help": self.help,
            "/quit": self.quit,
        }
        if name not in commands:
            raise InputError(f"there is no {name}; the commands are {', '.join(commands)}")
        commands[name](rest)

    def drafter(self, value: str) -> None:
        if self.conversation.drafter is None:
            raise InputError("no drafter is loaded; start the chat with --draft-model")
        if value not in ("on", "off", ""):
            raise InputError(f"/drafter is {value!r}; it must be on or off")
        self.drafting = self.drafting if not value else value == "on"
        self.say("drafting" if self.drafting else "plain decoding")

    def explain(self, _: str) -> None:
        rows = [] if self.last_round is None else self.last_round.rows(self.conversation.tokenizer)
        if rows:
            names = ("slot", "token", "chance", "")
            print_table(self.screen, names, rows)
        else:
            self.say("nothing was drafted")
        if self.last is not None and self.last.statistics.verdict:
            self.say(self.last.statistics.verdict)

    def system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text == "-" else text
        self.say(f"system: {self.conversation.system or 'none'}")

    def reset(self, _: str) -> None:
        self.conversation.reset()
        self.last, self.last_round = None, None
        self.say("a new conversation")

    def help(self, _: str) -> None:
        for name, what in COMMANDS.items():
            self.say(f"{name:16} {what}")

    def quit(self, _: str) -> None:
        raise Quit


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Within the block Ctrl-C only asks to stop: the answer ends after its next token, with its
    caches in order. A second one ends the program."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)

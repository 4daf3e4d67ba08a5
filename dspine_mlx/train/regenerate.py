"""Rewrite the answers of a data set with the target itself, in batches.

A drafter must learn the target's own text, at the temperatures it will be served with.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.checkpoints.files import parse_json
from dspine_mlx.errors import InputError
from dspine_mlx.train.data import Chat, prompt_tokens

Sampler = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Writer:
    """Writes answers in batches."""

    tokenizer: TokenizerWrapper
    generator: BatchGenerator
    max_tokens: int
    samplers: dict[float, Sampler]  # one object per temperature: its rows are sampled together

    def ask(self, conversation: "Conversation") -> int:
        """Queue the conversation's next answer and return its id."""
        prompt = prompt_tokens(conversation.asked, self.tokenizer)
        sampler = self.samplers[conversation.temperature]
        (uid,) = self.generator.insert([prompt], [self.max_tokens], samplers=[sampler])
        return uid

    def answers(self) -> Iterator[tuple[int, str, str]]:
        """Yield (id, text, finish reason) of each answer as it ends."""
        tokens: dict[int, list[int]] = {}
        while responses := self.generator.next_generated():
            for r in responses:
                answer = tokens.setdefault(r.uid, [])
                if r.finish_reason != "stop":
                    answer.append(r.token)
                if r.finish_reason is not None:
                    yield r.uid, self.tokenizer.decode(tokens.pop(r.uid)), r.finish_reason


@dataclass(frozen=True)
class Conversation:
    """A chat whose first answers are the target's; finish_reason is that of the last one."""

    chat: Chat
    temperature: float
    answers: tuple[str, ...] = ()
    finish_reason: str | None = None

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """The chat's messages, with the target's answers so far in place of its own."""
        new = dict(zip(self.chat.turns, self.answers, strict=False))
        return tuple(
            m | {"content": new[i]} if i in new else m for i, m in enumerate(self.chat.messages)
        )

    @property
    def asked(self) -> tuple[dict[str, str], ...]:
        """The messages before the next answer."""
        return self.messages[: self.chat.turns[len(self.answers)]]

    def answered(self, text: str, reason: str) -> "Conversation":
        return replace(self, answers=(*self.answers, text), finish_reason=reason)

    @property
    def finished(self) -> bool:
        """Whether all turns are answered, or one was cut so that nothing can follow it."""
        return len(self.answers) == len(self.chat.turns) or self.finish_reason == "length"

    def row(self) -> dict[str, Any]:
        end = self.chat.turns[len(self.answers) - 1] + 1
        row = {"messages": self.messages[:end], "line": self.chat.line}
        return row | {"temperature": self.temperature, "finish_reason": self.finish_reason}


def regenerate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    chats: list[Chat],
    output: Path,
    *,
    temperatures: tuple[float, ...] = (0.0, 1.0),
    max_tokens: int = 512,
    batch_size: int = 32,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Append one line per chat to output: its messages, all answers written by the target, each
    after its own earlier ones.

    Chat i is answered at temperatures[i % len(temperatures)]. Lines come in the order in which
    chats end; `line` is the line of the source. Chats with an answer in output are skipped, so a
    stopped run continues where it was.
    """
    done = repair(output)
    waiting = [
        Conversation(chat, temperatures[i % len(temperatures)])
        for i, chat in enumerate(chats)
        if chat.line not in done
    ]
    count = len(chats) - len(waiting)
    progress(count, len(chats))
    generator = BatchGenerator(
        model,
        stop_tokens=[[t] for t in tokenizer.eos_token_ids],
        completion_batch_size=batch_size,
    )
    samplers = {t: make_sampler(temp=t) for t in temperatures}
    writer = Writer(tokenizer, generator, max_tokens, samplers)
    with output.open("a", encoding="utf-8") as file:
        try:
            asked = {writer.ask(conversation): conversation for conversation in waiting}
            for uid, text, reason in writer.answers():
                conversation = asked.pop(uid).answered(text, reason)
                if not conversation.finished:
                    asked[writer.ask(conversation)] = conversation
                    continue
                file.write(json.dumps(conversation.row(), ensure_ascii=False) + "\n")
                file.flush()
                count += 1
                progress(count, len(chats))
        finally:
            generator.close()


def repair(output: Path) -> set[int]:
    """Cut off a line that a killed run left unfinished; returns the source lines already
    answered."""
    if not output.exists():
        return set()
    data = output.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with output.open("r+b") as file:
            file.truncate(whole)
    done = set()
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            done.add(parse_json(line, output)["line"])
        except (InputError, KeyError, TypeError) as error:
            raise InputError(
                f"line {number} of {output} was not written by regenerate; name a new file"
            ) from error
    return done

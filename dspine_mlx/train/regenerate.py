"""Rewrite the answers of a data set with the target itself, in batches.

A drafter must learn the target's own text, at the temperatures it will be served with.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.batch.generate import batch_stream_generate
from dspine_mlx.checkpoints.files import parse_json
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.round.sampler import Sampler as DraftSampler
from dspine_mlx.train.data import Chat, prompt_tokens

Sampler = Callable[[mx.array], mx.array]


class Writer(Protocol):
    """Writes answers, several at a time."""

    def ask(self, conversation: "Conversation") -> int:
        """Queue the conversation's next answer and return its id."""

    def answers(self) -> Iterator[tuple[int, str, str]]:
        """Yield (id, text, finish reason) of each answer as it ends, until none is queued."""


@dataclass(frozen=True)
class PlainWriter:
    """Writes answers in mlx-lm's batches."""

    tokenizer: TokenizerWrapper
    generator: BatchGenerator
    max_tokens: int
    samplers: dict[float, Sampler]  # one object per temperature: its rows are sampled together

    def ask(self, conversation: "Conversation") -> int:
        prompt = prompt_tokens(conversation.asked, self.tokenizer)
        sampler = self.samplers[conversation.temperature]
        (uid,) = self.generator.insert([prompt], [self.max_tokens], samplers=[sampler])
        return uid

    def answers(self) -> Iterator[tuple[int, str, str]]:
        tokens: dict[int, list[int]] = {}
        while responses := self.generator.next_generated():
            for r in responses:
                answer = tokens.setdefault(r.uid, [])
                if r.finish_reason != "stop":
                    answer.append(r.token)
                if r.finish_reason is not None:
                    yield r.uid, self.tokenizer.decode(tokens.pop(r.uid)), r.finish_reason


@dataclass
class DraftingWriter:
    """Writes answers in batches that are drafted for: first the queued ones, then those that were
    queued meanwhile."""

    tokenizer: TokenizerWrapper
    drafter: Drafter
    max_tokens: int
    batch_size: int
    queue: list[tuple[int, list[int], Sampler]] = field(default_factory=list)
    ids: Iterator[int] = field(default_factory=count)

    def ask(self, conversation: "Conversation") -> int:
        prompt, uid = prompt_tokens(conversation.asked, self.tokenizer), next(self.ids)
        self.queue.append((uid, prompt, DraftSampler(temp=conversation.temperature)))
        return uid

    def answers(self) -> Iterator[tuple[int, str, str]]:
        while self.queue:
            asked, self.queue = self.queue, []
            uids, prompts, samplers = (list(column) for column in zip(*asked, strict=True))
            tokens: list[list[int]] = [[] for _ in asked]
            for i, r in batch_stream_generate(
                self.drafter.target.model,
                self.tokenizer,
                prompts,
                self.drafter,
                max_tokens=self.max_tokens,
                sampler=samplers,
                completion_batch_size=self.batch_size,
            ):
                if r.finish_reason != "stop":
                    tokens[i].append(r.token)
                if r.finish_reason is not None:
                    yield uids[i], self.tokenizer.decode(tokens[i]), r.finish_reason


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
    drafter: Drafter | None = None,
    temperatures: tuple[float, ...] = (0.0, 1.0),
    max_tokens: int = 512,
    batch_size: int = 32,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Append one line per chat to output: its messages, all answers written by the target, each
    after its own earlier ones.

    Chat i is answered at temperatures[i % len(temperatures)]. Lines come in the order in which
    chats end; `line` is the line of the source. Chats with an answer in output are skipped, so a
    stopped run continues where it was. drafter: an earlier one for this target, to be faster.
    """
    done = repair(output)
    waiting = [
        Conversation(chat, temperatures[i % len(temperatures)])
        for i, chat in enumerate(chats)
        if chat.line not in done
    ]
    written = len(chats) - len(waiting)
    progress(written, len(chats))
    with (
        output.open("a", encoding="utf-8") as file,
        writing(model, tokenizer, drafter, temperatures, (max_tokens, batch_size)) as writer,
    ):
        asked = {writer.ask(conversation): conversation for conversation in waiting}
        for uid, text, reason in writer.answers():
            conversation = asked.pop(uid).answered(text, reason)
            if not conversation.finished:
                asked[writer.ask(conversation)] = conversation
                continue
            file.write(json.dumps(conversation.row(), ensure_ascii=False) + "\n")
            file.flush()
            written += 1
            progress(written, len(chats))


@contextmanager
def writing(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    drafter: Drafter | None,
    temperatures: tuple[float, ...],
    limits: tuple[int, int],
) -> Iterator[Writer]:
    """limits: tokens of an answer, and answers at once."""
    max_tokens, batch_size = limits
    if drafter is not None:
        yield DraftingWriter(tokenizer, drafter, max_tokens, batch_size)
        return
    generator = BatchGenerator(
        model,
        stop_tokens=[[t] for t in tokenizer.eos_token_ids],
        completion_batch_size=batch_size,
    )
    samplers = {t: make_sampler(temp=t) for t in temperatures}
    try:
        yield PlainWriter(tokenizer, generator, max_tokens, samplers)
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

"""Training data: JSONL chats to token sequences with a marked answer."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.checkpoints.files import parse_json
from dspine_mlx.errors import InputError
from dspine_mlx.measure.prompts import parse as parse_prompt

ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names


Messages = tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Chat:
    """Messages that end with an assistant's answer, or a text, and their line number.

    `whole`: the last message ended by itself, not at a limit of tokens.
    """

    line: int
    messages: Messages
    whole: bool = True

    @property
    def turns(self) -> list[int]:
        """Indices of the messages that are answers."""
        return [i for i, m in enumerate(self.messages) if i and m["role"] == "assistant"]


@dataclass(frozen=True)
class Sequence:
    """tokens [n]; the answer is tokens[start:]. `turn` is its place among the line's messages."""

    line: int
    tokens: np.ndarray
    start: int
    turn: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.line, self.turn


class BadLine(ValueError):
    """One sentence about a line that can't be used."""


def parse(line: int, text: str) -> Chat:
    """Parse a chat from one JSONL line: messages, conversations, prompt and completion, or text.

    Anything after the last assistant turn is dropped.
    """
    try:
        row = parse_json(text, "it")
    except InputError as error:
        raise BadLine(str(error)) from error
    if not isinstance(row, dict):
        raise BadLine(f"it is a JSON {type(row).__name__}, not an object")
    whole = row.get("finish_reason") != "length"
    if isinstance(row.get("text"), str):
        return Chat(line, ({"role": "text", "content": row["text"]},), whole)
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        turns = [("user", row["prompt"]), ("assistant", row["completion"])]
    else:
        turns = [read_turn(m) for m in read_list(row)]
    last = max((i for i, (role, _) in enumerate(turns) if role == "assistant"), default=0)
    if last == 0:
        raise BadLine("it has no assistant turn that follows another turn")
    return Chat(line, tuple({"role": r, "content": c} for r, c in turns[: last + 1]), whole)


def read_list(row: dict[str, Any]) -> list[Any]:
    for name in ("messages", "conversations"):
        if isinstance(row.get(name), list):
            return row[name]
    raise BadLine("it has none of messages, conversations, prompt with completion, text")


def read_turn(message: Any) -> tuple[str, str]:
    if isinstance(message, dict):
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if isinstance(role, str) and isinstance(content, str):
            return ROLES.get(role, role), content
    raise BadLine("a turn lacks a role or a text content")


@dataclass
class Problems:
    """Lines that were skipped, with the reason; `strict` makes the first one an `InputError`."""

    path: Path
    strict: bool = False

    def __post_init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: int, reason: str) -> None:
        message = f"line {line} of {self.path} can't be used: {reason}"
        if self.strict:
            raise InputError(message)
        self.lines.append(message)


def read_chats(problems: Problems) -> Iterator[Chat]:
    """Read the chats of a JSONL file; blank lines are ignored, unusable lines are noted."""
    for number, text in read_lines(problems):
        try:
            yield parse(number, text)
        except BadLine as error:
            problems.add(number, str(error))


def read_prompts(problems: Problems) -> Iterator[Chat]:
    """Read chats to write answers for: those of `read_chats`, and prompts as `bench` and
    `calibrate` take them, which get an empty answer."""
    alone = problems.path.suffix != ".jsonl"  # a prompt per line
    for number, text in read_lines(problems):
        try:
            chat = None if alone else parse(number, text)
        except BadLine as error:
            chat, reason = None, str(error)
        messages = [{"role": "user", "content": text.strip()}] if alone else parse_prompt(text)
        if chat is not None:
            yield chat
        elif messages is not None:
            turns = [{"role": r, "content": c} for r, c in map(read_turn, messages)]
            yield Chat(number, (*turns, {"role": "assistant", "content": ""}))
        else:
            problems.add(number, reason)


def read_lines(problems: Problems) -> Iterator[tuple[int, str]]:
    """Read lines with their numbers, from 1; blank ones are left out, those not in UTF-8 are
    noted."""
    path = problems.path
    if not path.is_file():
        raise InputError(f"there is no data file {path}; give a JSONL file of chats")
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                problems.add(number, "it is not UTF-8 text")
            else:
                if text.strip():
                    yield number, text


def prompt_tokens(messages: Messages, tokenizer: TokenizerWrapper) -> list[int]:
    """Tokens that the target reads before it answers these messages; empty if there are none."""
    if not messages:
        return []
    if tokenizer.has_chat_template:
        return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))
    return list(tokenizer.encode("\n".join(m["content"] for m in messages)))


@dataclass(frozen=True)
class Encoder:
    """Chats to token sequences that fit the target."""

    tokenizer: TokenizerWrapper
    max_length: int
    vocab_size: int

    def sequence(self, chat: Chat, turn: int) -> Sequence:
        """Prompt, answer and, if it is whole, end of text, as decoding would see them.

        The prompt of a later turn is what a server would send then, and templates may rewrite
        earlier answers. So every turn is a separate sequence.
        """
        prompt = prompt_tokens(chat.messages[:turn], self.tokenizer)
        content = chat.messages[turn]["content"]
        answer = self.tokenizer.encode(content, add_special_tokens=not prompt)
        whole = chat.whole or turn < len(chat.messages) - 1
        end = [self.tokenizer.eos_token_id] if whole else []
        tokens = np.array([*prompt, *answer, *end], np.int32)
        start = len(prompt) or 1  # nothing predicts the first token of a text
        if len(tokens) > self.max_length:
            raise BadLine(f"it has {len(tokens)} tokens, the limit is {self.max_length}")
        if not answer:
            raise BadLine("its answer is empty")
        if tokens.max() >= self.vocab_size:
            raise BadLine(
                f"it has token {tokens.max()}, the target's vocabulary ends at "
                f"{self.vocab_size - 1}; tokenizer and model don't belong together"
            )
        return Sequence(chat.line, tokens, start, turn)


def read_sequences(
    path: Path,
    tokenizer: TokenizerWrapper,
    *,
    max_length: int,
    vocab_size: int,
    strict: bool = False,
    warn: Callable[[str], None] = lambda message: None,
) -> list[Sequence]:
    """Read all usable answers of a file. warn is called for each skipped line."""
    problems, sequences = Problems(path, strict), []
    encoder = Encoder(tokenizer, max_length, vocab_size)
    for chat in read_chats(problems):
        for turn in chat.turns or [0]:
            try:
                sequences.append(encoder.sequence(chat, turn))
            except BadLine as error:
                problems.add(chat.line, str(error) if turn < 2 else f"message {turn + 1}: {error}")
                break  # later turns build on this one
    for message in problems.lines:
        warn(message)
    if not sequences:
        reason = problems.lines[0] if problems.lines else "it is empty"
        raise InputError(f"{path} has no usable line: {reason}")
    return sequences


def order(count: int, epoch: int, seed: int) -> list[int]:
    """The shuffled indices of one epoch, the same in every run."""
    indices = list(range(count))
    random.Random(f"{seed} {epoch}").shuffle(indices)
    return indices

"""Rewrite the answers of a data set with the target itself, in batches.

A drafter must learn the target's own text, at the temperatures it will be served with.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.errors import InputError
from dspine_mlx.train.data import Chat, prompt_tokens


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
    """Append one line per chat to output: its messages, the last answer written by the target.

    Chat i is answered at temperatures[i % len(temperatures)]. Lines come in the order in which
    answers end; `line` names the line of the source. Chats that output already answers are
    skipped, so a run that was stopped goes on where it was.
    """
    done = repair(output)
    waiting = [(i, chat) for i, chat in enumerate(chats) if chat.line not in done]
    progress(len(chats) - len(waiting), len(chats))
    samplers = {t: make_sampler(temp=t) for t in temperatures}
    generator = BatchGenerator(
        model,
        stop_tokens=[[t] for t in tokenizer.eos_token_ids],
        completion_batch_size=batch_size,
    )
    temps = [temperatures[i % len(temperatures)] for i, _ in waiting]
    uids = generator.insert(
        [prompt_tokens(chat, tokenizer) for _, chat in waiting],
        [max_tokens] * len(waiting),
        samplers=[samplers[t] for t in temps],
    )
    asked = {uid: (chat, t) for uid, (_, chat), t in zip(uids, waiting, temps, strict=True)}
    with output.open("a", encoding="utf-8") as file:
        try:
            for count, (uid, tokens, reason) in enumerate(answers(generator), 1):
                chat, temperature = asked[uid]
                answer = {"role": "assistant", "content": tokenizer.decode(tokens)}
                row = {"messages": [*chat.messages[:-1], answer], "line": chat.line}
                row |= {"temperature": temperature, "finish_reason": reason}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                progress(len(chats) - len(waiting) + count, len(chats))
        finally:
            generator.close()


def answers(generator: BatchGenerator) -> Iterator[tuple[int, list[int], str]]:
    """(uid, tokens without the stop token, finish reason) of each answer as it ends."""
    tokens: dict[int, list[int]] = {}
    while responses := generator.next_generated():
        for r in responses:
            answer = tokens.setdefault(r.uid, [])
            if r.finish_reason != "stop":
                answer.append(r.token)
            if r.finish_reason is not None:
                yield r.uid, tokens.pop(r.uid), r.finish_reason


def repair(output: Path) -> set[int]:
    """Cut a line that a killed run left unfinished; the source lines that are already answered."""
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
            done.add(json.loads(line)["line"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"line {number} of {output} was not written by regenerate; name a new file"
            ) from error
    return done

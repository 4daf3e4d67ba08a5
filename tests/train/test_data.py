"""Training data: formats, what is learnt of them, and lines that can't be used."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.errors import InputError
from dspine_mlx.train.batches import draw, draw_anchors, slot_weights
from dspine_mlx.train.config import LossConfig, TrainConfig
from dspine_mlx.train.data import (
    Problems,
    Sequence,
    read_chats,
    read_prompts,
    read_sequences,
)
from dspine_mlx.train.run import split

QUESTION, ANSWER = "How many are 2 and 3?", "2 + 3 = 5\n#### 5"
TURNS = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
SHAREGPT = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "data.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read(path: Path, tokenizer: TokenizerWrapper, **options: Any) -> list[Sequence]:
    return read_sequences(path, tokenizer, **{"max_length": 200, "vocab_size": 2048} | options)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURNS},
        {"messages": [*TURNS, {"role": "user", "content": "Thanks."}]},
        {"conversations": TURNS},
        {"conversations": SHAREGPT},
        {"prompt": QUESTION, "completion": ANSWER},
    ],
)
def test_every_format_gives_the_tokens_of_decoding(
    row: dict, tmp_path: Path, tokenizer: TokenizerWrapper
) -> None:
    (sequence,) = read(write(tmp_path, row), tokenizer)
    prompt = tokenizer.apply_chat_template(TURNS[:1], add_generation_prompt=True)
    answer = tokenizer.encode(ANSWER, add_special_tokens=False)
    assert sequence.tokens.tolist() == [*prompt, *answer, tokenizer.eos_token_id]
    assert sequence.start == len(prompt)


def test_every_answer_of_a_conversation_is_learnt(
    tmp_path: Path, tokenizer: TokenizerWrapper
) -> None:
    """Each after what a server would have sent then: a sequence of its own."""
    system = {"role": "system", "content": "Be short."}
    more = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    chat = [system, *TURNS, *more]
    first, second = read(write(tmp_path, {"messages": chat}), tokenizer)
    for sequence, turn, answer in ((first, 2, ANSWER), (second, 4, "Yes.")):
        prompt = tokenizer.apply_chat_template(chat[:turn], add_generation_prompt=True)
        assert sequence.tokens[: sequence.start].tolist() == prompt
        assert tokenizer.decode(sequence.tokens[sequence.start : -1].tolist()) == answer
        assert sequence.tokens[-1] == tokenizer.eos_token_id
        assert sequence.key == (1, turn)


def test_the_turns_before_a_bad_one_are_learnt(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    long = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "1 " * 200}]
    after = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    told: list[str] = []
    path = write(tmp_path, {"messages": [*TURNS, *long, *after]})
    (sequence,) = read(path, tokenizer, warn=told.append)
    assert sequence.turn == 1
    assert len(told) == 1
    assert "line 1 of" in told[0]
    assert "message 4: it has" in told[0]


def test_an_answer_that_was_cut_has_no_end_to_learn(
    tmp_path: Path, tokenizer: TokenizerWrapper
) -> None:
    rows = [{"messages": TURNS, "finish_reason": reason} for reason in ("stop", "length")]
    whole, cut = read(write(tmp_path, *rows), tokenizer)
    assert whole.tokens.tolist() == [*cut.tokens.tolist(), tokenizer.eos_token_id]


def test_no_turn_of_a_learnt_chat_is_held_out() -> None:
    tokens = np.arange(4, dtype=np.int32)
    turns = [Sequence(line, tokens, 1, turn) for line in range(10) for turn in (1, 3, 5)]
    learnt, judged = split(turns)  # a tenth of 30 is the last chat
    assert [s.line for s in judged] == [9] * 3
    learnt, judged = split(turns[:28])  # the cut would fall between turns of chat 8
    assert not {s.line for s in learnt} & {s.line for s in judged}
    assert len(learnt) + len(judged) == 28
    assert split(turns[:12] + [Sequence(9, tokens, 1, t) for t in range(20)])[1] == []


def test_all_of_a_text_but_its_first_token_is_learnt(
    tmp_path: Path, tokenizer: TokenizerWrapper
) -> None:
    (sequence,) = read(write(tmp_path, {"text": ANSWER}), tokenizer)
    assert sequence.start == 1
    assert sequence.tokens.tolist()[:-1] == tokenizer.encode(ANSWER)


BAD = {
    "not json": ("{'text': 1}", "is not valid JSON"),
    "not an object": ("[1, 2]", "is a JSON list"),
    "no known key": ({"question": "x"}, "none of messages"),
    "no answer": ({"messages": TURNS[:1]}, "no assistant turn"),
    "answer first": ({"messages": TURNS[1:]}, "no assistant turn"),
    "no content": ({"messages": [TURNS[0], {"role": "assistant"}]}, "lacks a role or a text"),
    "empty answer": ({"prompt": QUESTION, "completion": ""}, "its answer is empty"),
    "too long": ({"text": "1 2 3 4 " * 100}, "tokens, the limit is 200"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_and_skipped(
    name: str, tmp_path: Path, tokenizer: TokenizerWrapper
) -> None:
    row, reason = BAD[name]
    path = write(tmp_path, {"messages": TURNS}, "", row, {"text": ANSWER})
    told: list[str] = []
    sequences = read(path, tokenizer, warn=told.append)
    assert [s.line for s in sequences] == [1, 4]  # the blank line counts, and is not complained of
    assert len(told) == 1
    assert f"line 3 of {path}" in told[0]
    assert reason in told[0]
    with pytest.raises(InputError, match="line 3 of"):
        read(path, tokenizer, strict=True)


def test_bytes_that_are_not_text_are_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n' + json.dumps({"text": "fine"}).encode() + b"\n")
    problems = Problems(path)
    assert [chat.line for chat in read_chats(problems)] == [2]
    assert "not UTF-8" in problems.lines[0]


def test_a_vocabulary_that_does_not_fit(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    with pytest.raises(InputError, match=r"no usable line: .*vocabulary ends at 9"):
        read(write(tmp_path, {"text": ANSWER}), tokenizer, vocab_size=10)


def test_no_data(tmp_path: Path, tokenizer: TokenizerWrapper) -> None:
    with pytest.raises(InputError, match="it is empty"):
        read(write(tmp_path, ""), tokenizer)
    with pytest.raises(InputError, match="no data file"):
        read(tmp_path / "absent.jsonl", tokenizer)


def test_anchors_lie_in_the_answer() -> None:
    sequence = Sequence(1, np.arange(30, dtype=np.int32), 12)
    rng = np.random.default_rng(0)
    assert draw_anchors(sequence, 100, rng).tolist() == list(range(11, 29))
    drawn = [tuple(draw_anchors(sequence, 5, rng).tolist()) for _ in range(200)]
    assert {len(set(d)) for d in drawn} == {5}
    assert {position for d in drawn for position in d} == set(range(11, 29))
    assert len(set(drawn)) > 150


def test_every_epoch_has_every_sequence_once_in_another_order() -> None:
    sequences = [Sequence(i, np.arange(4, dtype=np.int32), 1) for i in range(10)]
    config = TrainConfig(batch_size=5)
    epochs = [[s.line for k in (0, 1) for s in draw(sequences, config, 2 * e + k)] for e in (0, 1)]
    assert [sorted(e) for e in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert [s.line for s in draw(sequences, config, 1)] == epochs[0][5:]  # a step's own draw


def test_papers_schedules() -> None:
    loss = LossConfig()
    assert slot_weights(loss, 15)[7] == pytest.approx(np.exp(-1))
    chances = [loss.replacement(x) for x in (0, 1 / 6, 1 / 4, 1 / 3, 1)]
    assert chances == pytest.approx([0.5, 0.5, 0.25, 0, 0])
    assert [loss.alpha(x) for x in (0, 0.3, 1)] == pytest.approx([0.1] * 3)
    mixed = LossConfig(ce_start=1.0, ce_hold=0.2, ce_end=0.6)
    assert [mixed.alpha(x) for x in (0, 0.2, 0.4, 0.6, 1)] == pytest.approx([1, 1, 0.55, 0.1, 0.1])


def test_prompts_alone_get_an_answer_to_be_written(tmp_path: Path) -> None:
    """What bench and calibrate take, among chats, in their lines' numbers."""
    rows = [
        '{"prompt": "a"}',
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]}',
        "",
        '{"prompt": "c", "completion": "d"}',
        '{"other": 1}',
        '{"turns": ["e", "f"]}',
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    problems = Problems(tmp_path / "p.jsonl")
    chats = list(read_prompts(problems))
    assert [chat.line for chat in chats] == [1, 2, 4, 6]
    said = [[m["content"] for m in chat.messages] for chat in chats]
    assert said == [["a", ""], ["s", "b", ""], ["c", "d"], ["e", ""]]
    assert [chat.turns for chat in chats] == [[1], [2], [1], [1]]
    assert problems.lines == [
        f"line 5 of {tmp_path / 'p.jsonl'} can't be used: it has none of messages, conversations, "
        "prompt with completion, text"
    ]
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    chats = list(read_prompts(Problems(tmp_path / "p.txt")))
    assert [(chat.line, chat.messages[0]["content"]) for chat in chats] == [(1, "one"), (3, "two")]

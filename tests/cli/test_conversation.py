"""A conversation's prompt cache: what a turn feeds, and what it goes on from."""

import os
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.cli.conversation import Conversation
from dspine_mlx.cli.prompting import chat_text
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.generate import stream_generate
from dspine_mlx.load import load

FIRST = "Tom has 4 apples and buys 3 more. How many apples does he have?"
SECOND = "Ali has 52 caps and gives 8 away. How many are left?"
OPTIONS: dict[str, Any] = {"max_tokens": 12, "verify_length": 5}
Pair = tuple[nn.Module, TokenizerWrapper, Drafter]


@pytest.fixture(scope="module")
def pair() -> Pair:
    model, tokenizer, drafter = load()
    assert drafter is not None
    return model, tokenizer, drafter


def talk(pair: Pair, **changes: Any) -> Conversation:
    model, tokenizer, drafter = pair
    settings: dict[str, Any] = {"drafter": drafter, **changes}
    return Conversation(
        model,
        tokenizer,
        settings.pop("drafter"),
        settings.pop("template", lambda messages: chat_text(tokenizer, messages, {})),
        **settings,
    )


def never() -> bool:
    return False


def say(conversation: Conversation, message: str, **changes: Any) -> str:
    return "".join(r.text for r in conversation.answer(message, never, **(OPTIONS | changes)))


def fresh(pair: Pair, tokens: list[int], **changes: Any) -> list[int]:
    """What the target alone says after these tokens, from an empty cache."""
    options = OPTIONS | changes | {"verify_length": 0}
    return [r.token for r in stream_generate(pair[0], pair[1], tokens, None, **options)]


def positions(conversation: Conversation) -> set[int]:
    return {c.offset for c in conversation.cache}


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Tokens of every forward of the target."""
    forwards: list[list[int]] = []
    forward = qwen3.Model.__call__

    def counted(self: Any, inputs: mx.array, *args: Any, **options: Any) -> mx.array:
        forwards.append(inputs[0].tolist())
        return forward(self, inputs, *args, **options)

    monkeypatch.setattr(qwen3.Model, "__call__", counted)
    return forwards


def asked(message: str) -> str:
    """What the pair's template puts after an answer without its end: that, and the message."""
    return f"<|im_end|>\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"


def ids_of(pair: Pair, text: str) -> list[int]:
    return list(pair[1].encode(text, add_special_tokens=False))


@pytest.mark.parametrize("drafted", [True, False])
def test_a_turn_feeds_only_what_is_new(pair: Pair, drafted: bool, fed: list[list[int]]) -> None:
    conversation = talk(pair, **({} if drafted else {"drafter": None}))
    say(conversation, FIRST)
    before = list(conversation.tokens)
    assert positions(conversation) == {len(before)}
    fed.clear()
    say(conversation, SECOND)
    new = ids_of(pair, asked(SECOND))
    rows = [token for forward in fed for token in forward]
    assert rows[: len(new)] == new
    assert conversation.tokens[: len(before) + len(new)] == before + new
    assert positions(conversation) == {len(conversation.tokens)}
    answer = conversation.tokens[len(before) + len(new) :]
    assert answer == fresh(pair, before + new)


def test_an_ended_answer_is_followed_by_what_the_template_puts_there(pair: Pair) -> None:
    conversation = talk(pair)
    say(conversation, FIRST, max_tokens=400)
    before = list(conversation.tokens)
    assert before[-1] in pair[1].eos_token_ids
    _, new = conversation.prompt(SECOND)
    assert new == ids_of(pair, asked(SECOND).removeprefix("<|im_end|>"))


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_after_a_stop_the_next_turn_goes_on_from_the_yielded_text(pair: Pair, tokens: int) -> None:
    conversation, count = talk(pair), 0

    def stopped() -> bool:
        return count == tokens

    yielded = []
    for response in conversation.answer(FIRST, stopped, **OPTIONS):
        count += 1
        yielded.append(response)
    assert len(yielded) == tokens
    assert conversation.tokens[-tokens:] == [r.token for r in yielded]
    assert positions(conversation) == {len(conversation.tokens)}
    before = list(conversation.tokens)
    say(conversation, SECOND)
    new = ids_of(pair, asked(SECOND))
    assert conversation.tokens[: len(before) + len(new)] == before + new
    assert conversation.tokens[len(before) + len(new) :] == fresh(pair, before + new)
    assert conversation.messages[1]["content"] == "".join(r.text for r in yielded)


@pytest.mark.parametrize("drafted", [True, False])
def test_a_stop_while_the_prompt_is_read_keeps_what_was_read(pair: Pair, drafted: bool) -> None:
    conversation = talk(pair, **({} if drafted else {"drafter": None}))
    calls = iter([False, False, True])
    options = OPTIONS | {"prefill_step_size": 4}
    assert list(conversation.answer(FIRST, lambda: next(calls, True), **options)) == []
    assert conversation.messages == []
    assert len(conversation.tokens) in (4, 8)
    assert {c.offset for c in conversation.cache[:6]} == {len(conversation.tokens)}
    say(conversation, FIRST)
    other = talk(pair)
    say(other, FIRST)
    assert conversation.tokens == other.tokens


def test_another_system_message_goes_back_to_what_both_texts_begin_with(
    pair: Pair, fed: list[list[int]]
) -> None:
    conversation = talk(pair)
    conversation.system = "Answer briefly."
    say(conversation, FIRST)
    before = list(conversation.tokens)
    conversation.system = "Answer at length."
    fed.clear()
    say(conversation, SECOND)
    whole = conversation.template(
        [{"role": "system", "content": "Answer at length."}, *conversation.messages[:3]]
    )
    tokens = ids_of(pair, whole)
    common = len(os.path.commonprefix([before, tokens]))
    assert common >= 3
    rows = [token for forward in fed for token in forward]
    assert rows[: len(tokens) - common] == tokens[common:]
    assert conversation.tokens[len(tokens) :] == fresh(pair, tokens)


def test_a_template_that_rewrites_answers_is_followed(pair: Pair) -> None:
    def template(messages: list[dict[str, str]]) -> str:
        short = [m | {"content": m["content"][:9]} for m in messages if m["role"] == "assistant"]
        kept = iter(short)
        return chat_text(
            pair[1], [next(kept) if m["role"] == "assistant" else m for m in messages], {}
        )

    conversation = talk(pair, template=template)
    say(conversation, FIRST)
    say(conversation, SECOND)
    tokens = ids_of(pair, template(conversation.messages[:3]))
    assert conversation.tokens[: len(tokens)] == tokens
    assert conversation.tokens[len(tokens) :] == fresh(pair, tokens)


def test_caches_that_cant_be_trimmed_are_filled_anew(pair: Pair) -> None:
    conversation = talk(pair, max_kv_size=16)
    conversation.system = "Answer briefly."
    say(conversation, FIRST)
    conversation.system = "Say less."
    say(conversation, SECOND)
    system = {"role": "system", "content": "Say less."}
    tokens = ids_of(pair, conversation.template([system, *conversation.messages[:3]]))
    cache = make_prompt_cache(pair[0], 16)
    answer = fresh(pair, tokens, prompt_cache=cache)
    assert conversation.tokens == tokens + answer


def test_drafting_again_after_plain_turns_has_the_whole_context(pair: Pair) -> None:
    conversation = talk(pair)
    say(conversation, FIRST, verify_length=0)
    say(conversation, SECOND)
    assert positions(conversation) == {len(conversation.tokens)}


def test_a_conversation_longer_than_the_context_is_refused_and_can_be_reset(pair: Pair) -> None:
    conversation = talk(pair, config={"max_position_embeddings": 60})
    say(conversation, FIRST, max_tokens=4)
    with pytest.raises(InputError, match="context holds 60"):
        say(conversation, " ".join([SECOND] * 3))
    conversation.reset()
    say(conversation, FIRST, max_tokens=4)
    assert len(conversation.messages) == 2

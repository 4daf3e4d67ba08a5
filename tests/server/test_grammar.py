"""Structured output: masks, cuts of drafts, and exactness with a drafter."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.errors import InputError
from dspine_mlx.server.grammar import Constraint, automaton, compile_format
from tests.support.tiny import plain_steps, same_steps, scripted

llguidance = pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
EOS = 2


def constrained(
    tokenizer: TokenizerWrapper, response_format: Any = FORMAT, **options: Any
) -> Constraint:
    grammar = compile_format(response_format)
    return Constraint(llguidance.LLMatcher(automaton(tokenizer), grammar), {EOS}, **options)


def allowed(constraint: Constraint, tokens: list[int]) -> set[int]:
    logits = constraint(mx.array(tokens), mx.zeros((1, 2048)))
    return set(np.nonzero(np.isfinite(np.array(logits[0])))[0].tolist())


def tokens_of(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


PROMPT = [5, 6, 7]
VALID = '{"a": 12, "b": "yes"}'


def test_the_grammar_allows_its_sentences_and_only_at_their_end_the_end(
    tokenizer: TokenizerWrapper,
) -> None:
    constraint, text = constrained(tokenizer), tokens_of(tokenizer, VALID)
    for n, token in enumerate(text):
        following = allowed(constraint, PROMPT + text[:n])
        assert token in following
        assert EOS not in following
        assert tokens_of(tokenizer, "]")[0] not in following
    assert allowed(constraint, PROMPT + text) == {EOS}


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_rows_in_any_order_see_the_mask_of_their_own_text(
    tokenizer: TokenizerWrapper, data: st.DataObject
) -> None:
    """Rounds come back to shorter texts after drafts were dropped, and rows follow wrong drafts."""
    texts = [tokens_of(tokenizer, text) for text in (VALID, '{"a": 9, "b": "x"}', '{"a": -5')]
    constraint = constrained(tokenizer)
    allowed(constraint, PROMPT)
    for _ in range(6):
        text = data.draw(st.sampled_from(texts))
        text = text[: data.draw(st.integers(0, len(text)))]
        wrong = data.draw(st.lists(st.integers(3, 2047), max_size=2))
        fresh = constrained(tokenizer)
        allowed(fresh, PROMPT)
        assert allowed(constraint, PROMPT + text + wrong) == allowed(fresh, PROMPT + text + wrong)
        n = constraint.permitted(mx.array(PROMPT + text), wrong)
        assert n == next(
            (i for i, t in enumerate(wrong) if t not in allowed(fresh, PROMPT + text + wrong[:i])),
            len(wrong),
        )


def test_drafts_are_cut_where_the_grammar_ends_them(tokenizer: TokenizerWrapper) -> None:
    constraint, text = constrained(tokenizer), tokens_of(tokenizer, VALID)
    allowed(constraint, PROMPT)
    assert constraint.permitted(mx.array(PROMPT), [*text, EOS]) == len(text) + 1
    assert constraint.permitted(mx.array(PROMPT), [*text[:-1], EOS]) == len(text) - 1
    assert constraint.permitted(mx.array(PROMPT), [*text, 100]) == len(text)
    assert constraint.permitted(mx.array(PROMPT + text[:4]), text[4:6]) == 2
    assert constraint.permitted(mx.array(PROMPT), [100]) == 0


def test_reasoning_and_tool_calls_come_before_the_grammar(tokenizer: TokenizerWrapper) -> None:
    open_, close, tool = 900, 901, 902
    think = (open_, (close,))
    brace = tokens_of(tokenizer, "{")[0]
    over = constrained(tokenizer, think=think)
    assert allowed(over, PROMPT) == {brace}
    possible = constrained(tokenizer, reasoning="possible", think=think, tool=tool)
    assert allowed(possible, PROMPT) == {brace, open_, tool}
    assert len(allowed(possible, [*PROMPT, open_, 50])) == 2048
    assert allowed(possible, [*PROMPT, open_, 50, close]) == {brace, tool}
    assert len(allowed(possible, [*PROMPT, tool, 60])) == 2048
    inside = constrained(tokenizer, reasoning="inside", think=think)
    assert len(allowed(inside, PROMPT)) == 2048
    assert allowed(inside, [*PROMPT, 50, close]) == {brace}
    assert inside.permitted(mx.array(PROMPT), [50, close, brace, 100]) == 3


@pytest.mark.parametrize("script", ["right", "wrong", "now and then"])
def test_structured_decoding_is_exact_with_a_drafter(
    model: nn.Module, tokenizer: TokenizerWrapper, script: str
) -> None:
    """The very tokens and logprobs of masked plain decoding, greedy; forbidden drafts are cut."""
    options: dict[str, Any] = {"max_tokens": 40}
    plain = plain_steps(
        model, tokenizer, PROMPT, logits_processors=[constrained(tokenizer)], **options
    )
    text = PROMPT + [token for token, _ in plain]
    drafter = scripted(model, text + [0] * 8, script)
    grammar = constrained(tokenizer)
    responses = list(
        dspine_mlx.stream_generate(
            model,
            tokenizer,
            PROMPT,
            drafter,
            logits_processors=[grammar],
            draft_filter=grammar.permitted,
            lookup=False,
            **options,
        )
    )
    assert same_steps([(r.token, r.logprobs) for r in responses], plain)
    assert tokenizer.decode(text[len(PROMPT) :]).startswith("{")
    if script == "right":
        assert responses[-1].accepted > 20
    if script == "wrong":
        assert responses[-1].drafted < 20  # of 7 a round


@pytest.mark.parametrize(
    ("response_format", "message"),
    [
        ("json", "must be text, json_object or json_schema"),
        ({"type": "xml"}, "must be text, json_object or json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": 3}}, "needs json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}, "objekt"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"pattern": "(", "type": "string"}}},
            "regex",
        ),
    ],
)
def test_bad_formats_are_refused(response_format: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compile_format(response_format)


def test_a_grammar_that_grows_too_large_ends_the_request(tokenizer: TokenizerWrapper) -> None:
    """It is compiled in no time, and then has too many ways on."""
    text = {"type": "string", "minLength": 100, "maxLength": 1000}
    branches = [
        {"type": "object", "properties": {f"p{i}_{j}": text for i in range(40)}} for j in range(50)
    ]
    wanted = {"type": "json_schema", "json_schema": {"schema": {"anyOf": branches}}}
    brace = tokens_of(tokenizer, "{")
    constraint = constrained(tokenizer, wanted)
    allowed(constraint, PROMPT)
    with pytest.raises(InputError, match="response_format is too complex to follow: "):
        allowed(constraint, PROMPT + brace)
    with pytest.raises(InputError, match="response_format is too complex to follow: "):
        constraint.permitted(mx.array(PROMPT + brace), brace)


def test_a_long_schema_is_refused() -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 300_000]}}}
    with pytest.raises(InputError, match="more than 262144 characters"):
        compile_format(wanted)


def test_text_needs_no_grammar() -> None:
    assert compile_format(None) is None
    assert compile_format({"type": "text"}) is None

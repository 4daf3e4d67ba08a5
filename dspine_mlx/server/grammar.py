"""Structured output: a response_format as a grammar that masks every row of a verify forward.

The automaton is llguidance's (extra `server`). Masking happens before sampling. So the text has the
target's distribution restricted to the grammar, with or without a drafter.
"""

import json
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from dspine_mlx.errors import InputError
from dspine_mlx.server.call import Call, Reasoning
from dspine_mlx.server.fields import FieldError

try:
    import llguidance
except ImportError:
    llguidance = None  # type: ignore[assignment]  # response_format is refused

LONGEST = 1 << 18  # characters of a schema
WHITESPACE = r"(?: |\n[ \t]{0,24})"  # unbounded white space lets a small model emit nothing else


class Constraint:
    """A logits processor that allows only what a grammar allows next.

    It is called for each row of a verify forward, with the tokens up to that row, and steps back
    when drafted tokens are dropped. Reasoning comes before the grammar: if a reply starts inside it
    or opens it first, all tokens are allowed until its end. With tools, a tool call in place of the
    structured reply is free, too.
    """

    def __init__(
        self,
        matcher: Any,
        eos: set[int],
        reasoning: Reasoning = "over",
        think: tuple[int, tuple[int, ...]]
        | None = None,  # the token that opens it, those that end it
        tool: int | None = None,  # the token that opens a tool call
        said: tuple[int, ...] = (),  # the start of a reply that is resumed
    ):
        self.matcher, self.eos, self.said = matcher, eos, said
        self.reasoning, self.tool = reasoning, tool
        self.think = None if reasoning == "over" else think
        self.start: int | None = None  # tokens before the reply, or the rest of it
        self.consumed: list[int] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        text = self.reply(tokens)
        ruled = self.ruled(text)
        if ruled is None or not self.follow(ruled) or self.eos & set(ruled):
            return logits  # unconstrained, or a row that no text can reach
        bits = np.unpackbits(
            np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little"
        )
        self.check()
        mask = np.zeros(logits.shape[-1], np.bool_)
        mask[: bits.size] = bits[: mask.size]
        if not ruled:
            mask[list(self.openings(text))] = True
        return mx.where(mx.array(mask), logits, -mx.inf)

    def check(self) -> None:
        """Raise if llguidance gave up: some place in the text took it too much work."""
        if self.matcher.is_error():
            raise unusable(f"is too complex to follow: {self.matcher.get_error().split(';')[0]}")

    def permitted(self, tokens: mx.array, draft: list[int]) -> int:
        """The number of drafted tokens after these that the grammar allows."""
        text = self.reply(tokens)
        for n, token in enumerate(draft):
            text.append(token)
            ruled = self.ruled(text)
            if ruled is not None and not self.follow(ruled):
                return n
        return len(draft)

    def reply(self, tokens: mx.array) -> list[int]:
        if self.start is None:
            self.start = tokens.size
        return [*self.said, *tokens[self.start :].tolist()]

    def ruled(self, text: list[int]) -> list[int] | None:
        """The part of the reply under the grammar; None while the reply is unconstrained."""
        if self.think is not None and (self.reasoning == "inside" or text[:1] == [self.think[0]]):
            end = find(text, self.think[1])
            if end is None:
                return None
            text = text[end:]
        return None if text and text[0] == self.tool else text

    def openings(self, text: list[int]) -> set[int]:
        """Tokens allowed in place of the grammar's first."""
        opens = set() if self.tool is None else {self.tool}
        if self.think is not None and self.reasoning == "possible" and not text:
            opens.add(self.think[0])
        return opens

    def follow(self, tokens: list[int]) -> bool:
        """Bring the matcher to these tokens; False if the grammar forbids one of them."""
        ended = next((i for i, token in enumerate(tokens) if token in self.eos), len(tokens))
        wanted = tokens[:ended]
        same = next(
            (i for i, (a, b) in enumerate(zip(self.consumed, wanted, strict=False)) if a != b),
            min(len(self.consumed), ended),
        )
        if same < len(self.consumed):
            self.matcher.rollback(len(self.consumed) - same)
        taken = self.matcher.try_consume_tokens(wanted[same:])
        self.check()
        self.consumed = wanted[: same + taken]
        complete = len(self.consumed) == ended
        return complete and (ended == len(tokens) or self.matcher.is_accepting())


def find(tokens: list[int], sequence: tuple[int, ...]) -> int | None:
    """The end of the first occurrence of a sequence."""
    for i in range(len(tokens) - len(sequence) + 1):
        if tuple(tokens[i : i + len(sequence)]) == sequence:
            return i + len(sequence)
    return None


def compile_format(response_format: Any) -> str | None:
    """Compile a request's response_format to llguidance's grammar; None for plain text."""
    if response_format is None or response_format == {"type": "text"}:
        return None
    if llguidance is None:
        raise unusable("needs llguidance; install dspine-mlx[server]")
    schema = schema_of(response_format)
    if len(json.dumps(schema)) > LONGEST:
        raise unusable(f"has a schema of more than {LONGEST} characters")
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_pattern": WHITESPACE}
        )
    except ValueError as error:
        raise unusable(f"has no valid JSON schema: {error}") from error
    wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        reason = " ".join(" ".join(messages).split())
        raise unusable(f"has no valid JSON schema: {reason}")
    return grammar


def schema_of(response_format: Any) -> dict[str, Any]:
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        named = response_format.get("json_schema")
        if isinstance(named, dict) and isinstance(named.get("schema"), dict):
            return named["schema"]
        raise unusable("of type json_schema needs json_schema.schema, an object")
    raise unusable("must be text, json_object or json_schema")


def unusable(what: str) -> FieldError:
    return FieldError("response_format", f"response_format {what}")


def constraint(call: Call, tokenizer: Any) -> Constraint | None:
    """The processor of a call's grammar, if it has one."""
    if call.grammar is None:
        return None
    think = tool = None
    if tokenizer.has_thinking:
        think = (tokenizer.think_start_tokens[0], tuple(tokenizer.think_end_tokens))
    if call.tools and tokenizer.has_tool_calling and len(tokenizer.tool_call_start_tokens) == 1:
        tool = tokenizer.tool_call_start_tokens[0]
    matcher = llguidance.LLMatcher(automaton(tokenizer), call.grammar)
    eos, said = set(tokenizer.eos_token_ids), tuple(call.tokens)
    return Constraint(matcher, eos, call.reasoning, think, tool, said)


@lru_cache(maxsize=1)
def automaton(tokenizer: Any) -> Any:
    """llguidance's view of a tokenizer; takes about a second for a large vocabulary."""
    try:
        backend = tokenizer.backend_tokenizer
    except AttributeError as error:
        raise InputError("response_format needs a model with a fast tokenizer") from error
    return llguidance.LLTokenizer(backend.to_str(), eos_token=list(tokenizer.eos_token_ids))

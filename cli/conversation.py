"""A conversation with a model: its messages, and a prompt cache that goes on from turn to turn."""

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import takewhile
from typing import Any, Protocol

import mlx.nn as nn
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.generate import stream_generate
from dspine_mlx.load import check_context
from dspine_mlx.round.statistics import GenerationResponse
from dspine_mlx.target.prompt_cache import PromptCaches

TURNS = 2  # copies of earlier states that are kept of caches that can't be trimmed


class Template(Protocol):
    """How messages become text, the beginning of the answer included."""

    def __call__(self, messages: list[dict[str, str]]) -> str: ...


class Interrupted(Exception):
    """The user wants no more of an answer whose prompt is still being read."""


class Conversation:
    """Messages, and caches that hold the tokens of the newest text.

    `tokens` are in the caches. `text` is what they say, or None where that is unknown. A turn whose
    text goes on from there feeds only what is new; after another (`/system`, or a template that
    rewrites answers) the caches go back to the tokens that both have in common.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        drafter: Drafter | None,
        template: Template,
        config: dict[str, Any] | None = None,
        max_kv_size: int | None = None,
    ):
        self.model, self.tokenizer, self.drafter = model, tokenizer, drafter
        self.template, self.max_kv_size = template, max_kv_size
        self.config = config or {}  # the target's config.json, which says how long a text may be
        self.system: str | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages: list[dict[str, str]] = []
        self.earlier = PromptCaches(max_size=TURNS)
        self.start_cache()

    def start_cache(self) -> None:
        self.cache = make_prompt_cache(self.model, self.max_kv_size)
        self.tokens: list[int] = []
        self.text: str | None = ""

    def prompt(self, message: str) -> tuple[str, list[int]]:
        """The text that asks for an answer to the message, and its tokens that are not cached."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        text = self.template([*system, *self.messages, {"role": "user", "content": message}])
        if self.tokens and self.text is not None and text.startswith(self.text):
            new = self.tokenizer.encode(text[len(self.text) :], add_special_tokens=False)
            if new:
                return text, new
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        if not tokens:
            raise InputError("the chat template makes nothing of this message; write another")
        return text, self.go_back(tokens)

    def go_back(self, tokens: list[int]) -> list[int]:
        """Take the caches back to what they have in common with these tokens; the rest of them."""
        pairs = zip(self.tokens, tokens[:-1], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if common == len(self.tokens):
            return tokens[common:]
        if can_trim_prompt_cache(self.cache):
            trim_prompt_cache(self.cache, len(self.tokens) - common)
        else:
            cache, rest = self.earlier.fetch_nearest_cache("", tokens)
            self.start_cache()
            self.cache, common = cache or self.cache, len(tokens) - len(rest) if cache else 0
        self.tokens = tokens[:common]
        return tokens[common:]

    def answer(
        self,
        message: str,
        stopped: Callable[[], bool],
        **options: Any,
    ) -> Iterator[GenerationResponse]:
        """The answer, token by token, until it ends or `stopped()`; options are stream_generate's.

        However it ends, the yielded text is what the conversation goes on from.
        """
        prompt, new = self.prompt(message)
        check_context(self.config, len(self.tokens) + len(new))
        done = 0

        def progress(n: int, total: int) -> None:
            nonlocal done
            done = n if n < total else done
            if stopped():
                raise Interrupted

        if self.drafter is not None:
            stops = self.tokenizer.eos_token_ids
            options["prompt_checkpoints"] = self.earlier.checkpoints(
                "", [*self.tokens, *new], new, stops
            )
        responses = stream_generate(
            self.model,
            self.tokenizer,
            new,
            self.drafter,
            prompt_cache=self.cache,
            cached_tokens=self.tokens,
            prompt_progress_callback=progress,
            **options,
        )
        reply, ids, ended = "", list[int](), ""
        try:
            with closing(responses):
                for response in responses:
                    ids.append(response.token)
                    reply += response.text
                    if response.finish_reason == "stop":
                        ended = self.tokenizer.decode([response.token])
                    yield response
                    if stopped():
                        return
        except Interrupted:
            return
        finally:
            if ids:
                self.tokens += [*new, *ids]
                self.text = prompt + reply + ended
                self.messages += [
                    {"role": "user", "content": message},
                    {"role": "assistant", "content": reply},
                ]
            else:  # not all of the prompt was read
                self.tokens, self.text = self.tokens + new[:done], None

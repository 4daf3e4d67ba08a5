"""A conversation with a model: its messages, and a prompt cache that goes on from turn to turn."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, Protocol

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.generate import stream_generate
from dspine_mlx.load import check_context
from dspine_mlx.round.statistics import GenerationResponse
from dspine_mlx.target.turns import Turns


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
        self.turns = Turns(self.model, self.max_kv_size)
        self.text: str | None = ""
        if self.drafter is not None:
            self.drafter.verifier.ranks.share(do="reset", max_kv_size=self.max_kv_size)

    def waiting(self) -> AbstractContextManager[None]:
        """Context of a wait for the next message."""
        return nullcontext() if self.drafter is None else self.drafter.verifier.ranks.waiting()

    @property
    def cache(self) -> list[Any]:
        return self.turns.cache

    @property
    def tokens(self) -> list[int]:
        """The tokens that the caches hold."""
        return self.turns.tokens

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
        return text, self.turns.go_back(tokens)

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
        turns = self.turns
        check_context(self.config, len(turns.tokens) + len(new))
        done = 0

        def progress(n: int, total: int) -> None:
            nonlocal done
            done = n if n < total else done
            if stopped():
                raise Interrupted

        if self.drafter is not None:
            stops = self.tokenizer.eos_token_ids
            options["prompt_checkpoints"] = turns.checkpoints(new, stops)
            self.drafter.verifier.ranks.share(
                do="turn", tokens=[*turns.tokens, *new], stops=sorted(stops)
            )
        responses = stream_generate(
            self.model,
            self.tokenizer,
            new,
            self.drafter,
            prompt_cache=turns.cache,
            cached_tokens=turns.tokens,
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
                turns.tokens += [*new, *ids]
                self.text = prompt + reply + ended
                self.messages += [
                    {"role": "user", "content": message},
                    {"role": "assistant", "content": reply},
                ]
            else:  # not all of the prompt was read
                turns.tokens, self.text = turns.tokens + new[:done], None

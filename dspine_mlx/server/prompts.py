"""Limits of time and size for the chat template and the tokenizer."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dspine_mlx.errors import InputError

TEMPLATE = "<template>"  # the file name of Jinja's compiled templates
SECONDS = 5.0


@contextmanager
def rendering(seconds: float = SECONDS) -> Iterator[None]:
    """Limit the processor time of Jinja templates in this thread, by raising `InputError`.

    The clock is checked at each line of a template, so endless loops stop, too. Waiting for a turn
    on a busy machine does not count.
    """
    end = time.thread_time() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != TEMPLATE:
            return None
        if time.thread_time() > end:
            raise InputError(f"the chat template takes more than {seconds:g} s on this request")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class BoundedTokenizer:
    """A tokenizer for text of up to `most` characters; longer text would not fit the context.

    Encoding a few megabytes takes half a minute; the model's context shows beforehand that it is in
    vain.
    """

    def __init__(self, tokenizer: Any, most: int | None):
        self.tokenizer, self.most = tokenizer, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        if self.most is not None and len(text) > self.most:
            raise InputError(
                f"the prompt has {len(text)} characters; the model's context holds {self.most}"
            )
        return self.tokenizer.encode(text, **options)

    def apply_chat_template(self, messages: Any, tokenize: bool = True, **options: Any) -> Any:
        with rendering():
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def most_characters(tokenizer: Any, context_length: int | None) -> int | None:
    """The most characters that the context may hold: as if every token were the longest one."""
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return None if context_length is None else context_length * longest

"""A time limit for chat templates, which may loop over what a request brings."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dspine_mlx.errors import InputError

TEMPLATE = "<template>"  # the file that Jinja's compiled templates say they are of
SECONDS = 5.0


@contextmanager
def rendering(seconds: float = SECONDS) -> Iterator[None]:
    """Around Jinja templates in this thread: `InputError` once they have run for so long.

    Looks at the clock at each line of a template, so it ends loops, too.
    """
    end = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != TEMPLATE:
            return None
        if time.monotonic() > end:
            raise InputError(f"the chat template takes more than {seconds:g} s on this request")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)

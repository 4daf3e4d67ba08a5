"""Ctrl-C on rank 0 at any line: the others hear the end of what they were told of, and then of all
work."""

import signal
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.generate import stream_generate
from dspine_mlx.group.channel import Channel
from dspine_mlx.group.watchdog import Watchdog
from tests.support.families import build, drafter_config
from tests.support.message_log import lead, replay
from tests.support.tiny import SCRIPTS, Scripted, plain_steps, random_prompt

PROMPT, TOKENS = random_prompt(12), 8
STRIDE = 307  # lines from one interrupt to the next; 13 has been tried
FILES = ("dspine_mlx/group/", "dspine_mlx/round/", "dspine_mlx/target/", "dspine_mlx/generate.py")


def interrupted(line: int, work: Callable[[], Any]) -> bool:
    """Work, with Ctrl-C at so many lines of the package; returns whether it got so far."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if not any(file in frame.f_code.co_filename for file in FILES):
            return None
        seen += event == "line"
        if event == "line" and seen == line:
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return seen >= line


@pytest.mark.parametrize("length", [0, 4])
def test_the_others_hear_of_the_end(length: int, tokenizer: TokenizerWrapper) -> None:
    model, followers = build("qwen3_5"), build("qwen3_5")
    plain = [t for t, _ in plain_steps(model, tokenizer, PROMPT, max_tokens=TOKENS)]
    options: dict[str, Any] = {"max_tokens": TOKENS, "verify_length": length}
    line, texts = 1, 0
    while True:
        target, channel = lead(model)
        network = DFlash(drafter_config(model))
        drafter = Scripted(
            network, target, target, text=PROMPT + plain, script=SCRIPTS["now and then"]
        )
        text = partial(stream_generate, model, tokenizer, PROMPT, drafter, **options)
        found = interrupted(line, lambda text=text: list(text()))  # type: ignore[misc]
        assert not target.group.lost
        target.group.share(do="done")
        assert channel.jobs[-1]["do"] == "done"
        if len(channel.jobs) > 1:
            followed, replayed = replay(followers, channel, make_prompt_cache(followers))
            assert not replayed.left, line
            assert (PROMPT + plain)[: len(followed.tokens)] == followed.tokens, line
            texts += 1
        if not found:
            break
        line += STRIDE
    assert texts > 5


def test_a_job_is_sent_whole_or_not_at_all() -> None:
    class Counted(Channel):
        def sum(self, values: mx.array) -> mx.array:
            sums.append(values.size)
            return super().sum(values)

    channel = Counted(mx.distributed.init(), Watchdog(0, 1))
    for work, whole in (
        (lambda: channel.share({"do": "done"}), [1, 14]),
        (lambda: channel.agreed(True), [1]),
        (lambda: channel.gather("word"), [512]),
    ):
        line, sums = 1, list[int]()
        while interrupted(line, work):
            assert sums in ([], whole)
            line, sums = line + 1, []
        assert sums == whole
        assert line > 5

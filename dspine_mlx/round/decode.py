"""A text from its prompt to its last token: prefill, then rounds or plain decoding."""

import itertools
import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass

import mlx.core as mx

from dspine_mlx.round.plain import decode_plainly
from dspine_mlx.round.policy import Policy
from dspine_mlx.round.speculate import speculate
from dspine_mlx.round.text import Checkpoints, Text, Token
from dspine_mlx.target.swap import TURN

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prefill:
    """How a prompt gets into the caches."""

    step_size: int
    checkpoints: Checkpoints
    progress: Callable[[int, int], None]

    def run(self, text: Text, prompt: mx.array) -> None:
        done = 0
        self.progress(done, prompt.size)
        for n in text.prefill(prompt, self.step_size, self.checkpoints):
            done += n
            self.progress(done, prompt.size)


def decode(
    prompt: mx.array,
    make_text: Callable[[], Text],
    make_policy: Callable[[], Policy],
    stream: mx.Stream,
    prefill: Prefill,
    budget: float,
) -> Generator[Token, None, None]:
    """mlx-lm's generate_step with a drafter: prefill, then at most `budget` tokens.

    On every exit a caller's prompt cache holds the prompt and exactly the yielded tokens. An exit
    during prefill leaves the chunks that are done. Only this work runs on the stream, never the
    caller's.
    """
    with TURN, mx.stream(stream):
        text, policy = make_text(), make_policy()
    try:
        with TURN, mx.stream(stream):
            prefill.run(text, prompt)
            policy.start_text(text.statistics, text.sampler, text.position)
            look_up(text, policy)
            prefill.progress(prompt.size, prompt.size)
        tokens = decode_text(text, policy, budget)
        for count in itertools.count(1):
            with TURN, mx.stream(stream):
                token = next(tokens, None)
                if count % 256 == 0:
                    mx.clear_cache()
            if token is None:
                return
            yield token
            if text.closed:
                raise RuntimeError("another generation has taken over this one's prompt_cache")
    except RuntimeError as error:
        text.ranks.note(error)
        raise
    finally:
        with TURN, mx.stream(stream):
            text.settle()
            warn_of_misfit(text)
            text.statistics.verdict = policy.verdict(text.position)


def warn_of_misfit(text: Text) -> None:
    """Warn once per drafter if its texts accept far fewer tokens than any drafter that fits."""
    said = text.drafter.misfit.text_over(text.statistics.own_drafts)
    if said is not None:
        log.warning(said)


def look_up(text: Text, policy: Policy) -> None:
    """Let the text teach the policy's chances of copies, if the policy wants copies."""
    if policy.copies is None:
        text.lookup = None
    elif text.lookup is not None:
        text.lookup.chances = policy.copies


def decode_text(text: Text, policy: Policy, budget: float) -> Generator[Token, None, None]:
    """Decode in rounds while they pay, plainly while they don't, until `budget` tokens or a stop
    token."""
    text.context.keeps_up = policy.keeps_context
    for decode in itertools.cycle((speculate, decode_plainly)):
        for token in decode(text, policy, budget):
            budget = 0 if token[0] in text.stops else budget - 1
            yield token
        if budget <= 0:
            return

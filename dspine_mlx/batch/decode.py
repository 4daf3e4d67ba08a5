"""Several requests from their prompts to their last tokens: who waits, joins, and leaves."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from dspine_mlx.batch.batch import Batch
from dspine_mlx.batch.plain import decode_plainly
from dspine_mlx.batch.policy import BatchPolicy
from dspine_mlx.batch.speculate import speculate
from dspine_mlx.batch.text import BatchText
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.round.decode import Prefill, warn_of_misfit
from dspine_mlx.round.text import Text, Token


@dataclass(eq=False)
class Request:
    """A prompt [n], and how its text is made."""

    prompt: mx.array
    budget: float  # tokens, at most
    make_text: Callable[[], Text]
    prefill: Prefill
    seed: int | None = None
    return_caches: bool = False
    caches: list[Any] | None = None  # when its text is over, if they are to be returned

    def start(self) -> BatchText:
        """Its text, with all of the prompt but the last token in its own caches."""
        text = self.make_text()
        self.prefill.run(text, self.prompt)
        self.prefill.progress(self.prompt.size, self.prompt.size)
        key = None if self.seed is None else mx.random.key(self.seed)
        return BatchText(text, self.budget, key)


@dataclass
class Work:
    """What was done for all requests."""

    steps: int = 0  # rounds, and forwards of plain decoding
    seconds: float = 0.0  # that they took


@dataclass
class Decoding:
    """Requests decoded together, at most `most` at once.

    Texts join and leave between two steps, and only the work runs on the stream, never the caller.
    """

    drafter: Drafter
    policy: BatchPolicy
    most: int
    stream: mx.Stream
    work: Work = field(default_factory=Work)

    def run(self, requests: list[Request]) -> Generator[tuple[Request, Token], None, None]:
        """Every token with its request, in order for each."""
        waiting, batch = deque(requests), Batch(self.drafter)
        running: dict[BatchText, Request] = {}
        for count in itertools.count(1):
            with mx.stream(self.stream):
                while waiting and len(batch.texts) < self.most:
                    request = waiting.popleft()
                    running[self.join(batch, request)] = request
                if not batch.texts:
                    return
                blocks = self.step(batch)
                for text in blocks:
                    if text.failure is not None:
                        raise text.failure
                    if text.over:
                        request = running[text]
                        request.caches = batch.leave(text, request.return_caches)
                        warn_of_misfit(text.text)
                        text.text.statistics.verdict = self.policy.verdict(text)
                if count % 256 == 0:
                    mx.clear_cache()
            for text, block in blocks.items():
                for token in block:
                    yield running[text], token
                if text.over:
                    del running[text]

    def join(self, batch: Batch, request: Request) -> BatchText:
        text = request.start()
        batch.join(text)
        self.policy.join(text, len(batch.texts), batch.depth)
        return text

    def step(self, batch: Batch) -> dict[BatchText, list[Token]]:
        """A block of tokens for each text: a round's, or one of plain decoding."""
        texts, started = list(batch.texts), time.perf_counter()
        last = all(text.left < 2 for text in texts)  # nothing is drafted for a last token
        plainly = self.policy.plainly(texts, batch.depth) or last
        blocks = (decode_plainly if plainly else speculate)(batch, self.policy)
        self.work.steps += 1
        self.work.seconds += time.perf_counter() - started
        return dict(zip(texts, blocks, strict=True))

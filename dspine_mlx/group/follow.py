"""A rank that follows: it feeds what rank 0 says, and decides nothing."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from dspine_mlx.group.channel import ALL, DEEPEN, END, FEED, NONE_YET, VERIFY, Heard
from dspine_mlx.group.target import PartOfTarget
from dspine_mlx.round.text import Checkpoints
from dspine_mlx.target.kv_quantization import KVQuantization
from dspine_mlx.target.rollback import Rollback

PROMISED = Heard(FEED, ALL, 1, more=False)
CLEAR = 256  # forwards between two times that unused memory is given back, as in mlx-lm


@dataclass
class Followed:
    """What a rank has followed of a text.

    tokens: those that its caches hold of it; forwards: how many it ran; failed: rank 0 could not
    bring the caches to the text, so they are of no more use.
    """

    tokens: list[int] = field(default_factory=list)
    forwards: int = 0
    failed: bool = False


class Follower:
    """One text, as rank 0 makes it: accept, quantise and checkpoint where it does, then feed.

    job: rank 0's message that began the text. checkpoints: as in `stream_generate`.
    """

    def __init__(
        self,
        target: PartOfTarget,
        job: Mapping[str, Any],
        cache: list[Any],
        checkpoints: Checkpoints | None = None,
    ):
        self.target, self.channel, self.cache = target, target.channel, cache
        self.kv = KVQuantization(*job["kv"])
        taps = job["taps"] if target.pipelined else ()  # if not, rank 0 has all of them
        self.ids = tuple(taps)
        self.checkpoints = checkpoints or {}
        self.rollback = Rollback(cache, target.model)
        self.check_position(job["held"])
        self.fed: list[int] = []  # since the last checkpoint
        self.followed = Followed()

    def check_position(self, held: int) -> None:
        """Rank 0's caches hold so many tokens; a rank of a pipeline may have none that count."""
        own = self.rollback.position
        if own != held and own and held:
            raise RuntimeError(
                f"rank {self.channel.rank} has {own} tokens in its caches where rank 0 has {held}"
            )

    def run(self, stream: mx.Stream = generation_stream) -> Followed:
        """Follow to the end of the text."""
        with mx.stream(stream):
            more = False
            while True:
                message = self.channel.hear()
                if more:  # build while the device is at the forward before
                    before = self.rollback.marks
                    self.kv.apply(self.cache)
                    self.rollback.checkpoint()
                    self.feed(self.channel.tokens_of(message, PROMISED), verify=False)
                heard = self.channel.read(message)
                if more:
                    self.promise_kept(heard, before)
                elif heard.keep != NONE_YET:
                    self.keep(heard.keep)
                if heard.op == END:
                    self.channel.watchdog.disarm()
                    self.followed.failed = heard.more
                    return self.followed
                tokens = self.channel.tokens_of(message, heard)
                if heard.op == DEEPEN:
                    self.deepen(tokens.item())
                    continue
                if not more:
                    self.feed(tokens, heard.op == VERIFY)
                self.fed += self.channel.settled(tokens)
                more = heard.more

    def keep(self, rows: int) -> None:
        """Keep the first rows of what was fed since the last checkpoint, which is moved here."""
        rows = len(self.fed) if rows == ALL else rows
        self.rollback.accept(rows)
        if rows:
            self.kv.apply(self.cache)
        self.rollback.checkpoint()
        self.take(rows)

    def take(self, rows: int) -> None:
        self.followed.tokens += self.fed[:rows]
        self.fed.clear()
        keep = self.checkpoints.get(len(self.followed.tokens))
        if rows and keep is not None:
            keep(self.cache)

    def promise_kept(self, heard: Heard, before: list[Any]) -> None:
        """A row was fed before it was known what is kept of those before it."""
        if heard.keep == NONE_YET:
            self.rollback.marks = before
        else:
            self.take(len(self.fed))

    def feed(self, tokens: mx.array, verify: bool) -> None:
        rows, kernels = tokens.size, self.target.verify_kernels
        self.rollback.feeding(rows)
        with (
            self.rollback.verifying(tokens) if verify else nullcontext(),
            kernels.verifying(rows) if verify else nullcontext(),
        ):
            self.target.run(tokens, self.cache, self.ids, verify=verify)
        states = [c.state for c in self.cache]
        self.followed.forwards += 1
        if rows > 1 and not verify:  # a chunk of the prompt
            mx.eval(states)
            mx.clear_cache()
        else:
            mx.async_eval(states)
        if self.followed.forwards % CLEAR == 0:
            mx.clear_cache()

    def deepen(self, depth: int) -> None:
        self.rollback.deepen(depth)
        self.rollback.checkpoint()

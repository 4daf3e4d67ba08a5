"""Messages from rank 0 to the ranks that follow it, as sums to which those add zeros.

A message is [op, keep, n, more, tokens ...]. It is heard before every forward: keep so many rows of
what was fed since the last message that kept some, then feed these n tokens. Collectives pair by
their order alone, so every rank evaluates the same ones in the same order.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx

from dspine_mlx.errors import InputError, LostRank
from dspine_mlx.group.heartbeat import Heartbeat
from dspine_mlx.group.interrupts import uninterrupted
from dspine_mlx.group.watchdog import Watchdog

FEED, VERIFY, DEEPEN, END = 1, 2, 3, 4
ALL, NONE_YET = -1, -2  # rows to keep: all that were fed; it is not known yet
HEAD = 4
ROOM = 64  # tokens that fit into a message; more follow in a second sum
BEATS = 4  # signs of life in the time after which a rank gives up
TEXT = 512  # bytes of a rank's word to all others
BACKENDS = ("[ring]", "[jaccl]", "[mpi]", "[nccl]")  # how their errors begin


class Heard(NamedTuple):
    """A message's head, read by a rank that follows."""

    op: int
    keep: int
    n: int
    more: bool  # the next message feeds one token and keeps all, so it can be built for already


class Channel:
    """A group's messages, as one rank sends or hears them."""

    def __init__(self, group: mx.distributed.Group, watchdog: Watchdog):
        self.group, self.watchdog = group, watchdog
        self.rank, self.size = group.rank(), group.size()
        self.closed = False  # nothing may be sent any more
        self.announced = False  # a forward that has not been built yet

    def sum(self, values: mx.array) -> mx.array:
        return mx.distributed.all_sum(values, group=self.group)

    def note(self, error: RuntimeError) -> None:
        """Raise `LostRank` if the error is a backend's: whatever is sent after it waits for
        ever."""
        if str(error).startswith(BACKENDS):
            self.closed = True
            raise LostRank(
                f"rank {self.rank} of {self.size} lost another rank, so the group ends ({error})"
            ) from error

    # ---- before forwards

    def tell(self, op: int, keep: int, tokens: mx.array, more: bool = False) -> mx.array:
        """Rank 0: send a message; returns the tokens as all ranks get them. They need not be
        computed yet."""
        n, dtype, tokens = tokens.size, tokens.dtype, tokens.astype(mx.int32)
        inside = tokens if n <= ROOM else tokens[:0]
        head = mx.array([op, keep, n, more], mx.int32)
        fill = mx.zeros((ROOM - inside.size,), mx.int32)
        message = self.sum(mx.concatenate([head, inside, fill]))
        mx.async_eval(message)  # the last stage of a pipeline has no other use for the tokens
        if n <= ROOM:
            return message[HEAD : HEAD + n].astype(dtype)
        rest = self.sum(tokens)
        mx.async_eval(rest)
        return rest.astype(dtype)

    def hear(self) -> mx.array:
        """The others: a message that has been asked for. A rank that waits too long from here to
        the next one ends itself."""
        self.watchdog.arm()
        message = self.sum(mx.zeros((HEAD + ROOM,), mx.int32))
        mx.async_eval(message)
        return message

    def read(self, message: mx.array) -> Heard:
        """Wait for a message."""
        op, keep, n, more = self.settled(message[:HEAD])
        return Heard(op, keep, n, bool(more))

    def tokens_of(self, message: mx.array, heard: Heard) -> mx.array:
        if heard.n <= ROOM:
            return message[HEAD : HEAD + heard.n].astype(mx.uint32)
        rest = self.sum(mx.zeros((heard.n,), mx.int32))
        mx.async_eval(rest)
        return rest.astype(mx.uint32)

    def settled(self, values: mx.array) -> list[int]:
        try:
            numbers: list[int] = values.tolist()
        except RuntimeError as error:
            self.note(error)
            raise
        return numbers

    # ---- between texts

    def share(self, job: dict[str, Any]) -> None:
        """Rank 0: send the others what to do next."""
        data = mx.array(list(json.dumps(job).encode()), mx.uint8)
        with uninterrupted(), self.watchdog.watching():
            self.settled(self.sum(mx.array([data.size], mx.int32)))
            self.settled(self.sum(data)[:1])

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Rank 0: within the block nobody sends anything, for however long, but signs of life."""
        with Heartbeat(lambda: self.share({"do": "wait"}), self.watchdog.seconds / BEATS):
            yield

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """The others: the next job, or the next sign of life."""
        with self.watchdog.watching(seconds):
            (size,) = self.settled(self.sum(mx.zeros((1,), mx.int32)))
            data = self.settled(self.sum(mx.zeros((size,), mx.uint8)))
        job: dict[str, Any] = json.loads(bytes(data))
        return job

    # ---- among equals

    def gather(self, word: str, seconds: float | None = None) -> list[str]:
        """Every rank's word, the first TEXT bytes of it, in the order of ranks."""
        data = word.encode()[:TEXT].ljust(TEXT, b"\0")
        rows = mx.zeros((self.size, TEXT), mx.uint8)
        rows[self.rank] = mx.array(list(data), mx.uint8)
        with uninterrupted(), self.watchdog.watching(seconds):
            flat = self.settled(self.sum(rows).reshape(-1))
        texts = [bytes(flat[i : i + TEXT]) for i in range(0, len(flat), TEXT)]
        return [text.rstrip(b"\0").decode(errors="ignore") for text in texts]

    def gather_whole(self, word: str) -> list[str]:
        """Every rank's word, however long."""
        data, none = mx.array(list(word.encode()), mx.uint8), mx.array([], mx.uint8)
        sizes = mx.zeros((self.size,), mx.int32)
        sizes[self.rank] = data.size
        with uninterrupted(), self.watchdog.watching():
            lengths = self.settled(self.sum(sizes))
            parts = [none if rank != self.rank else data for rank in range(self.size)]
            rows = [
                part if part.size == n else mx.zeros((n,), mx.uint8)
                for part, n in zip(parts, lengths, strict=True)
            ]
            flat = bytes(self.settled(self.sum(mx.concatenate(rows))))
        starts = [sum(lengths[:rank]) for rank in range(self.size)]
        return [flat[start : start + n].decode() for start, n in zip(starts, lengths, strict=True)]

    def agree(self, problem: str = "", seconds: float | None = None) -> None:
        """Raise `InputError` on every rank if one of them has a problem."""
        found = self.gather(problem, seconds)
        first = next((rank for rank, text in enumerate(found) if text), None)
        if first is not None:
            others = {text for text in found if text} != {found[first]} or not found[0]
            self.refuse(f"rank {first}: {found[first]}" if others else found[first])

    def refuse(self, problem: str) -> NoReturn:
        """Raise `InputError` where every rank does so: they part."""
        self.closed = True
        raise InputError(problem)

    def agreed(self, holds: bool) -> bool:
        """Whether something holds on every rank."""
        with uninterrupted(), self.watchdog.watching():
            return self.settled(self.sum(mx.array([not holds], mx.int32))) == [0]

"""A rank's part of a target, and rank 0's, which tells the others what it feeds."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.pipeline import PipelineMixin

from dspine_mlx.group.channel import ALL, DEEPEN, END, FEED, NONE_YET, VERIFY, Channel
from dspine_mlx.group.interrupts import uninterrupted
from dspine_mlx.target.kv_quantization import KVQuantization
from dspine_mlx.target.model import Target, recording
from dspine_mlx.target.rollback import Rollback
from dspine_mlx.target.swap import swapping


class PartOfTarget(Target):
    """The part of a target that this rank has.

    layers: all of the target's, None where another rank of a pipeline has the layer (the last ones
    may be missing). Every rank runs the same forwards, and evaluates the same collectives in each.
    """

    def __init__(self, model: nn.Module, channel: Channel):
        super().__init__(model)
        self.channel, self.own_head = channel, self.lm_head
        self.layers = list(self.body.layers)
        self.pipelined = isinstance(self.body, PipelineMixin) and self.body.pipeline_size > 1
        self.split_head = not self.tied and type(self.lm_head) is not plain_type(self.lm_head)
        self._recording[type(self.body)] = recording(type(self.body), self._tapped)
        self.group = InGroup(channel, self.pipelined)
        self.ranks = self.group

    @property
    def fed_head(self) -> nn.Module:
        """This rank's part, where mlx-lm has split the head; a drafter reads the whole of it."""
        return self.own_head

    def run(
        self,
        tokens: mx.array,
        cache: list[Any],
        ids: tuple[int, ...],
        eager_taps: bool = False,
        verify: bool = False,
    ) -> tuple[mx.array, mx.array]:
        """One forward over tokens [n], as on every rank: logits [n, V], which need not be asked
        for, and features [1, n, m*d] of the taps.

        A head that is split by vocabulary has a collective after the layers': it is evaluated for a
        verify forward and for a single row, not for prefill. There rank 0 evaluates its logits
        before the sum of features, which the others have sent by then.
        """
        here = [i for i in ids if i < len(self.layers) and self.layers[i] is not None]
        body = [(self.body, self._recording[type(self.body)])]  # after all of its collectives
        with self.taps(tuple(here), eager_taps), swapping(body):
            logits = self.model(tokens[None], cache=cache)
        rows = self._tapped.rows
        states = rows[id(self.body)]
        parts = {i: rows[id(self.layers[i])] for i in here}
        rows.clear()
        if self.pipelined:
            none = mx.zeros((1, tokens.size, self.hidden_size), self.dtype)
            own = [parts.get(i, none) for i in ids] or [none[..., :0]]
            features = mx.concatenate(own, axis=-1)
            if ids:  # after the model's own collectives
                features = self.channel.sum(mx.depends(features, states))
        else:
            features = mx.concatenate(list(parts.values()) or [states[..., :0]], axis=-1)
        wanted = (self.split_head or self.channel.rank == 0) and (verify or tokens.size == 1)
        mx.async_eval(states, *([logits] if wanted else []))
        mx.async_eval(features)
        return logits[0], features


class LeadTarget(PartOfTarget):
    """Rank 0's part, which decides: every forward is announced to the others."""

    def forward(
        self, tokens: mx.array, cache: list[Any], ids: tuple[int, ...], eager_taps: bool = False
    ) -> tuple[mx.array, mx.array]:
        text = self.group.text
        if text is None or text.cache is not cache:
            raise RuntimeError("a group decodes one text at a time, and another has begun")
        verify = text.op == VERIFY
        with uninterrupted():
            self.channel.announced = True
            rows = self.run(text.announce(tokens), cache, ids, eager_taps, verify)
            self.channel.announced = False
        return rows

    def rollback(
        self, cache: list[Any], kv: KVQuantization, ids: tuple[int, ...]
    ) -> "LeadRollback":
        if self.group.text is not None:
            self.group.text.end()
        with uninterrupted():
            self.group.text = LeadRollback(cache, self, kv, ids)
        return self.group.text


class InGroup:
    """A group as a rank sees it; see `dspine_mlx.target.ranks.Ranks`."""

    def __init__(self, channel: Channel, pipelined: bool):
        self.channel = channel
        self.split = "pipeline" if pipelined else "tensor"
        self.size, self.structure = channel.size, ""
        self.text: LeadRollback | None = None  # rank 0's, in the making

    @property
    def lost(self) -> bool:
        """Also where an interrupt came between a forward's announcement and the forward."""
        return self.channel.closed or self.channel.announced

    @property
    def key(self) -> dict[str, str]:
        backend = next(
            (b for b in ("jaccl", "ring", "nccl", "mpi") if mx.distributed.is_available(b)), ""
        )
        return {"ranks": str(self.size), "split": self.split, "backend": backend}

    def share(self, **job: Any) -> None:
        if self.text is not None:
            self.text.end()
        self.channel.share(job)

    @contextmanager
    def together(self, **job: Any) -> Iterator[None]:
        with uninterrupted():
            self.share(**job)
            self.channel.announced = True
        yield
        self.channel.announced = False

    def waiting(self) -> AbstractContextManager[None]:
        return self.channel.waiting()

    def agreed(self, holds: bool) -> bool:
        return self.channel.agreed(holds)

    def gathered(self, word: str) -> list[str]:
        return self.channel.gather_whole(word)

    def arrived(self) -> None:
        self.channel.watchdog.disarm()

    def note(self, error: RuntimeError) -> None:
        self.channel.note(error)


class LeadRollback(Rollback):
    """Rank 0's: what is kept of a forward goes out with the next message."""

    def __init__(
        self, cache: list[Any], target: LeadTarget, kv: KVQuantization, ids: tuple[int, ...]
    ):
        self.target, self.channel, self.ids = target, target.channel, ids
        self.fed = 0  # rows since the last checkpoint
        self.kept: int | None = None  # of these, once it is known
        self.keep = NONE_YET  # what the next message says
        self.op, self.more = FEED, False
        self.promised = False  # the others build for one more row already
        self.broken = self.over = False
        self.stream = mx.default_stream(mx.default_device())  # of all of the text's collectives
        first = cache[0] if cache else None
        window = first.max_size if isinstance(first, RotatingKVCache) else None
        super().__init__(cache, target.model)
        job = {"do": "text", "kv": astuple(kv), "taps": list(ids), "max_kv_size": window}
        self.channel.share(job | {"held": self.position})

    def feeding(self, rows: int, more: bool = False) -> None:
        super().feeding(rows, more)
        self.more = more

    @contextmanager
    def verifying(self, tokens: mx.array) -> Iterator[None]:
        self.op = VERIFY
        try:
            with super().verifying(tokens):
                yield
        finally:
            self.op = FEED

    def announce(self, tokens: mx.array) -> mx.array:
        """Tell the others of a forward over these tokens; returns them as all ranks get them."""
        if self.promised and (self.op == VERIFY or tokens.size != 1):
            self.fulfil()
        return self.tell(self.op, tokens, self.more and self.op == FEED)

    def tell(self, op: int, tokens: mx.array, more: bool = False) -> mx.array:
        self.broken |= self.promised and self.keep == 0
        self.channel.watchdog.arm()
        sent = self.channel.tell(op, self.keep, tokens, more)
        self.fed += tokens.size
        self.keep, self.promised = NONE_YET, more
        return sent

    def fulfil(self) -> None:
        """Run the forward over one row that the others have built, and drop its row."""
        tokens = self.tell(FEED, mx.zeros((1,), mx.uint32))
        self.target.run(tokens, self.cache, self.ids)
        super().accept(0)
        self.fed, self.keep = 0, 0

    def checkpoint(self) -> None:
        super().checkpoint()
        self.close()

    def advance(self) -> None:
        super().advance()
        self.close()

    def close(self) -> None:
        if self.fed:
            self.keep = ALL if self.kept is None else self.kept
        self.fed, self.kept = 0, None

    def accept(self, rows: int) -> None:
        super().accept(rows)
        if self.fed:
            self.kept = rows

    def deepen(self, depth: int) -> None:
        with uninterrupted():
            self.channel.tell(DEEPEN, self.keep, mx.array([depth], mx.uint32))
            self.keep = NONE_YET
        super().deepen(depth)

    def end(self) -> None:
        if self.over or self.target.group.lost:
            return
        with uninterrupted(), mx.stream(self.stream), self.channel.watchdog.watching():
            self.over = True
            self.target.group.text = None
            if self.promised:
                self.fulfil()
            none = mx.array([], mx.uint32)
            self.channel.settled(self.channel.tell(END, self.keep, none, self.broken))


def plain_type(head: nn.Module) -> type[nn.Module]:
    """The class of a head that is whole."""
    return nn.QuantizedLinear if "scales" in head else nn.Linear

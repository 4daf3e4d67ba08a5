"""A group of one process whose messages are recorded, and a follower that hears the record."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.group.channel import HEAD, ROOM, Channel
from dspine_mlx.group.follow import Followed, Follower
from dspine_mlx.group.target import LeadTarget, PartOfTarget
from dspine_mlx.group.watchdog import Watchdog
from dspine_mlx.round.text import Checkpoints


class Recorded(Channel):
    """Rank 0's end; what it sends is kept, as the others would get it."""

    def __init__(self) -> None:
        super().__init__(mx.distributed.init(), Watchdog(0, 1))
        self.sums: list[mx.array] = []
        self.jobs: list[dict[str, Any]] = []

    def sum(self, values: mx.array) -> mx.array:
        self.sums.append(values)
        return super().sum(values)

    def share(self, job: dict[str, Any]) -> None:
        self.jobs.append(job)

    @property
    def heads(self) -> list[list[int]]:
        """[op, keep, n, more] of every message."""
        return [m[:HEAD].tolist() for m in self.sums if m.size == HEAD + ROOM]


class Replayed(Channel):
    """Another rank's end: the sums that were recorded, one after another."""

    def __init__(self, sums: list[mx.array]):
        super().__init__(mx.distributed.init(), Watchdog(1, 2))
        self.left = list(sums)

    def sum(self, values: mx.array) -> mx.array:
        heard = self.left.pop(0)
        assert heard.shape == values.shape
        return heard


def lead(model: nn.Module) -> tuple[LeadTarget, Recorded]:
    channel = Recorded()
    return LeadTarget(model, channel), channel


def replay(
    model: nn.Module,
    channel: Recorded,
    cache: list[Any],
    checkpoints: Checkpoints | None = None,
) -> tuple[Followed, Replayed]:
    """What a rank with this model makes of the text's messages."""
    replayed = Replayed(channel.sums)
    (job,) = (job for job in channel.jobs if job["do"] == "text")
    follower = Follower(PartOfTarget(model, replayed), job, cache, checkpoints)
    return follower.run(), replayed

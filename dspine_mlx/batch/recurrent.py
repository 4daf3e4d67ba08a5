"""Recurrent layers of several texts: each text's state after its own number of accepted rows.

A verify forward's `Record`s know what went into recurrences and convolutions. A state after n_i
rows of text i is the recurrence once more over all texts, with a mask of the accepted rows; a
convolution's window is a gather. So a rollback that differs from text to text costs what a uniform
one costs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from dspine_mlx.batch.rows import stacked
from dspine_mlx.target.recurrent import Call, Record, Recorder, Window


class RecurrentRows:
    """mlx-lm's ArraysCaches, each with a leading text axis, and their rollback."""

    def __init__(self, model: nn.Module, caches: list[ArraysCache]):
        self.caches = caches
        self.recorder = Recorder(model) if caches else None
        self.records: list[Record] = []
        self.before: list[list[mx.array | None]] = []
        self.width = 0  # rows of the newest forward

    def join(self, own: list[ArraysCache], texts: int) -> None:
        """Take one more text, after so many."""
        for cache, one in zip(self.caches, own, strict=True):
            pairs = zip(cache.cache, one.cache, strict=True)
            cache.cache = [stacked(rows, state, texts) for rows, state in pairs]

    def keep(self, texts: list[int]) -> None:
        for cache in self.caches:
            cache.filter(mx.array(texts))
        self.before = [
            [None if state is None else state[mx.array(texts)] for state in states]
            for states in self.before
        ]

    @contextmanager
    def verifying(self, width: int) -> Iterator[None]:
        """Around a forward over `width` rows of each text."""
        self.width = width
        self.before = [list(cache.cache) for cache in self.caches]
        self.records = [Record(cache) for cache in self.caches]
        if width == 1 or self.recorder is None:  # a single row is kept or not: nothing to replay
            yield
            return
        with self.recorder.recording(self.records, width):
            yield

    def cancel(self) -> None:
        """Take the newest forward back altogether."""
        for cache, states in zip(self.caches, self.before, strict=True):
            cache.cache = list(states)

    def accept(self, rows: list[int]) -> None:
        """Keep the first rows[i] >= 1 rows of each text i."""
        if self.recorder is None or min(rows) == self.width:
            return
        if not self.recorder.explains(self.records):
            raise RuntimeError("a recurrent layer keeps states that no record explains")
        kept = mx.array(rows, mx.int32)
        for cache, record in zip(self.caches, self.records, strict=True):
            cache.cache = [state_after(slot, kept, self.width) for slot in record.slots]
        mx.async_eval([cache.cache for cache in self.caches])


def state_after(slot: Call | Window, rows: mx.array, width: int) -> mx.array:
    """The state [B, ...] after the first rows [B] of `width` rows."""
    if isinstance(slot, Window):
        taken = rows[:, None] + mx.arange(slot.width, dtype=mx.int32)
        return mx.take_along_axis(slot.inputs, taken[..., None], axis=1)
    accepted: dict[str, Any] = {"mask": mx.arange(width) < rows[:, None]}
    if "lengths" in signature(slot.function).parameters:
        accepted["lengths"] = rows
    return slot.function(**slot.arguments | accepted)[1]

"""Does the whole target give a row the same bits, alone and among others?

The whole model is compared, not its parts: attention, norms, recurrences and caches take part, as
they do in a round.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, make_prompt_cache

from dspine_mlx.target.model import Target
from dspine_mlx.target.rollback import Rollback, leaves

DEPTHS = (64, 1100)  # context positions: from 1024 on, MLX attends by other kernels
TEXTS = 2  # that follow each context
FOLLOWING = 1  # row that is fed after a rollback, to read what it left
CHUNK = 512  # rows of prefill
COMPARED = (KVCache, QuantizedKVCache, ArraysCache)  # a window has its rows in another order

Verifying = Callable[[int], AbstractContextManager[None]]


class Packing(NamedTuple):
    """Of quantised KV caches."""

    bits: int
    group_size: int


def as_it_is(rows: int) -> AbstractContextManager[None]:
    return nullcontext()


def unequal_widths(
    target: Target, widths: Iterable[int], verifying: Verifying = as_it_is, **options: Any
) -> dict[int, str]:
    """Find the widths at which a verify forward differs from as many one-row forwards, and where;
    options: see `compared_widths`."""
    compared = compared_widths(target, widths, verifying, **options)
    return {width: where for width, where in compared if where}


def compared_widths(
    target: Target,
    widths: Iterable[int],
    verifying: Verifying = as_it_is,
    depths: Collection[int] | None = None,
    packing: Packing | None = None,
) -> Iterator[tuple[int, str]]:
    """Yield each width, the narrowest first, and where its verify forward differs from as many
    one-row forwards; "" if nowhere.

    widths: rows of a verify forward, at least 2. verifying: the context manager around a verify
    forward, as `RowKernels.verifying`. Compared bit for bit, after contexts of `depths` positions,
    on two texts of random tokens: all rows' logits, the caches, and the logits of one more row
    after half of the rows were rolled back. packing: of quantised KV caches.
    """
    asked = sorted(set(widths))
    texts = list(texts_after(target, asked[-1], sorted(depths or DEPTHS), packing))
    for width in asked:
        yield width, next(filter(None, (compared.at(width, verifying) for compared in texts)), "")


def texts_after(
    target: Target, rows: int, depths: list[int], packing: Packing | None
) -> Iterator["Compared"]:
    """Texts after each context. A shorter context is the beginning of the longer ones, so that each
    position is fed once."""
    context = mx.random.randint(0, target.vocab_size, (depths[-1],), key=mx.random.key(0))
    cache: list[Any] = make_prompt_cache(target.model)
    fed = 0
    for depth in depths:
        for begin in range(fed, depth, CHUNK):
            end = min(begin + CHUNK, depth)
            target.model(context[None, begin:end], cache=cache)
            mx.eval([c.state for c in cache])
        fed, after = depth, deepcopy(cache)
        if packing is not None:
            maybe_quantize_kv_cache(after, 0, packing.group_size, packing.bits)
        for text in range(TEXTS):
            size, key = (rows + FOLLOWING,), mx.random.key(1000 * depth + text)
            tokens = mx.random.randint(0, target.vocab_size, size, key=key)
            yield Compared(target, after, depth, tokens)


class Compared:
    """One text after one context, fed row by row on demand."""

    def __init__(self, target: Target, cache: list[Any], depth: int, tokens: mx.array) -> None:
        self.target, self.cache, self.depth, self.tokens = target, cache, depth, tokens
        self.apart = deepcopy(cache)
        self.rows: list[mx.array] = []  # logits [V] of each row that was fed alone

    def feed(self, rows: int) -> None:
        """Feed up to this many rows as plain decoding does."""
        while len(self.rows) < rows:
            self.rows.append(one_row(self.target, self.tokens[len(self.rows)], self.apart))
            mx.eval(self.rows[-1], [c.state for c in self.apart])

    def at(self, width: int, verifying: Verifying) -> str:
        """What differs at this many rows, or ""; widths must not decrease from call to call."""
        what = self.different(width, verifying)
        return what and f"{what} differ after {self.depth} positions"

    def different(self, width: int, verifying: Verifying) -> str:
        self.feed(width)
        cache = deepcopy(self.cache)
        rollback, drafted = Rollback(cache, self.target.model), self.tokens[:width]
        rollback.checkpoint()
        with rollback.verifying(drafted), verifying(width):
            logits = self.target.model(drafted[None], cache=cache)[0]
        agreed = self.target.ranks.agreed
        if not agreed(same(logits, mx.stack(self.rows[:width]))):
            return "logits"
        if not agreed(same_states(cache, self.apart)):
            return "caches"
        kept = (width + 1) // 2
        rollback.accept(kept)
        for row in range(kept, min(kept + FOLLOWING, width)):
            following = one_row(self.target, self.tokens[row], cache)
            if not agreed(same(following, self.rows[row])):
                return "logits after a rollback"
        return ""


def one_row(target: Target, token: mx.array, cache: list[Any]) -> mx.array:
    logits: mx.array = target.model(token.reshape(1, 1), cache=cache)[0, -1]
    return logits


def same_states(a: list[Any], b: list[Any]) -> bool:
    """Compare caches whose rows lie in the same places however they were fed."""
    pairs = [
        (x, y)
        for one, other in zip(leaves(a), leaves(b), strict=True)
        if type(one) in COMPARED
        for (_, x), (_, y) in zip(tree_flatten(one.state), tree_flatten(other.state), strict=True)
    ]
    return all(x is y or same(x, y) for x, y in pairs)  # None where a slot is empty


def same(x: mx.array, y: mx.array) -> bool:
    return mx.array_equal(x, y).item()


def differing_widths(target: Target, widths: Iterable[int]) -> frozenset[int]:
    """Find the widths at which an optimised BLAS changes a row's bits. The context is shorter than
    any window."""
    return (
        frozenset(unequal_widths(target, widths, depths=(16,))) if blas_differs() else frozenset()
    )


def blas_differs() -> bool:
    """Whether a product of several rows has other bits than its rows alone. In the BLAS of MLX's
    wheel a row's bits don't depend on the rows beside it."""
    key = mx.random.key(0)
    x, weight = mx.random.normal((16, 300), key=key), mx.random.normal((77, 300), key=key)
    alone = mx.concatenate([row @ weight.T for row in x.split(16)])
    return not mx.array_equal(x @ weight.T, alone).item()

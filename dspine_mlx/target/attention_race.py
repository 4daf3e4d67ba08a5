"""Which attention serves how many rows at which lengths of context: settled as for products.

Keys and values are random, of the sizes that the target's layers have.
"""

from bisect import bisect_right
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from dspine_mlx.metal.attention import Attended, attention_limits, parts_of
from dspine_mlx.metal.exact_attention import (
    AS_HEADS,
    FORMS,
    ROWS,
    ExactAttention,
    attend_apart,
    exact_limits,
)
from dspine_mlx.target.products import APART, STOCK, Product
from dspine_mlx.target.race import TIMED_BYTES, Race, Verdict, same_bits
from dspine_mlx.target.verdicts import AttentionShape

# Context lengths from which an attention has verdicts of its own. Shorter ones are left to MLX:
# they cost next to nothing. In exact mode none is too short, and between two of these lengths MLX's
# kernel for one row is the same on every chip, up to the last.
LONG = (1024, 4096, 16384)
EXACT = (1, 1024, 4096, 8192, 16384, 32768)
COPIES = 8  # at most, of keys and values that are read in turn


def contexts(mode: str) -> tuple[int, ...]:
    """The lengths at which a verdict begins to hold."""
    return EXACT[:-1] if mode == "exact" else LONG


def context_of(mode: str, rows: int, keys: int) -> int:
    """The verdict's context for rows of which the last sees all keys; 0: none holds.

    In exact mode all rows must lie between two lengths, and off the lengths themselves, about which
    MLX's rules differ.
    """
    if mode != "exact":
        return LONG[bisect_right(LONG, keys) - 1] if keys >= LONG[0] else 0
    ends = next(((a, b) for a, b in pairwise(EXACT) if a < keys - rows + 1 and keys < b), (0, 0))
    return ends[0]


def attention_verdict(race: Race, shape: AttentionShape, rows: int) -> Verdict:
    """Race for one kind of attention, with `rows` rows."""
    if race.idle:
        return Verdict(STOCK, race.idle)
    queries, attended = sample(shape, rows, lengths(race.mode, shape, rows))
    if race.mode != "exact":
        behind = windowed(attended[0], rows)
        added = mx.where(behind.mask, 0, -mx.inf).astype(shape.mlx_dtype)
        attended += [behind, behind._replace(mask=added)]
    entrants = candidates(race, queries, attended)
    if entrants == [STOCK]:
        return Verdict(STOCK, "no kernel serves it")
    right, rejected = race.check(entrants, queries, attended)
    seconds = race.times(list(right), queries, copies(attended[0]))
    return race.choose(right, seconds, tuple(rejected))


def lengths(mode: str, shape: AttentionShape, rows: int) -> list[int]:
    """Numbers of keys to check. The number of MLX's blocks grows with the keys: if both ends of a
    stretch have the same, so has all between.

    Over a quantised cache, what counts is whether the keys of the rows make parts of one length: at
    both ends, they don't if MLX makes 32 parts, and then if it makes 8.
    """
    begin = shape.context
    if mode != "exact":
        return [begin]
    end = EXACT[EXACT.index(begin) + 1]
    if not shape.bits:
        return [begin + rows, end - 1]
    low, high = -(-(begin + rows) // 32) * 32, (end - rows) // 32 * 32
    return [key + rows // 2 for key in (low, low + 8, high, high - 24)]


def sample(shape: AttentionShape, rows: int, keys: list[int]) -> tuple[mx.array, list[Attended]]:
    """Queries, and what they attend to at each length."""
    dtype, random = shape.mlx_dtype, mx.random.key(rows)
    size = (1, shape.heads, rows, shape.head_size)
    queries = mx.random.normal(size, key=random).astype(dtype)
    sinks = mx.random.normal((shape.heads,), key=random).astype(dtype) if shape.sinks else None
    scale = shape.head_size**-0.5
    attended = [Attended(*cached(shape, length), scale, "causal", sinks) for length in keys]
    mx.eval(queries, [(a.keys, a.values) for a in attended])
    return queries, attended


def windowed(attended: Attended, rows: int) -> Attended:
    """The same behind a mask, as mlx-lm's rotating caches ask for."""
    length = attended.length
    row, key = mx.arange(length - rows, length)[:, None], mx.arange(length)[None]
    return attended._replace(mask=(key <= row) & (key > row - length // 2))


def cached(shape: AttentionShape, length: int) -> tuple[Any, Any, Any]:
    """Random keys and values, and the cache that mlx-lm's function asks for its packing."""
    keys, values = (
        mx.random.normal((1, shape.kv_heads, length, size), key=mx.random.key(length + i)).astype(
            shape.mlx_dtype
        )
        for i, size in enumerate((shape.head_size, shape.value_size))
    )
    if not shape.bits:
        return keys, values, None
    packed = [tuple(mx.quantize(a, shape.group_size, shape.bits)) for a in (keys, values)]
    return *packed, QuantizedKVCache(shape.group_size, shape.bits)


def candidates(race: Race, queries: mx.array, attended: list[Attended]) -> list[Product]:
    first = attended[0]
    if race.mode != "exact":
        served = attention_limits(queries, first) is None
        return [STOCK, *(parts_of(first.length) if served else ())]
    products: list[Product] = [STOCK, APART]
    products += [product for product in AS_HEADS if product.limits(queries, first) is None]
    if exact_limits(queries, first) is None:
        form = next((f for f in FORMS if has_form(f, queries, attended)), None)
        products += [ExactAttention(*form, rows) for rows in ROWS] if form else []
    return products


def has_form(form: tuple[int, int], queries: mx.array, attended: list[Attended]) -> bool:
    """Whether a form has the bits of MLX's kernel for one row, at every length."""
    product = ExactAttention(*form)
    try:
        return all(same_bits(product(queries, a), attend_apart(queries, a)) for a in attended)
    except (RuntimeError, ValueError):  # refused by the driver
        return False


def copies(attended: Attended) -> list[Attended]:
    """The same keys and values in as many places as together exceed any cache, as layers have."""
    count = min(COPIES, -(-TIMED_BYTES // max(1, attended.nbytes)))

    def copy(part: Any) -> Any:
        return tuple(map(copy, part)) if isinstance(part, tuple) else mx.array(part)

    others = [
        attended._replace(keys=copy(attended.keys), values=copy(attended.values))
        for _ in range(count - 1)
    ]
    mx.eval([(a.keys, a.values) for a in others])
    return [attended, *others]

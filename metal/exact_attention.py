"""Attention of a verify forward's few rows, with the bits of MLX's kernel for one row."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx

from dspine_mlx.metal.attention import SLICE, Attended, attend, attention_limits
from dspine_mlx.metal.kernel import Arrays, Kernel

# What decides the bits of MLX's vector attention: its passes, and the blocks of keys of two. Which
# one it takes depends on the chip and the number of keys.
FORMS = ((1, 32), (2, 32), (2, 64), (2, 128), (2, 256), (2, 512), (2, 1024))
MAX_SHARE = 16  # query heads that share a key head, a simdgroup each


@dataclass(frozen=True)
class ExactAttention:
    """A form (see FORMS), and a cut that changes no bit: rows that share a key and a value in
    registers."""

    passes: int
    blocks: int = 32
    rows: int = 4

    def __call__(self, queries: mx.array, attended: Attended) -> mx.array:
        return exact_attention(queries, attended, self)

    def limits(self, queries: mx.array, attended: Attended) -> str | None:
        return EXACT_ATTENTION.limits(queries, attended, self)


ROWS = (4, 2, 8)


def exact_attention(
    queries: mx.array, attended: Attended, cut: ExactAttention | None = None, stock: Any = None
) -> mx.array:
    """Causal attention [B, heads, L, V] in which each row has the bits of MLX's kernel for one row
    with the keys it sees; cut None: one call of mlx-lm's function per row.

    MLX takes one pass for few keys, two for more, and blocks whose number grows with the keys. Both
    must be the same for all rows. One pass is two over 32 blocks whose sums are not rounded.
    """
    if cut is None:
        return attend_apart(queries, attended, stock)
    return EXACT_ATTENTION.launch(queries, attended, cut)[0]


def attend_apart(queries: mx.array, attended: Attended, stock: Any = None) -> mx.array:
    """Attend row by row, by plain decoding's own call on the keys it sees: its bits in any version
    of MLX. If the mask is not plainly causal, mlx-lm takes all rows at once."""
    rows = queries.shape[2]
    if rows == 1 or not isinstance(attended.mask, str):
        return attend(queries, attended, stock)
    before = attended.length - rows
    each = [
        attend(queries[:, :, i : i + 1], attended.first(before + i + 1), stock) for i in range(rows)
    ]
    return mx.concatenate(each, axis=2)


@dataclass(frozen=True)
class AsHeads:
    """Rows over a quantised cache, as further query heads of one row: few calls of mlx-lm's
    function, in which MLX takes its kernels for one row.

    parts: into which MLX splits the keys that its product with the values adds up; 1: it doesn't.
    Rows whose keys make parts of one length run together, and the keys that a row does not see add
    nothing. MLX splits from 1024 keys on (8 parts) and past 8192 (32).
    """

    parts: int = 1

    def __call__(self, queries: mx.array, attended: Attended) -> mx.array:
        before = attended.length - queries.shape[2]
        runs = groupby(range(queries.shape[2]), lambda row: self.length(before + row + 1))
        each = []
        for rows in (list(run) for _, run in runs):
            seen = attended.first(before + rows[-1] + 1)
            each.append(attend_as_heads(queries[:, :, rows[0] : rows[-1] + 1], seen))
        return mx.concatenate(each, axis=2)

    def length(self, keys: int) -> int:
        """Of a part."""
        return -(-keys // self.parts) if self.parts > 1 else 0

    def limits(self, queries: mx.array, attended: Attended) -> str | None:
        if not attended.packed:
            return "a cache that is not quantised"
        return None if isinstance(attended.mask, str) else "a mask that is not plainly causal"


AS_HEADS = (AsHeads(1), AsHeads(8), AsHeads(32))


def attend_as_heads(queries: mx.array, attended: Attended) -> mx.array:
    """Attend causally, each row of a head as a head of its own."""
    B, heads, L, D = queries.shape
    share, S = heads // attended.sizes()[0], attended.length
    seen = mx.arange(S) <= mx.arange(S - L, S)[:, None]
    mask = mx.tile(seen[:, None], (share, 1, 1))  # of the rows that share a key head
    rows = queries.reshape(B, heads * L, 1, D)
    return attend(rows, attended._replace(mask=mask)).reshape(B, heads, L, -1)


def launch_exact(
    function: Callable[..., Arrays], queries: mx.array, attended: Attended, cut: ExactAttention
) -> Arrays:
    B, heads, L, _ = queries.shape
    H, D, V = attended.sizes()
    tiles = -(-L // cut.rows)
    rows = -(-L // tiles)  # as few tiles, evenly filled
    threads, count = 32 * (heads // H), B * heads * L
    sinks = attended.sinks
    sizes = {"D": D, "V": V, "BLOCKS": cut.blocks, "ROWS": rows}
    sizes |= {"SINKS": sinks is not None}
    kept = mx.float32 if cut.passes == 1 else queries.dtype
    parts = function(
        inputs=[queries, attended.keys, attended.values,
                queries if sinks is None else sinks, attended.scale],
        template=[("T", queries.dtype), ("KEPT", kept), *sizes.items()],
        grid=(threads * H * tiles, B, cut.blocks),
        threadgroup=(threads, 1, 1),
        output_shapes=[(count, cut.blocks, V), (count, cut.blocks), (count, cut.blocks)],
        output_dtypes=[kept, mx.float32, mx.float32],
    )  # fmt: skip
    return EXACT_MERGE.launch(*parts, queries)


def launch_merge(
    function: Callable[..., Arrays],
    partial: mx.array,
    tops: mx.array,
    totals: mx.array,
    queries: mx.array,
) -> Arrays:
    count, blocks, V = partial.shape
    return function(
        inputs=[partial, tops, totals],
        template=[("T", queries.dtype), ("V", V), ("BLOCKS", blocks)],
        grid=(1024 * count, 1, 1),
        threadgroup=(1024, 1, 1),
        output_shapes=[(*queries.shape[:3], V)],
        output_dtypes=[queries.dtype],
    )


def merge(partial: mx.array, tops: mx.array, totals: mx.array, queries: mx.array) -> Arrays:
    """Put blocks together: sums [rows, blocks, V] of values weighted by exp(score - top), top
    itself and the sums of weights [rows, blocks]."""
    weights = mx.exp(tops - tops.max(axis=1, keepdims=True))
    total = (weights * totals).sum(axis=1, keepdims=True)
    out = (weights[..., None] * partial.astype(mx.float32)).sum(axis=1) / total
    return [out.reshape(*queries.shape[:3], -1).astype(queries.dtype)]


def exact_limits(queries: mx.array, attended: Attended, cut: Any = None) -> str | None:
    H, D, V = attended.sizes()
    if attended.packed:
        return "a quantised cache, for which MLX has no kernel of its own"
    if not isinstance(attended.mask, str):
        return "a mask that is not plainly causal"
    if D % 32 or V % 32 or max(D, V) > SLICE or queries.shape[1] // H > MAX_SHARE:
        return f"{queries.shape[1]} heads of {D} and {V}, {H} of keys"
    return attention_limits(queries, attended)


EXACT_ATTENTION = Kernel(
    "exact_attention",
    ["queries", "keys", "values", "sinks", "scale"],
    ["partial", "tops", "totals"],
    lambda queries, attended, cut: [attend_apart(queries, attended)],
    launch_exact,
    exact_limits,
    strided=True,
    headers=("rows_header",),
)
EXACT_MERGE = Kernel(
    "exact_merge",
    ["partial", "tops", "totals"],
    ["out"],
    merge,
    launch_merge,
    lambda *_: None,
    headers=("rows_header",),
)

"""Attention of a verify forward's few rows: each key and value is read once for all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from dspine_mlx.metal.kernel import Arrays, Kernel
from dspine_mlx.metal.rows import MAX_ROWS

PACKED_BITS = (2, 3, 4, 5, 6, 8)  # of caches
MAX_SIZE = 512  # of a head
SLICE = 256  # columns of a head that a simdgroup holds
THREADGROUP_BYTES = 16384  # for keys and values
MAX_SIMDGROUPS = (
    8  # of a threadgroup, for 8 rows or a slice of them; more rows read the cache again
)


class Attended(NamedTuple):
    """What query rows attend to: the arguments of mlx-lm's `scaled_dot_product_attention`.

    keys, values: [B, H, S, D] and [B, H, S, V], or the three arrays of a quantised cache, whose
    `bits` and `group_size` the cache has. mask: "causal", boolean, additive or None (all are seen).
    """

    keys: Any
    values: Any
    cache: Any
    scale: float
    mask: Any = "causal"
    sinks: mx.array | None = None

    @property
    def packed(self) -> bool:
        return not isinstance(self.keys, mx.array)

    @property
    def length(self) -> int:
        """Keys S."""
        keys: mx.array = self.keys[0] if self.packed else self.keys
        return keys.shape[2]

    @property
    def nbytes(self) -> int:
        arrays = [*self.keys, *self.values] if self.packed else [self.keys, self.values]
        return sum(array.nbytes for array in arrays)

    def sizes(self) -> tuple[int, int, int]:
        """(H, D, V)."""
        if self.packed:
            (k, scales, _), (_, value_scales, _) = self.keys, self.values
            group = self.cache.group_size
            return k.shape[1], scales.shape[3] * group, value_scales.shape[3] * group
        return self.keys.shape[1], self.keys.shape[3], self.values.shape[3]

    def packing(self) -> tuple[int, int]:
        """(bits, group size); zeros: floating."""
        return (self.cache.bits, self.cache.group_size) if self.packed else (0, 0)

    def widened(self) -> "Attended":
        """The same in float32, and unpacked."""
        if self.packed:
            single = [
                mx.dequantize(
                    packed,
                    scales.astype(mx.float32),
                    biases.astype(mx.float32),
                    self.cache.group_size,
                    self.cache.bits,
                )
                for packed, scales, biases in (self.keys, self.values)
            ]
        else:
            single = [array.astype(mx.float32) for array in (self.keys, self.values)]
        sinks = None if self.sinks is None else self.sinks.astype(mx.float32)
        return self._replace(keys=single[0], values=single[1], cache=None, sinks=sinks)

    def first(self, count: int) -> "Attended":
        """The first keys, all of them seen."""
        if self.packed:
            keys, values = (tuple(a[:, :, :count] for a in x) for x in (self.keys, self.values))
        else:
            keys, values = (a[:, :, :count] for a in (self.keys, self.values))
        return self._replace(keys=keys, values=values, mask=None)


@dataclass(frozen=True)
class Parts:
    """A cut of rows_attention: parts of the keys that threadgroups take for themselves."""

    parts: int = 16

    def __call__(self, queries: mx.array, attended: Attended) -> mx.array:
        return rows_attention(queries, attended, self)

    def limits(self, queries: mx.array, attended: Attended) -> str | None:
        return ROWS_ATTENTION.limits(queries, attended, self)


def parts_of(keys: int) -> tuple[Parts, ...]:
    """Cuts worth trying for so many keys: at least 64 keys a part."""
    return tuple(Parts(parts) for parts in (4, 16, 64) if 64 * parts <= keys)


def rows_attention(
    queries: mx.array, attended: Attended, cut: Parts | None = None, stock: Any = None
) -> mx.array:
    """softmax(scale q k^T) v in float32, rounded once: [B, heads, L, V]; cut None: MLX's own.

    queries: [B, heads, L, D] of 2 to 32 rows. The last row sees the last key, and each row before
    it one less, or what an array mask says, boolean or added to the scores. stock: mlx-lm's
    function, as the layer calls it.
    """
    if cut is None:
        return attend(queries, attended, stock)
    return ROWS_ATTENTION.launch(queries, attended, cut)[0]


def attend(queries: mx.array, attended: Attended, stock: Any = None) -> mx.array:
    """Attend by mlx-lm's function, which scales the queries of quantised caches in place."""
    stock = stock or scaled_dot_product_attention
    keys, values, cache, scale, mask, sinks = attended
    rest = {} if sinks is None else {"sinks": sinks}
    rows = queries[:] if attended.packed else queries
    out: mx.array = stock(rows, keys, values, cache=cache, scale=scale, mask=mask, **rest)
    return out


def launch_rows(
    function: Callable[..., Arrays], queries: mx.array, attended: Attended, cut: Parts
) -> Arrays:
    B, heads, L, _ = queries.shape
    (H, D, V), (bits, group) = attended.sizes(), attended.packing()
    S, mask = attended.length, attended.mask
    kind = mask_kind(mask)
    keys = attended.keys if bits else (attended.keys, queries, queries)  # the others aren't read
    values = attended.values if bits else (attended.values, queries, queries)
    if kind:
        mask = mx.broadcast_to(mask, (B, heads, L, S))
    tiles = -(-heads // H * L // 8)
    slices = slices_of(D, V)
    blocks = -(-tiles * slices // MAX_SIMDGROUPS)
    threads, rows = 32 * slices * -(-tiles // blocks), B * heads * L
    sizes = {"D": D, "V": V, "KEYS": keys_at_once(D + V, queries.dtype)}
    sizes |= {"SLICES": slices, "SIMDGROUPS": MAX_SIMDGROUPS}
    sizes |= {"BITS": bits, "GROUP": group or 1, "MASK": kind}
    parts = function(
        inputs=[queries, *keys, *values, mask if kind else queries, attended.scale],
        template=[("T", queries.dtype), *sizes.items()],
        grid=(threads * H * blocks, B, cut.parts),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, cut.parts, V), (rows, cut.parts), (rows, cut.parts)],
        output_dtypes=[mx.float32] * 3,
    )
    return ROWS_MERGE.launch(*parts, attended.sinks, queries)


def mask_kind(mask: Any) -> int:
    """0: causal, 1: boolean, 2: added to the scores."""
    if not isinstance(mask, mx.array):
        return 0
    return 1 if mask.dtype == mx.bool_ else 2


def slices_of(D: int, V: int) -> int:
    """Simdgroups that share a tile of rows."""
    return -(-max(D, V) // SLICE)


def keys_at_once(columns: int, dtype: mx.Dtype) -> int:
    """Keys that pass through threadgroup memory together: a multiple of 8."""
    return min(32, THREADGROUP_BYTES // (columns * dtype.size) // 8 * 8)


def launch_merge(
    function: Callable[..., Arrays],
    partial: mx.array,
    tops: mx.array,
    totals: mx.array,
    sinks: mx.array | None,
    queries: mx.array,
) -> Arrays:
    rows, V = partial.shape[0], partial.shape[2]
    given = sinks is not None
    return function(
        inputs=[partial, tops, totals, sinks if given else tops, queries],
        template=[("T", queries.dtype), ("SINKS", given)],
        grid=(V, rows, 1),
        threadgroup=(min(V, 256), 1, 1),
        output_shapes=[(*queries.shape[:3], V)],
        output_dtypes=[queries.dtype],
    )


def merge(
    partial: mx.array,
    tops: mx.array,
    totals: mx.array,
    sinks: mx.array | None,
    queries: mx.array,
) -> Arrays:
    """Put parts together: sums [rows, parts, V] of values weighted by exp(score - top), top itself
    and the sums of weights [rows, parts]."""
    top = tops.max(axis=1, keepdims=True)
    if sinks is not None:
        B, heads, L, _ = queries.shape
        sink = mx.broadcast_to(sinks.astype(mx.float32)[:, None], (B, heads, L)).reshape(-1, 1)
        top = mx.maximum(top, sink)
    weights = mx.exp(tops - top)
    total = (weights * totals).sum(axis=1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sink - top)
    sums = (weights[..., None] * partial).sum(axis=1)
    out = mx.where(total == 0, 0, sums / total)
    return [out.reshape(*queries.shape[:3], -1).astype(queries.dtype)]


def attention_limits(queries: mx.array, attended: Attended, cut: Any = None) -> str | None:
    """Why no kernel here serves these arguments, or None."""
    (H, D, V), (bits, group), dtype = attended.sizes(), attended.packing(), queries.dtype
    if not 2 <= queries.shape[2] <= MAX_ROWS:
        return f"{queries.shape[2]} rows; from 2 to {MAX_ROWS} are served"
    if queries.shape[1] % H or queries.shape[3] != D:
        return f"queries {list(queries.shape)} for {H} heads of {D}"
    if D % (8 * slices_of(D, V)) or V % (8 * slices_of(D, V)) or max(D, V) > MAX_SIZE:
        served = f"multiples of 8 up to {SLICE}, and of 16 up to {MAX_SIZE}, are served"
        return f"heads of {D} and {V}; {served}"
    if not keys_at_once(D + V, dtype):
        return f"heads of {D} and {V} in {dtype}"
    if bits and bits not in PACKED_BITS:
        return f"a cache of {bits} bits in groups of {group}"
    floats = (
        [*attended.keys[1:], *attended.values[1:]] if bits else [attended.keys, attended.values]
    )
    floats += [] if attended.sinks is None else [attended.sinks]
    if not mx.issubdtype(dtype, mx.floating) or any(a.dtype != dtype for a in floats):
        return f"queries of {dtype}, and others"
    return mask_limits(queries, attended)


def mask_limits(queries: mx.array, attended: Attended) -> str | None:
    mask, shape = attended.mask, (*queries.shape[:3], attended.length)
    if isinstance(mask, mx.array):
        fits = all(m in (1, n) for m, n in zip(mask.shape[::-1], shape[::-1], strict=False))
        floats = mx.issubdtype(mask.dtype, mx.floating)
        if (floats or mask.dtype == mx.bool_) and mask.ndim <= 4 and fits:
            return None
        return f"a mask {list(mask.shape)} of {mask.dtype}"
    return None if mask == "causal" else f"mask {mask}"


ROWS_ATTENTION = Kernel(
    "rows_attention",
    ["queries", "keys", "key_scales", "key_biases", "values", "value_scales", "value_biases",
     "mask", "scale"],
    ["partial", "tops", "totals"],
    lambda queries, attended, cut: [attend(queries, attended)],
    launch_rows,
    attention_limits,
    strided=True,  # caches are views of larger arrays
    headers=("rows_header",),
)  # fmt: skip
ROWS_MERGE = Kernel(
    "rows_merge",
    ["partial", "tops", "totals", "sinks", "queries"],
    ["out"],
    merge,
    launch_merge,
    lambda *_: None,
    headers=("rows_header",),
)

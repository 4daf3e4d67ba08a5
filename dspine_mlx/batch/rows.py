"""Keys and values of several texts that one forward serves, each text with a length of its own.

Text i's position p lies in slot p of row i, left-aligned. Slots from the text's length on are
stale: masks hide them, and the next forward writes over them. Accepting n_i of the rows just fed is
`lengths += n`, so a rollback that differs from text to text moves no key.
"""

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

STEP = 256  # slots by which arrays grow, as in mlx-lm's caches


class Lengths:
    """Positions in the caches of each text, shared by all layers: on the host and on the device."""

    def __init__(self) -> None:
        self.replace([])

    def replace(self, lengths: list[int]) -> None:
        self.host, self.device = lengths, mx.array(lengths, mx.int32)
        self.longest = max(lengths, default=0)
        self.places = dict[tuple[tuple[int, ...], int | None], mx.array]()

    def advance(self, rows: list[int]) -> None:
        self.replace([n + more for n, more in zip(self.host, rows, strict=True)])

    def keep(self, texts: list[int]) -> None:
        self.replace([self.host[i] for i in texts])

    def following(self, rows: int) -> mx.array:
        """Positions [B, rows] of each text's next rows."""
        return self.device[:, None] + mx.arange(rows, dtype=mx.int32)

    def place(self, shape: tuple[int, ...], ring: int | None = None) -> mx.array:
        """Slots for the next rows of this shape [B, heads, n, size], in a ring of so many or in
        order; the same for all layers of a forward."""
        if (shape, ring) not in self.places:
            positions = self.following(shape[2])
            slots = positions if ring is None else positions % ring
            self.places[shape, ring] = mx.broadcast_to(slots[:, None, :, None], shape)
        return self.places[shape, ring]


def stacked(rows: mx.array | None, own: mx.array | None, texts: int) -> mx.array | None:
    """rows [B, ...] of `texts` texts and one text's own [1, ...]; what is missing is zeros."""
    if rows is None and own is None:
        return None
    like = rows if own is None else own
    assert like is not None
    if rows is None:
        rows = mx.zeros((texts, *like.shape[1:]), like.dtype)
    if own is None:
        own = mx.zeros((1, *like.shape[1:]), like.dtype)
    return mx.concatenate([rows, own])


def with_slots(array: mx.array | None, slots: int) -> mx.array | None:
    """An array [B, heads, S, size], padded to so many slots if it has fewer."""
    if array is None or array.shape[2] >= slots:
        return array
    return mx.pad(array, [(0, 0), (0, 0), (0, slots - array.shape[2]), (0, 0)])


def rounded(slots: int) -> int:
    return -(-slots // STEP) * STEP


class RowsKV:
    """mlx-lm's KVCache for several texts, as a model sees it: `offset` [B], `make_mask`,
    `update_and_fetch`. The lengths advance after the forward, when rows have been accepted."""

    ring: int | None = None  # slots after which the first one is used again

    def __init__(self, lengths: Lengths):
        self.lengths = lengths
        self.keys: mx.array | None = None  # [B, heads, S, size]
        self.values: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """Positions before this forward's rows, also while it runs."""
        return self.lengths.device

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.state if x is not None)

    def slots(self, rows: int) -> int:
        """Slots that a forward over so many rows may see."""
        return self.lengths.longest + rows

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write rows [B, heads, n, size] after each text's own; all slots that may be seen."""
        last, lengths = self.slots(keys.shape[2]), self.lengths
        self.keys = written(self.keys, keys, lengths.place(keys.shape, self.ring), last)
        self.values = written(self.values, values, lengths.place(values.shape, self.ring), last)
        return self.keys[..., :last, :], self.values[..., :last, :]

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """[B, 1, N, S]: row j of text i sees the positions up to its own, a window's only."""
        column = mx.arange(self.slots(N), dtype=mx.int32)
        row = self.lengths.following(N)[:, None, :, None]
        mask = column <= row
        return mask & (column > row - window_size) if window_size else mask

    def join(self, cache: KVCache) -> None:
        """Take one more text, from the cache that it was prefilled in."""
        self.append(held(cache.keys, cache.offset), held(cache.values, cache.offset))

    def append(self, keys: mx.array | None, values: mx.array | None) -> None:
        texts = len(self.lengths.host)
        slots = rounded(max((x.shape[2] for x in (self.keys, keys) if x is not None), default=0))
        self.keys = stacked(with_slots(self.keys, slots), with_slots(keys, slots), texts)
        self.values = stacked(with_slots(self.values, slots), with_slots(values, slots), texts)

    def keep(self, texts: list[int]) -> None:
        """Only these texts stay, of which the lengths are now; slots that none of them needs
        go. A row may have been fed past the lengths."""
        if self.keys is not None and self.values is not None:
            at, last = mx.array(texts), rounded(self.slots(1))
            self.keys, self.values = self.keys[at, :, :last], self.values[at, :, :last]

    def extract(self, text: int) -> KVCache:
        """A text's own cache, as after decoding it alone."""
        cache, length = KVCache(), self.lengths.host[text]
        if self.keys is not None and self.values is not None:
            cache.keys = mx.contiguous(self.keys[text : text + 1, :, :length])
            cache.values = mx.contiguous(self.values[text : text + 1, :, :length])
            cache.offset = length
        return cache


class RingKV(RowsKV):
    """mlx-lm's RotatingKVCache for several texts: a sliding window of W positions.

    Position p lies in slot p mod R, with R = W + widest - 1 for the widest forward there will be.
    A forward then writes over positions that none of its rows sees. A rejected row is less than
    `widest` past the text's end; read as the position R earlier, it lies outside every window, so
    this ring is rolled back by the lengths alone, too. (At least one row of a forward is accepted.)
    """

    def __init__(self, lengths: Lengths, window: int, widest: int):
        super().__init__(lengths)
        self.window = window
        self.ring: int = window + widest - 1

    def slots(self, rows: int) -> int:
        return min(self.ring, super().slots(rows))

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        position, slot = self.lengths.following(N), mx.arange(self.slots(N), dtype=mx.int32)
        newest = position[:, -1:]
        # The newest position that a slot can hold; below 0: nothing yet.
        column = (newest - (newest - slot) % self.ring)[:, None, None, :]
        row = position[:, None, :, None]
        return (column >= 0) & (column <= row) & (column > row - (window_size or self.window))

    def join(self, cache: RotatingKVCache) -> None:
        length = cache.offset
        if cache.keys is None:
            self.append(None, None)
            return
        keys, values = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
        n = min(length, self.window, keys.shape[2])
        slots = mx.arange(length - n, length, dtype=mx.int32)[None, None, :, None] % self.ring
        last = min(self.ring, length)
        self.append(
            written(None, keys[..., -n:, :], slots, last),
            written(None, values[..., -n:, :], slots, last),
        )

    def extract(self, text: int) -> RotatingKVCache:
        cache, length = RotatingKVCache(self.window), self.lengths.host[text]
        if self.keys is not None and self.values is not None:
            n = min(length, self.window)
            slots = mx.arange(length - n, length) % self.ring
            cache.keys = self.keys[text : text + 1, :, slots]
            cache.values = self.values[text : text + 1, :, slots]
            cache.offset, cache._idx = length, n
        return cache


def held(array: mx.array | None, rows: int) -> mx.array | None:
    """The rows that belong to the text, of what mlx-lm allocated; None if there are none."""
    return None if array is None or rows == 0 else array[..., :rows, :]


def written(array: mx.array | None, rows: mx.array, slots: mx.array, least: int) -> mx.array:
    """An array [B, heads, S, size] of at least `least` slots, with rows [B, heads, n, size] in its
    slots, which have their shape or can be broadcast to it."""
    if array is None:
        array = mx.zeros((*rows.shape[:2], rounded(least), rows.shape[3]), rows.dtype)
    elif array.shape[2] < least:
        array = with_slots(array, rounded(least))
    assert array is not None
    return mx.put_along_axis(array, slots, rows, axis=2)

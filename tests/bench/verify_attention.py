"""What attention of a verify forward's rows should cost on each chip: one layer, in milliseconds.

    python -m tests.bench.verify_attention

PREDICTIONS, not measurements, by the rules of tests.bench.verify_rows: the longer of the bytes and
the lane operations, counted per element of the keys and values in the kernels' inner loops, but for
what is FITTED.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dspine_mlx.metal.attention import MAX_SIMDGROUPS, slices_of
from tests.bench.roofline import CHIPS, LAUNCH
from tests.bench.verify_rows import BEFORE_M3, MATRIX, SHOWN, STOCK_MATRIX, STOCK_ROW, UNPACK

KEYS, ROWS = 8192, (2, 4, 8, 16)
STAGED = 2.0  # a load from threadgroup memory and a conversion: per element and tile of 8 rows
VECTOR = 25.0  # FITTED: of a lane, per key, row and head; 4 and 8 rows reported for an M4 Pro
FULL_ROWS = 32  # of a tile of MLX's matrix kernels, however few are asked for


@dataclass(frozen=True)
class Heads:
    """Attention of one layer. bits: of its cache."""

    name: str
    queries: int
    keys: int
    size: int
    bits: int

    @property
    def share(self) -> int:
        return self.queries // self.keys

    @property
    def elements(self) -> int:
        """Of keys and values."""
        return 2 * self.keys * self.size * KEYS

    @property
    def bytes(self) -> float:
        scales = 4 / 64 if self.bits < 16 else 0.0
        return self.elements * (self.bits / 8 + scales)


LAYERS = (
    Heads("32/8 heads of 128", 32, 8, 128, 16),
    Heads("the same, 8 bits", 32, 8, 128, 8),
    Heads("32/4 heads of 512", 32, 4, 512, 16),  # a global layer of Gemma 4 31B (MLX #3885)
)


def seconds(chip: str, size: float, operations: float, launches: int) -> float:
    bandwidth, peak = CHIPS[chip]
    return launches * LAUNCH + max(size / bandwidth, operations / (peak / 2)) / 0.8


def parts(chip: str, rows: int, heads: Heads) -> float:
    """Of rows_attention: tiles of 8 rows of the heads that share a key."""
    tiles = -(-heads.share * rows // 8)
    blocks = -(-tiles * slices_of(heads.size, heads.size) // MAX_SIMDGROUPS)
    unpack = (UNPACK + 1) * blocks if heads.bits < 16 else 0.0
    operations = heads.elements * (tiles * (MATRIX + STAGED) + unpack)
    return seconds(chip, blocks * heads.bytes, operations, 2)


def stock(chip: str, rows: int, heads: Heads) -> float:
    """Of MLX: its vector kernel up to 8 rows and 32 of all heads that share a key, else products
    written out. These read keys and values for each head, here from a cache; a product of several
    rows is one of 32."""
    if heads.bits < 16:
        return packed(chip, rows, heads)
    if heads.size <= 256 and rows <= 8 and rows * heads.share <= 32:
        lane = 3 * heads.size / 32 + VECTOR
        operations = heads.queries * rows * KEYS * 32 * lane
        return seconds(chip, heads.bytes, operations, 2)
    tiles = FULL_ROWS // 8
    operations = heads.elements * heads.share * tiles * (MATRIX + STAGED)
    return seconds(chip, heads.bytes, operations, 3 if heads.size > 128 else 1)


def packed(chip: str, rows: int, heads: Heads) -> float:
    """Two quantised products and a softmax: row by row, or MLX's matrix kernel for 32 rows, which
    the product with the values takes from 4 rows on."""
    limit = 6 if chip in BEFORE_M3 else 13
    scores = STOCK_MATRIX if rows >= limit else rows * STOCK_ROW
    values = STOCK_MATRIX if rows >= 4 else rows * STOCK_ROW
    operations = heads.elements / 2 * heads.share * (scores + values)
    return seconds(chip, heads.bytes, operations, 6)


def as_heads(chip: str, rows: int, heads: Heads) -> float:
    """Of exact mode over a quantised cache: MLX's kernels for one row, for each row and head."""
    operations = heads.elements * heads.share * rows * STOCK_ROW
    return seconds(chip, heads.bytes, operations, 6)


Kernel = Callable[[str, int, Heads], float]


def row(chip: str, heads: Heads, kernel: Kernel, name: str) -> str:
    cells = " | ".join(f"{1e3 * kernel(chip, rows, heads):.2f}" for rows in ROWS)
    return f"| {chip}, {heads.name} | {name} | {cells} |"


def main() -> None:
    print(f"| chip, cache | | {' | '.join(map(str, ROWS))} |")
    print("|---" * (2 + len(ROWS)) + "|")
    for chip in SHOWN:
        for heads in LAYERS:
            kernels: dict[str, Kernel] = {"MLX's": stock, "rows_attention": parts}
            if heads.bits < 16:
                kernels["rows as heads"] = as_heads
            for name, kernel in kernels.items():
                print(row(chip, heads, kernel, name))


if __name__ == "__main__":
    main()

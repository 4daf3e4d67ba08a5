"""What several rows of one large product should cost on each chip, as multiples of one row.

    python -m tests.bench.verify_rows

PREDICTIONS, not measurements. A product takes the longer of its bytes at 80 % of the bandwidth and
its lane operations at 80 % of the float32 rate (half the FLOP/s: an operation is one lane's for one
cycle), and a launch on top. Operations per weight are counted in the kernels' inner loops, but for
those marked FITTED, which reproduce times that others reported for an M4 Pro and an M3 Ultra; such
a figure can't confirm the kernel it was fitted to.
"""

from collections.abc import Callable

from tests.bench.roofline import CHIPS, LAUNCH

OUTPUTS, COLUMNS, GROUP = 17408, 5120, 64
WIDTHS = (2, 3, 4, 5, 6, 8, 12, 16)
BEFORE_M3 = ("M1", "M2 Pro")  # their stock kernel unpacks each weight once per row
UNPACK = 2.0  # mask or shift, and convert: per weight
SPREAD = {4: 2.75, 8: 2.0}  # convert, scale and add to the sum: per column of x
MATRIX = 8.0  # per weight of an 8x8x8 step: 512 products in 32 lanes
TILE_UNPACK = 3.2  # FITTED: another matrix-unit kernel's 8 and 16 rows on an M4 Pro (mlx-dspark)
SLOW = 1.8  # FITTED: an M3 Ultra against the count of stock's loop (MLX #4265); 1.0 on an M4 Pro
STOCK_ROW = 7.1  # FITTED: a row of stock's kernel before the M3, per weight (MLX #4265)
STOCK_TILE, STOCK_TILE_ROW = 3.0, 2.3  # FITTED: a tile of 5 rows, and a row, from the M3 on (#3839)
STOCK_MATRIX = 36.0  # stock's matrix kernel: always 32 rows, and the unpacking


def tile(chip: str, rows: int, bits: int) -> float:
    """Lane operations per weight of rows_tile."""
    tiles = -(-rows // 8)
    unpack = TILE_UNPACK if bits < 16 else 0.0
    return -(-tiles // 2) * unpack + tiles * MATRIX


def exact(chip: str, rows: int, bits: int) -> float:
    """Of rows_exact in tiles of 4 rows and 8 outputs."""
    counted = -(-rows // 4) * UNPACK + rows * (1 + SPREAD[bits] / 8 + 3 / 16)
    return (SLOW if chip in BEFORE_M3 else 1.0) * counted


def stock(chip: str, rows: int, bits: int) -> float:
    """Of MLX's kernels for a matrix with a side above 4096; its limits are read in its source."""
    if rows >= (6 if chip in BEFORE_M3 else 13):
        return STOCK_MATRIX
    if chip in BEFORE_M3:
        return rows * STOCK_ROW
    return -(-rows // 5) * STOCK_TILE + rows * STOCK_TILE_ROW


def seconds(chip: str, bits: int, operations: float) -> float:
    bandwidth, peak = CHIPS[chip]
    weights = OUTPUTS * COLUMNS
    size = weights * (bits / 8 + (4 / GROUP if bits < 16 else 0))
    return LAUNCH + max(size / bandwidth, weights * operations / (peak / 2)) / 0.8


def row(chip: str, bits: int, operations: Callable[[str, int, int], float]) -> str:
    one = seconds(chip, bits, 0)
    cells = [f"{seconds(chip, bits, operations(chip, w, bits)) / one:.2f}" for w in WIDTHS]
    return f"| {chip} ({1e3 * one:.2f} ms) | {operations.__name__} | {' | '.join(cells)} |"


def main() -> None:
    for bits, kernels in ((4, (stock, exact, tile)), (8, (stock, exact, tile)), (16, (tile,))):
        print(f"\n{OUTPUTS} x {COLUMNS}, {bits} bits:\n")
        print("| chip (one row) | | " + " | ".join(map(str, WIDTHS)) + " |")
        print("|---" * (2 + len(WIDTHS)) + "|")
        for chip in (*BEFORE_M3, "M4 Pro", "M4 Max"):
            for operations in kernels:
                print(row(chip, bits, operations))


if __name__ == "__main__":
    main()

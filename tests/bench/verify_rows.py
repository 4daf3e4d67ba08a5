"""What several rows should cost on each chip, as multiples of one row: of a product, of a target.

    python -m tests.bench.verify_rows

PREDICTIONS, not measurements. A product takes the longer of its bytes at 80 % of the bandwidth and
its lane operations at 80 % of the float32 rate (half the FLOP/s: an operation is one lane's for one
cycle), and a launch on top. Operations per weight are counted in the kernels' inner loops, but for
those marked FITTED, which reproduce times that others reported for an M4 Pro and an M3 Ultra; such
a figure can't confirm the kernel it was fitted to. A target is the sum of its products, and of the
launches of everything else; tests.bench.simulate --predicted replays rounds on it.
"""

from collections.abc import Callable
from typing import Any

from tests.bench.roofline import CHIPS, LAUNCH

LARGE, GROUP = (17408, 5120), 64  # outputs and columns of the product in the tables
QWEN3_8B = {  # shape: how many
    (4096, 4096): 72, (1024, 4096): 72, (12288, 4096): 72, (4096, 12288): 36, (151936, 4096): 1,
}  # fmt: skip
OTHER_LAUNCHES = 36 * 10  # norms, ropes, attention, activations and sums of its layers
KEYS = 2 * 36 * 1024 * 2.0  # bytes of keys and values per position, of 16 bits
DRAFTS = {  # ms of a round of tests.bench.roofline, with kernels, drafter and head of as many bits
    4: {"M1": 25.2, "M2 Pro": 9.8, "M4 Pro": 8.3, "M4 Max": 4.3},
    8: {"M1": 32.8, "M2 Pro": 11.4, "M4 Pro": 8.5, "M4 Max": 4.4},
    16: {"M1": 60.1, "M2 Pro": 20.7, "M4 Pro": 15.2, "M4 Max": 7.8},
}
WIDTHS = (2, 3, 4, 5, 6, 8, 12, 16)
BEFORE_M3 = ("M1", "M2 Pro")  # their stock kernel unpacks each weight once per row
SHOWN = (*BEFORE_M3, "M4 Pro", "M4 Max")
UNPACK = 2.0  # mask or shift, and convert: per weight
SPREAD = {4: 2.75, 8: 2.0}  # convert, scale and add to the sum: per column of x
MATRIX = 8.0  # per weight of an 8x8x8 step: 512 products in 32 lanes
TILE_UNPACK = 3.2  # FITTED: another matrix-unit kernel's 8 and 16 rows on an M4 Pro (mlx-dspark)
SLOW = 1.8  # FITTED: an M3 Ultra against the count of stock's loop (MLX #4265); 1.0 on an M4 Pro
STOCK_ROW = 7.1  # FITTED: a row of stock's kernel before the M3, per weight (MLX #4265)
STOCK_TILE, STOCK_TILE_ROW = 3.0, 2.3  # FITTED: a tile of 5 rows, and a row, from the M3 on (#3839)
STOCK_MATRIX = 36.0  # stock's matrix kernel: always 32 rows, and the unpacking
STOCK_FLOATS = 1.99  # FITTED: 2 to 16 rows of float weights on an M3 Ultra, MLX < 0.32.1 (#4265)
Shape = tuple[int, int]
Kernel = Callable[[str, int, int, Shape], float | None]  # chip, rows, bits, shape -> seconds


def seconds(chip: str, bits: int, shape: Shape, operations: float, reads: float = 1.0) -> float:
    bandwidth, peak = CHIPS[chip]
    weights = shape[0] * shape[1]
    size = weights * (bits / 8 + (4 / GROUP if bits < 16 else 0))
    return LAUNCH + max(reads * size / bandwidth, weights * operations / (peak / 2)) / 0.8


def tile(chip: str, rows: int, bits: int, shape: Shape) -> float | None:
    """Seconds of rows_tile."""
    tiles = -(-rows // 8)
    unpack = TILE_UNPACK if bits < 16 else 0.0
    return seconds(chip, bits, shape, -(-tiles // 2) * unpack + tiles * MATRIX)


def exact(chip: str, rows: int, bits: int, shape: Shape) -> float | None:
    """Of rows_exact in tiles of 4 rows and 8 outputs; it serves packed weights."""
    if bits == 16:
        return None
    counted = -(-rows // 4) * UNPACK + rows * (1 + SPREAD[bits] / 8 + 3 / 16)
    return seconds(chip, bits, shape, (SLOW if chip in BEFORE_M3 else 1.0) * counted)


def stock(chip: str, rows: int, bits: int, shape: Shape) -> float:
    """Of MLX's kernels; the number of rows at which it changes kernels is read in its source."""
    if bits == 16:
        old = chip in BEFORE_M3 and rows > 1
        return seconds(chip, bits, shape, 0.0, STOCK_FLOATS if old else 1.0)
    if rows == 1:
        return seconds(chip, bits, shape, 0.0)
    medium = max(shape) <= 4096
    if rows >= ((10 if medium else 6) if chip in BEFORE_M3 else (15 if medium else 13)):
        return seconds(chip, bits, shape, STOCK_MATRIX)
    if chip in BEFORE_M3:
        return seconds(chip, bits, shape, rows * STOCK_ROW)
    return seconds(chip, bits, shape, -(-rows // 5) * STOCK_TILE + rows * STOCK_TILE_ROW)


def raced(chip: str, rows: int, bits: int, shape: Shape) -> float:
    """What a race would choose."""
    kernels = (tile, exact) if rows > 1 else ()
    others = (kernel(chip, rows, bits, shape) for kernel in kernels)
    return min([stock(chip, rows, bits, shape), *(s for s in others if s is not None)])


def step(
    chip: str, rows: int, bits: int, product: Callable[[str, int, int, Shape], float]
) -> float:
    """Seconds of a forward of Qwen3-8B over so many rows, in a short context."""
    products = sum(n * product(chip, rows, bits, shape) for shape, n in QWEN3_8B.items())
    return products + OTHER_LAUNCHES * LAUNCH


def curve(chip: str, bits: int, product: Callable[[str, int, int, Shape], float]) -> dict[str, Any]:
    """Costs of rounds on this target, as an entry of curves.json."""
    one = step(chip, 1, bits, product)
    rows = {str(n): step(chip, n, bits, product) / one for n in range(1, 17)}
    return {
        "name": f"{chip}, {bits} bits, {'kernels' if product is raced else 'stock'}",
        "step_ms": 1e3 * one,
        "draft": DRAFTS[bits][chip] / (1e3 * one),
        "kv_ms_per_1k": 1e6 * KEYS / (0.8 * CHIPS[chip][0]),
        "rows": rows,
    }


def predicted() -> list[dict[str, Any]]:
    """The curves of all chips and packings: MLX's products, then with kernels."""
    chips = [(chip, bits) for chip in SHOWN for bits in DRAFTS]
    return [curve(chip, bits, product) for chip, bits in chips for product in (stock, raced)]


def row(chip: str, bits: int, kernel: Kernel) -> str:
    one = stock(chip, 1, bits, LARGE)
    times = [kernel(chip, rows, bits, LARGE) for rows in WIDTHS]
    cells = ["-" if time is None else f"{time / one:.2f}" for time in times]
    return f"| {chip} ({1e3 * one:.2f} ms) | {kernel.__name__} | {' | '.join(cells)} |"


def head(what: str) -> str:
    return f"| {what} | | {' | '.join(map(str, WIDTHS))} |\n" + "|---" * (2 + len(WIDTHS)) + "|"


def main() -> None:
    kernels: dict[int, tuple[Kernel, ...]] = {4: (stock, exact, tile), 8: (stock, exact, tile)}
    for bits, shown in (kernels | {16: (stock, tile)}).items():
        print(f"\n{LARGE[0]} x {LARGE[1]}, {bits} bits:\n\n{head('chip (one row)')}")
        for chip in SHOWN:
            for kernel in shown:
                print(row(chip, bits, kernel))
    print(f"\nA forward of Qwen3-8B:\n\n{head('chip, bits (one row)')}")
    for entry in predicted():
        name, _, which = entry["name"].rpartition(", ")
        cells = " | ".join(f"{entry['rows'][str(n)]:.2f}" for n in WIDTHS)
        print(f"| {name} ({entry['step_ms']:.1f} ms) | {which} | {cells} |")


if __name__ == "__main__":
    main()

"""Products for the rows of a verify forward: MLX's own, or a kernel of `dspine_mlx.metal`."""

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import mlx.core as mx

from dspine_mlx.metal.rows import Matrix, Tile, multiply
from dspine_mlx.metal.rows_exact import Exact, Form, apart


class Product(Protocol):
    """y = x W^T for x [M, K] and W [N, K]."""

    def __call__(self, x: mx.array, matrix: Matrix) -> mx.array: ...

    def limits(self, x: mx.array, matrix: Matrix) -> str | None:
        """Why this product does not serve these arguments, or None."""


@dataclass(frozen=True)
class Stock:
    """MLX's own product of all rows."""

    def __call__(self, x: mx.array, matrix: Matrix) -> mx.array:
        return multiply(x, matrix)

    def limits(self, x: mx.array, matrix: Matrix) -> str | None:
        return None


@dataclass(frozen=True)
class Apart:
    """MLX's product of one row, row by row: plain decoding's bits on any machine."""

    def __call__(self, x: mx.array, matrix: Matrix) -> mx.array:
        return apart(x, matrix)

    def limits(self, x: mx.array, matrix: Matrix) -> str | None:
        return None


@dataclass(frozen=True)
class Unpacked:
    """The weight unpacked once for all rows, then one product. For CPUs, where MLX unpacks it for
    each row."""

    def __call__(self, x: mx.array, matrix: Matrix) -> mx.array:
        weight = mx.dequantize(
            matrix.weight,
            scales=matrix.scales,
            biases=matrix.biases,
            group_size=matrix.group_size,
            bits=matrix.bits,
            mode=matrix.mode,
            dtype=x.dtype,
        )
        return x @ weight.T

    def limits(self, x: mx.array, matrix: Matrix) -> str | None:
        return "not packed" if matrix.scales is None else None


STOCK, APART, UNPACKED = Stock(), Apart(), Unpacked()
KINDS = {"stock": Stock, "apart": Apart, "unpacked": Unpacked, "tile": Tile, "exact": Exact}
NAMES = {kind: name for name, kind in KINDS.items()}


def name(product: Product) -> str:
    """The product's name in reports, such as "tile 4x8"."""
    kind = NAMES[type(product)]
    if isinstance(product, Tile):
        return f"{kind} {product.tiles}x{product.split}"
    if isinstance(product, Exact):
        return f"{kind} {product.rows}x{product.outputs}"
    return kind


def to_dict(product: Product) -> dict[str, Any]:
    return {"kernel": NAMES[type(product)], **asdict(product)}  # type: ignore[call-overload]


def from_dict(data: dict[str, Any]) -> Product:
    """Read a product from JSON; ValueError, KeyError or TypeError if it is none."""
    fields = dict(data)
    kind = KINDS[fields.pop("kernel")]
    if kind is Exact:
        packs, wide, fuse = fields.pop("form")
        fields["form"] = Form(int(packs), bool(wide), int(fuse))
    product: Product = kind(**fields)
    return product

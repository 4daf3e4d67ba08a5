"""What multiplies, or attends, for the rows of a verify forward: MLX, or a kernel of
`dspine_mlx.metal`."""

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import mlx.core as mx

from dspine_mlx.metal.attention import Attended, Parts, attend
from dspine_mlx.metal.exact_attention import AsHeads, ExactAttention, attend_apart
from dspine_mlx.metal.experts import ExactExperts, Experts, gather, gather_apart
from dspine_mlx.metal.rows import Matrix, Tile, multiply
from dspine_mlx.metal.rows_exact import Exact, Form, apart


class Product(Protocol):
    """y = x W^T for x [M, K] and W [N, K]; or the attention of queries x to an `Attended`; or the
    products of rows x with their `Experts`."""

    def __call__(self, x: mx.array, matrix: Any, /) -> mx.array: ...

    def limits(self, x: mx.array, matrix: Any, /) -> str | None:
        """Why this product does not serve these arguments, or None."""


@dataclass(frozen=True)
class Stock:
    """MLX's own, for all rows."""

    def __call__(self, x: mx.array, matrix: Any) -> mx.array:
        if isinstance(matrix, Attended):
            return attend(x, matrix)
        return gather(x, matrix) if isinstance(matrix, Experts) else multiply(x, matrix)

    def limits(self, x: mx.array, matrix: Any) -> str | None:
        return None


@dataclass(frozen=True)
class Apart:
    """MLX's own for one row, row by row: plain decoding's bits on any machine."""

    def __call__(self, x: mx.array, matrix: Any) -> mx.array:
        if isinstance(matrix, Attended):
            return attend_apart(x, matrix)
        return gather_apart(x, matrix) if isinstance(matrix, Experts) else apart(x, matrix)

    def limits(self, x: mx.array, matrix: Any) -> str | None:
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
KINDS: dict[str, type[Product]] = {
    "stock": Stock,
    "apart": Apart,
    "unpacked": Unpacked,
    "tile": Tile,
    "exact": Exact,
    "attention": Parts,
    "exact_attention": ExactAttention,
    "as_heads": AsHeads,
    "exact_experts": ExactExperts,
}
NAMES = {kind: name for name, kind in KINDS.items()}


def name(product: Product) -> str:
    """The product's name in reports, such as "tile 4x8"."""
    kind = NAMES[type(product)]
    if isinstance(product, Tile):
        return f"{kind} {product.tiles}x{product.split}"
    if isinstance(product, Exact):
        return f"{kind} {product.rows}x{product.outputs}"
    if isinstance(product, ExactExperts):
        return f"exact experts {product.rows}x{product.outputs}"
    if isinstance(product, Parts):
        return f"attention in {product.parts} parts"
    if isinstance(product, ExactAttention):
        return f"exact attention in {product.blocks} blocks"
    if isinstance(product, AsHeads):
        return f"rows as heads, keys in {product.parts} parts"
    return kind


def to_dict(product: Product) -> dict[str, Any]:
    return {"kernel": NAMES[type(product)], **asdict(product)}  # type: ignore[call-overload]


def from_dict(data: dict[str, Any]) -> Product:
    """Read a product from JSON; ValueError, KeyError or TypeError if it is none."""
    fields = dict(data)
    kind = KINDS[fields.pop("kernel")]
    if kind in (Exact, ExactExperts):
        packs, wide, fuse = fields.pop("form")
        fields["form"] = Form(int(packs), bool(wide), int(fuse))
    product: Product = kind(**fields)
    return product

"""The linear layers of a target, and the classes that multiply as a race decided."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.metal.rows import Matrix
from dspine_mlx.target.model import Target
from dspine_mlx.target.products import STOCK, Apart, Product, Stock
from dspine_mlx.target.swap import swapping

SUMMED = (nn.ShardedToAllLinear, nn.QuantizedShardedToAllLinear)  # over the ranks of a group
SHARDED = (nn.AllToShardedLinear, nn.QuantizedAllToShardedLinear, *SUMMED)
LINEAR = (nn.QuantizedLinear, nn.Linear, *SHARDED)
EMBEDDINGS = (nn.QuantizedEmbedding, nn.Embedding)


def linear_layers(target: Target) -> list[nn.Module]:
    """Linear layers of the decoder stack, then the LM head: if tied, an embedding with
    `as_linear`."""
    layers = [m for m in target.body.modules() if type(m) in LINEAR]
    head = target.fed_head
    if type(head) in (EMBEDDINGS if target.tied else LINEAR):
        layers.append(head)
    once = {id(layer): layer for layer in layers}
    return list(once.values())


def dtypes_of_rows(target: Target, layers: list[nn.Module]) -> dict[int, mx.Dtype]:
    """The dtype of what each layer multiplies, by its id: not always the embedding's, as where
    mxfp4 meets weights of float16. A forward over two tokens is built, and never run."""
    found: dict[int, mx.Dtype] = {}
    classes = {cls: noting(cls, found) for cls in set(map(type, layers))}
    with swapping([(layer, classes[type(layer)]) for layer in layers]):
        target.model(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(target.model))
    return found


def noting(cls: type[nn.Module], found: dict[int, mx.Dtype]) -> type[nn.Module]:
    method = called(cls)
    base = getattr(cls, method)

    def multiply(self: nn.Module, x: mx.array) -> mx.array:
        found[id(self)] = x.dtype
        y: mx.array = base(self, x)
        return y

    return type(cls.__name__, (cls,), {method: multiply})


def called(cls: type[nn.Module]) -> str:
    """The method by which a layer multiplies."""
    return "as_linear" if issubclass(cls, EMBEDDINGS) else "__call__"


def swapped(
    cls: type[nn.Module], products: dict[int, Product], unsettled: Product, dtype: mx.Dtype
) -> type[nn.Module]:
    """A subclass of a linear layer, or of an embedding that is a head. It multiplies by the entry
    of `products` for its number of rows, or by `unsettled` without one."""
    method = called(cls)
    base = getattr(cls, method)

    def multiply(self: nn.Module, x: mx.array) -> mx.array:
        columns = x.shape[-1]
        rows = x.size // columns
        product = products.get(rows, unsettled) if rows > 1 and x.dtype == dtype else STOCK
        if isinstance(product, Stock):
            y: mx.array = base(self, x)
            return y
        if isinstance(product, Apart):  # by plain decoding's own calls, a layer's bias included
            each = x.reshape(1, rows, columns).split(rows, axis=1)
            y = mx.concatenate([base(self, row) for row in each], axis=1)
            return y.reshape(*x.shape[:-1], -1)
        y = product(x.reshape(-1, columns), Matrix.of(self)).reshape(*x.shape[:-1], -1)
        if issubclass(cls, SUMMED):
            y = mx.distributed.all_sum(y, group=self.group)
        return y + self.bias if "bias" in self else y

    return type(cls.__name__, (cls,), {method: multiply})

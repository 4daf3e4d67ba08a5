"""The target: an mlx-lm model whose layer outputs can be read, with its embedding and head."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.errors import InputError
from dspine_mlx.metal.kernel import Lookup
from dspine_mlx.metal.transition import PACKED_BITS
from dspine_mlx.target.given_cache import Layout, target_layout
from dspine_mlx.target.kv_quantization import KVQuantization
from dspine_mlx.target.ranks import Alone, Ranks
from dspine_mlx.target.rollback import Rollback
from dspine_mlx.target.swap import swapping

# Where mlx-lm's models keep the decoder stack, and what the stack calls its embedding.
BODIES = (("model",), ("language_model", "model"), ("backbone",))
EMBEDDINGS = ("embed_tokens", "embeddings")


class VerifyKernels(Protocol):
    """The products and attention of a verify forward.

    width_limit: the most rows a verify forward may have; digest: identifies what runs, "" if all is
    MLX's own.
    """

    @property
    def width_limit(self) -> float: ...

    @property
    def digest(self) -> str: ...

    def promise(self) -> str:
        """What verify forwards promise about plain decoding's bits, in a sentence."""

    def explain(self) -> list[str]:
        """Sentences for `doctor`."""

    def report(self) -> dict[str, Any]:
        """Facts for bug reports and health pages."""

    def verifying(self, rows: int) -> AbstractContextManager[None]:
        """Context for one forward over so many rows, of one text or of several."""

    def expect_caches(self, bits: int, group_size: int) -> None:
        """Prepare for caches quantised so, on all ranks."""

    def race_caches(self, bits: int, group_size: int) -> None:
        """This rank's part of it."""


class StockKernels:
    """MLX's own, for any number of rows."""

    width_limit = math.inf
    digest = ""

    def promise(self) -> str:
        return "Verify rows are multiplied by MLX, which may round several rows in other ways."

    def explain(self) -> list[str]:
        return [self.promise()]

    def report(self) -> dict[str, Any]:
        return {"mode": "stock"}

    def verifying(self, rows: int) -> AbstractContextManager[None]:
        return nullcontext()

    def expect_caches(self, bits: int, group_size: int) -> None: ...

    def race_caches(self, bits: int, group_size: int) -> None: ...


class Target:
    """An mlx-lm model as drafters see it.

    layers: its decoder layers. embed(ids) -> [..., d]: the raw embedding, without the model's own
    scale. head(states) -> [..., V]: the raw LM head, without soft-capping. hidden_size d,
    vocab_size V and dtype (of activations) are read off the embedding. The model is not changed.
    verify_kernels: used in verify forwards only. ranks: who else has a part of it.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.layers: list[nn.Module] = list(model.layers)
        owner, body = find_body(model)
        self.body = body
        self.embed: nn.Module = next(body[name] for name in EMBEDDINGS if name in body)
        self.tied = "lm_head" not in owner
        self.lm_head: nn.Module = self.embed if self.tied else owner["lm_head"]
        self.vocab_size, self.hidden_size = weight_shape(self.embed)
        self.dtype = self.embed(mx.array([0])).dtype
        self.verify_kernels: VerifyKernels = StockKernels()
        self.ranks: Ranks = Alone()
        self._tapped = Tapped()
        self._recording = {cls: recording(cls, self._tapped) for cls in set(map(type, self.layers))}

    @property
    def fed_head(self) -> nn.Module:
        """The LM head of the model's own forwards."""
        return self.lm_head

    @cached_property
    def cache_layout(self) -> Layout:
        """What its caches hold, without a forward."""
        return target_layout(self.model)

    def head(self, states: mx.array) -> mx.array:
        return self.lm_head.as_linear(states) if self.tied else self.lm_head(states)

    def head_rows(self, tokens: mx.array) -> mx.array:
        """The LM head's rows [..., d] of some tokens, dequantised if need be."""
        head = self.lm_head
        if "scales" not in head:
            return head.weight[tokens]
        biases = head.get("biases")  # absent or None in the mx modes
        return mx.dequantize(
            head.weight[tokens],
            scales=head.scales[tokens],
            biases=None if biases is None else biases[tokens],
            group_size=head.group_size,
            bits=head.bits,
            mode=head.mode,
        )

    def with_head_rows(self, tokens: mx.array) -> "Target":
        """The same target with a smaller head: a copy of some tokens' rows, packed as they are."""
        other, other.lm_head = copy(self), copy(self.lm_head)
        for name in ("weight", "scales", "biases", "bias"):
            if isinstance(other.lm_head.get(name), mx.array):
                other.lm_head[name] = other.lm_head[name][tokens]
        if "weight" not in other.lm_head:
            raise InputError(
                f"the LM head is a {type(self.lm_head).__name__} without a weight of its own; rows "
                "for a reduced draft vocabulary can't be picked from it"
            )
        return other

    def head_lookup(self, tokens: mx.array) -> Lookup:
        """The LM head's rows of some tokens, to be read in place; a copy of them if the packing
        can't be read by rows."""
        head = self.lm_head
        if "scales" not in head:
            return Lookup(tokens, head.weight)
        if head.mode == "affine" and head.bits in PACKED_BITS:
            packed = (head.weight, head.scales, head.biases)
            return Lookup(tokens, *packed, head.group_size, head.bits)
        rows = mx.arange(tokens.size, dtype=mx.uint32).reshape(tokens.shape)
        return Lookup(rows, self.head_rows(tokens.reshape(-1)))

    @contextmanager
    def taps(self, ids: tuple[int, ...], eager_taps: bool = False) -> Iterator[None]:
        """Record the output of layers `ids` within the block. `eager_taps` sends each tapped layer
        off to the device as soon as it is built.

        A layer's class is swapped for a recording subclass and swapped back on every exit, so
        logits are bit-identical and the parameter tree never changes.
        """
        tapped = [self.layers[i] for i in ids]
        self._tapped.rows.clear()
        self._tapped.eager = eager_taps
        try:
            with swapping([(layer, self._recording[type(layer)]) for layer in tapped]):
                yield
        finally:
            self._tapped.eager = False

    def forward(
        self, tokens: mx.array, cache: list[Any], ids: tuple[int, ...], eager_taps: bool = False
    ) -> tuple[mx.array, mx.array]:
        """Run one forward over tokens [n]: logits [n, V] and features [1, n, m*d] of the m taps.
        Tokens [B, n] of several texts give logits [B, n, V] and features [B, n, m*d].

        eager_taps: send each tapped layer off as soon as it is built, so that an idle device
        starts while the host still builds the layers after it.
        """
        several = tokens.ndim == 2
        with self.taps(ids, eager_taps):
            logits = self.model(tokens if several else tokens[None], cache=cache)
        features = self._tapped.features([self.layers[i] for i in ids]) if ids else nothing(tokens)
        return logits if several else logits[0], features

    def rollback(self, cache: list[Any], kv: KVQuantization, ids: tuple[int, ...]) -> Rollback:
        """The rollback of a new text's caches. kv: how they are quantised; ids: the taps of its
        forwards."""
        return Rollback(cache, self.model)

    def states(self, tokens: mx.array, ids: tuple[int, ...]) -> tuple[mx.array, mx.array]:
        """Run tokens [S, n] without a cache. Returns the normalised last states [S, n, d], which
        `head` turns into logits, and the features [S, n, m*d] of the taps."""
        with self.taps(ids):
            states = self.body(tokens)
        return states, self._tapped.features([self.layers[i] for i in ids])


def nothing(tokens: mx.array) -> mx.array:
    """Features of no layer: [1, n, 0] of tokens [n], [B, n, 0] of tokens [B, n]."""
    return mx.zeros((tokens.shape[0] if tokens.ndim == 2 else 1, tokens.shape[-1], 0))


class Tapped:
    """Outputs of a forward's tapped layers, by the layer's id."""

    def __init__(self) -> None:
        self.rows: dict[int, mx.array] = {}
        self.eager = False

    def add(self, layer: nn.Module, states: mx.array) -> None:
        self.rows[id(layer)] = states
        if self.eager:
            mx.async_eval(states)

    def features(self, layers: list[nn.Module]) -> mx.array:
        """Concatenate the layers' outputs and let go of them."""
        features = mx.concatenate([self.rows[id(layer)] for layer in layers], axis=-1)
        self.rows.clear()
        return features


def recording(cls: type[nn.Module], tapped: Tapped) -> type[nn.Module]:
    """A subclass of a decoder layer that also adds its output to `tapped`."""

    class Recording(cls):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            tapped.add(self, output[0] if isinstance(output, tuple) else output)
            return output

    Recording.__name__ = cls.__name__
    return Recording


def find_body(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The module that holds the LM head (if any), and the decoder stack inside it."""
    for path in BODIES:
        owner, body = model, model
        for name in path:
            if not isinstance(body, nn.Module) or name not in body:
                break
            owner, body = body, body[name]
        else:
            if any(name in body for name in EMBEDDINGS):
                return owner, body
    raise InputError(
        f"can't find the embedding of a {type(model).__module__} model; expected "
        f"{' or '.join('.'.join(path) for path in BODIES)} with {' or '.join(EMBEDDINGS)}"
    )


def weight_shape(embedding: nn.Module) -> tuple[int, int]:
    """(V, d) of an embedding, packed or not."""
    rows = embedding.weight.shape[0]
    if "scales" in embedding:
        return rows, embedding.scales.shape[1] * embedding.group_size
    return rows, embedding.weight.shape[1]

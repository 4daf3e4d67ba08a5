"""A prompt cache that the caller gives: whether it is this model's.

mlx-lm does not check. A cache of another model fails somewhere in a forward, when the caches of
some layers have been changed already, or is read as if its rows were this model's.
"""

from typing import Any, NamedTuple
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    _BaseCache,
    make_prompt_cache,
)

from dspine_mlx.errors import InputError
from dspine_mlx.target.rollback import leaves

# What attention without a window may keep its rows in.
UNLIMITED = (KVCache, QuantizedKVCache, RotatingKVCache, ConcatenateKVCache)
Shape = tuple[int, ...]


class Place(NamedTuple):
    """What a layer's cache is: its class, the window of attention, and the shapes [1, H, D] of keys
    and values of one position, or of recurrent states."""

    kind: type
    window: int | None
    shapes: list[Shape | None]


Layout = list[list[Place]]  # of each entry, a CacheList's members one by one
LAYOUTS: dict[int, tuple[ref[nn.Module], Layout]] = {}  # by the id of a model


def target_layout(model: nn.Module) -> Layout:
    """A model's own, found once: of caches that a forward over one token would fill, which is never
    run."""
    key = id(model)
    known, found = LAYOUTS.get(key, (None, []))
    if known is None or known() is not model:
        caches = make_prompt_cache(model)
        model(mx.array([[0]]), cache=caches)
        found = layout(caches)
        LAYOUTS[key] = ref(model, lambda _: LAYOUTS.pop(key, None)), found
    return found


def layout(caches: list[Any]) -> Layout:
    return [[place(cache) for cache in leaves([entry])] for entry in caches]


def place(cache: Any) -> Place:
    window = cache.max_size if isinstance(cache, RotatingKVCache) else None
    return Place(type(cache), window, shapes(cache))


def shapes(cache: Any) -> list[Shape | None]:
    """Shapes of what a cache holds, without the axis of positions; empty where it is not known."""
    if isinstance(cache, ArraysCache):
        return [None if x is None else timeless(x.shape) for x in cache.cache]
    if not isinstance(cache, UNLIMITED) or cache.keys is None:
        return []
    if isinstance(cache, QuantizedKVCache):
        packed = [x[0].shape for x in (cache.keys, cache.values)]
        return [(B, H, width * 32 // cache.bits) for B, H, _, width in packed]
    return [x.shape[:2] + x.shape[3:] for x in (cache.keys, cache.values)]


def timeless(shape: Shape) -> Shape:
    """A convolution's window [1, k, C] without its k, which may grow; other states as they are."""
    return (shape[0], *shape[2:]) if len(shape) == 3 else shape


def check_given(given: list[Any], own: Layout, first: int = 0, whose: str = "target") -> None:
    """`InputError` unless the entries of a prompt cache, from the first on, are laid out like one's
    own."""
    for i, places in enumerate(own, first):
        caches = list(leaves([given[i]]))
        for cache in caches:
            if not isinstance(cache, (_BaseCache, *(place.kind for place in places))):
                raise InputError(f"prompt_cache[{i}] is {cache!r}; it must be a cache of mlx-lm's")
        if len(caches) != len(places):
            raise InputError(
                f"prompt_cache[{i}] is {len(caches)} caches, this {whose} has {len(places)} there; "
                "it is another model's"
            )
        for cache, wanted in zip(caches, places, strict=True):
            check_place(f"prompt_cache[{i}]", cache, wanted, whose)


def check_place(name: str, cache: Any, wanted: Place, whose: str) -> None:
    kinds = UNLIMITED if wanted.kind is KVCache else wanted.kind
    if not isinstance(cache, kinds):
        raise InputError(
            f"{name} is a {type(cache).__name__}, this {whose} has a {wanted.kind.__name__} there; "
            "it is another model's"
        )
    found = place(cache)
    if wanted.window not in (None, found.window):
        raise InputError(
            f"{name} has a window of {found.window}, this {whose}'s is {wanted.window}; it is "
            "another model's"
        )
    for has, needs in zip(found.shapes, wanted.shapes, strict=False):
        if has is not None and needs is not None and has != needs:
            raise InputError(
                f"{name} has entries of shape {has}, this {whose}'s are {needs}; it is another "
                "model's"
            )
    if isinstance(cache, ArraysCache) and len(found.shapes) != len(wanted.shapes):
        raise InputError(
            f"{name} has {len(found.shapes)} states, this {whose}'s {len(wanted.shapes)}; it is "
            "another model's"
        )


def check_length(given: Any, model: nn.Module) -> int:
    """Require a list with an entry for each of the model's caches; returns their number."""
    count = len(make_prompt_cache(model))
    if not isinstance(given, list):
        raise InputError(f"prompt_cache is a {type(given).__name__}; it must be a list")
    if len(given) < count:
        raise InputError(f"prompt_cache has {len(given)} entries; this target needs {count}")
    return count

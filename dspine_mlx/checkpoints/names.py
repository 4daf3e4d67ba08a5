"""From a checkpoint's tensor names to the drafter's parameter paths, by a layout's table."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping

import mlx.core as mx

from dspine_mlx.drafters.method import Layout

LAYER = re.compile(r"\.(\d+)\.", re.ASCII)
Sources = dict[str, tuple[str, ...]]
Problems = dict[str, list[str]]


def pattern_of(name: str) -> str:
    """A tensor's name or parameter's path as in tables, with {i} for the layer."""
    return LAYER.sub(".{i}.", name)


def parameter(layout: Layout, name: str) -> str | None:
    """A tensor's path in the drafter, with #k for part k; "": it holds no parameter; None: unknown.

    The network's own paths are names in every layout. A packed weight's scales and biases follow
    it.
    """
    name = name.removeprefix("model.")
    for suffix in (".scales", ".biases"):
        if name.endswith(suffix):
            weight = parameter(layout, name.removesuffix(suffix) + ".weight")
            return weight and weight.replace(".weight", suffix)
    layers = LAYER.findall(name)
    path = layout.names.get(pattern_of(name))
    if path is None and pattern_of(name) in layout.paths:
        return name
    return path and path.replace("{i}", layers[0] if layers else "")


def match(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Sources, Problems]:
    """Match tensors to parameters. Returns the tensors of each parameter, in order, and the
    problems: parts that are missing, unexpected, claimed twice, or of another shape than the other
    parts."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    unexpected = []
    for name in sorted(shapes):
        place = parameter(layout, name)
        if place is None:
            unexpected.append(f"{name} {list(shapes[name])}")
        elif place:
            path, _, part = place.partition("#")
            places[path, part].append(name)
    twice = [f"{path} by {' and '.join(names)}" for (path, _), names in places.items() if names[1:]]
    missing, uneven = [], []
    sources: Sources = {}
    for path in sorted({path for path, _ in places}):
        wanted = parts_of(layout, path)
        parts = [places[path, str(k)][0] for k in range(len(wanted)) if (path, str(k)) in places]
        whole = places.get((path, ""), [])
        if whole and parts:
            twice.append(f"{path} by {whole[0]} and {parts[0]}")
        if not whole:
            missing += [wanted[k] for k in range(len(wanted)) if (path, str(k)) not in places]
        if len({shapes[name] for name in parts}) > 1:
            uneven.append(", ".join(f"{name} {list(shapes[name])}" for name in parts))
        sources[path] = (whole[0],) if whole else tuple(parts)
    return sources, {
        "missing": missing,
        "unexpected": unexpected,
        "twice": twice,
        "wrong shape": uneven,
    }


def published(layout: Layout, path: str) -> list[str]:
    """The layout's names for the tensors of a parameter."""
    layer = next(iter(LAYER.findall(path)), "")
    whole = [name for name, to in layout.names.items() if to == pattern_of(path)]
    found = parts_of(layout, path) or whole[:1]
    return [name.replace("{i}", layer) for name in found] or [path]


def parts_of(layout: Layout, path: str) -> list[str]:
    """Tensors that are stacked into a parameter, in order; empty for most."""
    parts = [
        (target, name) for name, target in layout.names.items() if target.startswith(f"{path}#")
    ]
    return [name for _, name in sorted(parts)]


def unknown(layout: Layout, names: Collection[str]) -> list[str]:
    """Names that are not in the layout's table."""
    return sorted(n for n in names if parameter(layout, n) is None)


def published_weights(layout: Layout, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Rename a network's parameters to a layout's names: the inverse of `match`."""
    named: dict[str, mx.array] = {}
    for path, value in weights.items():
        names = published(layout, path)
        named |= zip(names, mx.split(value, len(names)) if names[1:] else [value], strict=True)
    return named

"""A drafter's folder, converted or not: opened, identified, checked, and turned into parameters."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from dspine_mlx.checkpoints.detect import detect
from dspine_mlx.checkpoints.files import (
    Tensors,
    file_tensors,
    load_tensors,
    read_config,
    read_tensors,
)
from dspine_mlx.checkpoints.names import (
    Problems,
    Sources,
    match,
    parameter,
    parts_of,
    published,
    unknown,
)
from dspine_mlx.checkpoints.rope import assumed_rope_theta, states_rope_theta
from dspine_mlx.checkpoints.shapes import match_by_shape
from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.method import Layout, Method
from dspine_mlx.drafters.transfer_space import CODES, SPACE, space_shapes
from dspine_mlx.errors import InputError

T2D = "t2d"


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's folder before any weight is read."""

    folder: Path
    raw: dict[str, Any]  # config.json, with the taps that were given
    tensors: Tensors
    method: Method
    layout: Layout
    config: DrafterConfig
    sources: Sources  # parameter path -> the tensors it is made of, in order
    problems: Problems
    notes: tuple[str, ...] = ()

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return stacked_shapes(self.sources, self.tensors)

    def build(self) -> DFlash:
        """Build the network with these settings; its weights are the modules' initial ones."""
        try:
            network = self.method.network(self.config)
            network.add_own_embeddings(self.sources)
        except OverflowError as error:  # a product of sizes, each within its limits
            raise InputError(f"the drafter's config.json has too large sizes: {error}") from error
        return network

    @property
    def codes_rank(self) -> int | None:
        """The rank of the drafter's transfer codes; None if its method has none."""
        return None if self.method.codes is None else vars(self.config)[self.method.codes]

    def check(self, network: DFlash, given: Collection[str] = ()) -> None:
        """Name all missing, unexpected, repeated, wrongly shaped and wrongly typed tensors at once.

        given: parameters that come from elsewhere.
        """
        own = dict(tree_flatten(network.parameters()))
        expected = {k: tuple(v.shape) for k, v in own.items()}
        if self.codes_rank is not None and SPACE[0] in self.sources:
            expected |= space_shapes(self.config.hidden_size, self.codes_rank)
            given = [*given, CODES]
        for path in given:
            if path not in self.sources:
                expected.pop(path, None)
        shapes = self.shapes
        absent = [published(self.layout, path) for path in sorted(expected.keys() - shapes.keys())]
        missing = self.problems["missing"] + [name for names in absent for name in names]
        found = {
            "missing": [f"{name} {wanted_shape(self.layout, name, expected)}" for name in missing],
            "unexpected": self.problems["unexpected"]
            + [
                f"{self.called(path)} {list(shapes[path])}"
                for path in sorted(shapes.keys() - expected.keys())
            ],
            "twice": self.problems["twice"],
            "wrong shape": self.problems["wrong shape"]
            + [
                f"{self.called(path)} is {list(shapes[path])}, not {list(expected[path])}"
                for path in sorted(expected.keys() & shapes.keys())
                if shapes[path] != expected[path]
            ],
            "wrong type": self.mistyped({path: value.dtype for path, value in own.items()}),
        }
        if any(found.values()):
            listed = "; ".join(
                f"{what}: {', '.join(names)}" for what, names in found.items() if names
            )
            raise InputError(f"the tensors are not a {type(network).__name__}'s: {listed}")

    def mistyped(self, expected: Mapping[str, mx.Dtype]) -> list[str]:
        """Tensors whose numbers can't be their parameter's: whole ones of a float's, floats of
        packed weights. Floats may be of any size, and so may ids."""
        found = []
        for path in sorted(expected.keys() & self.sources.keys()):
            wanted = expected[path]
            kind = mx.floating if mx.issubdtype(wanted, mx.floating) else mx.integer
            for name in self.sources[path]:
                dtype = self.tensors[name].dtype
                exact = path == "d2t" or kind is mx.floating or dtype == wanted
                if not (exact and mx.issubdtype(dtype, kind)):
                    found.append(f"{name} is {short(dtype)}, not {short(wanted)}")
        return found

    def called(self, path: str) -> str:
        """The name of a parameter in the files."""
        return " + ".join(self.sources[path])

    def arrays(self, paths: Collection[str] | None = None) -> dict[str, mx.array]:
        """The parameters, lazily."""
        paths = self.sources if paths is None else paths
        names = {name for path in paths for name in self.sources[path]}
        loaded = load_tensors({name: self.tensors[name] for name in names})
        arrays = {path: assemble(self.layout, path, self.sources[path], loaded) for path in paths}
        if "d2t" in arrays and T2D in self.tensors:
            check_vocabulary(arrays["d2t"], load_tensors({T2D: self.tensors[T2D]})[T2D])
        return arrays


def short(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def wanted_shape(layout: Layout, name: str, expected: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The expected shape of a missing tensor: that of its parameter, or of a part of it."""
    path, _, part = (parameter(layout, name) or name).partition("#")
    first, *rest = expected[path]
    return [first // len(parts_of(layout, path)) if part else first, *rest]


def assemble(
    layout: Layout, path: str, names: tuple[str, ...], arrays: Mapping[str, mx.array]
) -> mx.array:
    """Make a parameter from its tensors: parts are stacked, offsets become ids."""
    pieces = [arrays[name] for name in names]
    value = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)
    if path == "d2t":
        start = mx.arange(value.size) if layout.offsets else 0
        return (value + start).astype(mx.uint32)
    return value


def check_vocabulary(ids: mx.array, known: mx.array) -> None:
    """Refuse a draft vocabulary whose ids [Vd] are not those marked in t2d [V]."""
    if ids.tolist() != np.flatnonzero(known).tolist():
        raise InputError(
            "d2t leads to other tokens than t2d marks; it must hold offsets, to be added to 0, 1, "
            "2 ..."
        )


def parameters(layout: Layout, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Rename arrays from a layout's names to the drafter's own paths."""
    sources, problems = match(layout, {name: value.shape for name, value in arrays.items()})
    if any(problems.values()):
        raise InputError(f"these are no tensors of {layout.name}: {problems}")
    return {path: assemble(layout, path, names, arrays) for path, names in sources.items()}


def stacked_shapes(sources: Sources, tensors: Tensors) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for path, names in sources.items():
        first, *others = (tensors[name].shape for name in names)
        shapes[path] = (len(names) * first[0], *first[1:]) if others and first else first
    return shapes


def open_checkpoint(
    folder: Path,
    *,
    rename: Mapping[str, str] | None = None,
    codes: Path | None = None,
    target_layer_ids: list[int] | None = None,
) -> Checkpoint:
    """Identify a folder and read its settings, without its weights.

    rename: {tensor name in the files: name in SpecForge's layout}. codes: a file that holds the
    transfer codes C. target_layer_ids: taps, for a config that states none.
    """
    raw, tensors = read_config(folder), read_tensors(folder)
    tensors = renamed(tensors, rename or {})
    method, layout = detect(raw, tensors)
    strange = unknown(layout, (rename or {}).values())
    if strange:
        raise InputError(
            f"the table of names gives {', '.join(strange)}, no name of {layout.name}; "
            f"known: {', '.join(layout.names)}"
        )
    if method.codes is not None:
        tensors = with_codes(folder, tensors, codes)
    elif codes:
        raise InputError(f"{layout.name} drafters have no transfer codes; drop --codes")
    check_flags(method, tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    notes = method.remarks(raw)
    if layout.by_shape:
        guessed, recognised = match_by_shape(layout, raw, shapes)
        notes += recognised
        tensors = renamed(tensors, guessed)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
    sources, problems = match(layout, shapes)
    config = raw if target_layer_ids is None else with_taps(raw, target_layer_ids)
    found = stacked_shapes(sources, tensors)
    fields = method.fill(layout.settings(config, found), found)
    if fields.get("first_slot") is None:
        fields["first_slot"] = method.config.first_slot
    drafter_config = method.config.from_dict(fields)
    if not states_rope_theta(config):
        notes += (assumed_rope_theta(drafter_config.rope_theta),)
    if drafter_config.mask_token_id >= drafter_config.vocab_size:
        raise InputError(
            f"mask_token_id {drafter_config.mask_token_id} is outside the vocabulary of "
            f"{drafter_config.vocab_size}"
        )
    return Checkpoint(
        folder, dict(config), tensors, method, layout, drafter_config, sources, problems, notes
    )


def renamed(tensors: Tensors, rename: Mapping[str, str]) -> Tensors:
    """Rename tensors by a table."""
    absent = sorted(rename.keys() - tensors.keys())
    if absent:
        raise InputError(f"the table of names has {', '.join(absent)}, which the files do not")
    names = [rename.get(name, name) for name in tensors]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise InputError(f"the table of names gives {', '.join(double)} to two tensors")
    return dict(zip(names, tensors.values(), strict=True))


def with_codes(folder: Path, tensors: Tensors, codes: Path | None) -> Tensors:
    """Add C from a separate file: the one given, or the folder's only one that has `codes`."""
    own = [name for name in ("transfer_codes", "codes", CODES) if name in tensors]
    if own and codes:
        raise InputError(f"the checkpoint has its own {own[0]}; drop --codes {codes}")
    if own:
        return tensors
    read = {tensor.file for tensor in tensors.values()}
    files = [codes] if codes else [f for f in sorted(folder.glob("*.safetensors")) if f not in read]
    found = []
    for file in files:
        if not file.is_file():
            raise InputError(f"there is no file {file} with transfer codes")
        held = file_tensors(file)
        named = [held[name] for name in ("codes", "transfer_codes") if name in held]
        found += named or ([t for t in held.values() if len(t.shape) == 2] if codes else [])
    if codes and len(found) != 1:
        raise InputError(f"{codes} must hold one matrix, under the name codes; it has {len(found)}")
    if len(found) > 1:
        raise InputError(f"{folder} has transfer codes in several files; name one with --codes")
    return tensors | {"transfer_codes": found[0]} if found else tensors


def check_flags(method: Method, tensors: Tensors) -> None:
    for name in tensors:
        if name.removeprefix("model.") in method.flags:
            flag = load_tensors({name: tensors[name]})[name]
            if flag.size != 1 or not flag.item():
                raise InputError(
                    f"{name} is false: this checkpoint was saved before it was complete"
                )


def with_taps(raw: Mapping[str, Any], ids: list[int]) -> dict[str, Any]:
    if "speculators_model_type" in raw:
        return dict(raw) | {"aux_hidden_state_layer_ids": [i + 1 for i in ids]}
    if isinstance(raw.get("config"), dict):
        return dict(raw) | {"config": with_taps(raw["config"], ids)}
    section = raw.get("dflash_config")
    section = section if isinstance(section, dict) else {}
    return dict(raw) | {"dflash_config": section | {"target_layer_ids": ids}}

"""Matching DSpine tensors under unknown names by shape, where that is unambiguous.

    C [V, r], readouts [r, d] and writes [d, a] of every layer, bias [a], and three gates [a, r]

The three gates have the same shape: without names they are never guessed.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from dspine_mlx.checkpoints.names import unknown
from dspine_mlx.drafters.dspine import GATES
from dspine_mlx.drafters.method import Layout
from dspine_mlx.errors import InputError

Shape = tuple[int, ...]
Names = dict[str, str]
GATE_NAMES = tuple(f"injection.{part}.weight" for part in GATES)
NUMBER = re.compile(r"\d+", re.ASCII)


def match_by_shape(
    layout: Layout, config: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> tuple[Names, tuple[str, ...]]:
    """Make a table {unknown name: SpecForge's name} for what is missing, and say how each was
    recognised.

    `InputError`, with a table to fill in, when a shape fits several places.
    """
    left = {name: shapes[name] for name in unknown(layout, shapes)}
    known = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    table: Names = {}
    V, d = config.get("vocab_size"), config.get("hidden_size")
    layers = config.get("num_hidden_layers")

    def find(role: str, fits: Callable[[Shape], bool]) -> Shape | None:
        """Find the shape of a role's tensors among those left, unless it is known."""
        first = role.replace("{i}", "0")
        if first in known:
            return known[first]
        groups = families(left, layers) if "{i}" in role else {name: [name] for name in left}
        found = [names for names in groups.values() if fits(left[names[0]])]
        if len(found) > 1:
            raise ambiguous(table | {names[0]: role for names in found}, [role])
        if not found:
            return None
        shape = left[found[0][0]]
        for i, name in enumerate(found[0]):
            table[name] = role.replace("{i}", str(i))
            del left[name]
        return shape

    codes = find("transfer_codes", lambda s: len(s) == 2 and s[0] == V and s[1] != d)
    rank = codes[1:] if codes else ()
    readout = find(
        "injection.readouts.{i}.weight",
        lambda s: len(s) == 2 and s[1] == d and rank in ((), s[:1]),
    )
    write = find("injection.writes.{i}.weight", lambda s: len(s) == 2 and s[0] == d)
    rank, message = rank or (readout or ())[:1], (write or ())[1:]
    find("injection.bias", lambda s: s == message)
    gates = [name for name, shape in left.items() if shape == message + rank]
    absent = [gate for gate in GATE_NAMES if gate not in known]
    if len(gates) == len(absent) == 1:
        table[gates[0]] = absent[0]
    elif gates and absent:
        raise ambiguous(table | dict.fromkeys(gates, "FILL IN"), absent)
    return table, tuple(f"{name}: taken for {role} by its shape" for name, role in table.items())


def families(shapes: Mapping[str, Shape], layers: Any) -> dict[str, list[str]]:
    """Group tensors with one per layer: names that differ in one number, 0 to layers - 1, and share
    one shape; in order of the layers."""
    groups: dict[str, dict[int, str]] = defaultdict(dict)
    for name in shapes:
        for at in NUMBER.finditer(name):
            groups[f"{name[: at.start()]}{{i}}{name[at.end() :]}"][int(at.group())] = name
    return {
        pattern: [names[i] for i in sorted(names)]
        for pattern, names in groups.items()
        if sorted(names) == list(range(len(names)))
        and len(names) == layers
        and len({shapes[name] for name in names.values()}) == 1
    }


def ambiguous(table: Names, choices: list[str]) -> InputError:
    return InputError(
        "the names of this DSpine checkpoint are not known here and shapes fit several of them; "
        f"give --rename a file with this table, each 'FILL IN' one of {', '.join(choices)}: "
        f"{json.dumps(table)}"
    )

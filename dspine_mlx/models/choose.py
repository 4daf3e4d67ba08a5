"""The drafter that --draft-model auto takes for a target."""

from typing import NamedTuple

from dspine_mlx.drafters import METHODS
from dspine_mlx.errors import InputError
from dspine_mlx.models.needs import candidates, snapshot
from dspine_mlx.models.registry import Entry


class Choice(NamedTuple):
    """A drafter to load."""

    id: str
    revision: str | None
    entry: Entry


def usable(model: str) -> list[Entry]:
    """Entries that fit a target, can be read here, and need no conversion first."""
    return [entry for entry in candidates(model) if entry.method in METHODS]


def choose(model: str) -> Choice:
    """The first usable one in the registry's order; those that are here already come first."""
    found = usable(model)
    if not found:
        raise InputError(
            f"no public drafter is known for {model}; `dspine-mlx models` lists the known ones, "
            "and --draft-model names any other"
        )
    for entry in found:
        here = snapshot(entry)
        if here is not None:
            return Choice(entry.id, here[0], entry)
    return Choice(found[0].id, found[0].revision, found[0])


def hint(model: str) -> str:
    """What to say when a target comes without a drafter: which ones fit."""
    found = usable(model)
    if not found:
        return (
            "--draft-model names one that was trained for this model; --draft-model lookup needs "
            "none where text repeats itself"
        )
    names = ", ".join(entry.id for entry in found[:3])
    return f"{names} fit{'s' * (len(found) == 1)} this model: add --draft-model auto"

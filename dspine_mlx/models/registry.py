"""The registry of public drafters: data with sources, which users extend by a file of their own."""

import math
import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from dspine_mlx.cache_folder import present
from dspine_mlx.checkpoints.files import read_json
from dspine_mlx.errors import InputError

SHIPPED = Path(__file__).parent / "drafters.json"
OWN = ".config/dspine-mlx/drafters.json"  # in the home folder
ANY = "any"
LISTS = ("targets", "sources", "quantizations", "published")  # whose items are checked one by one
# What quantisers add to a model's name, as mlx-community and others do.
PACKED = re.compile(
    r"[-_.](mlx|dwq|awq|gptq|qat|[1-8][-_]?bits?|q[1-8](_[0-9])?|int[48]|(bf|fp|f)16|fp8|(mx|nv)fp[48]"
    r"|gs(32|64|128)|g(32|64|128))$"
)


@dataclass(frozen=True)
class Published:
    """Acceptance that somebody published of a drafter."""

    tokens_per_round: float  # the target's own included
    texts: str
    where: str  # target, machine, engine
    source: str
    offered: int | None = None  # drafted tokens per round at most; None: not stated


@dataclass(frozen=True)
class Entry:
    """A public drafter. What is None was not found; nothing is guessed."""

    id: str  # a Hub id, or a folder
    targets: tuple[str, ...]  # ids of the models it was trained for, or folders
    method: str  # of dspine_mlx.drafters.METHODS, or one that is not read yet
    sources: tuple[str, ...]
    quantizations: str | tuple[str, ...] = ANY  # of the target: any, or such as 4bit
    block: int | None = None
    layout: str | None = None  # whose names and settings the checkpoint has
    parameters: int | None = None
    gigabytes: float | None = None
    revision: str | None = None
    licence: str | None = None
    tested: str = "nothing"  # of it with this package
    published: tuple[Published, ...] = ()
    automatic: bool = True  # whether --draft-model auto may take it
    note: str = ""

    def fits(self, target: str) -> bool:
        """Whether it was made for a model of this id or folder, whatever its packing."""
        names, packing = names_of(target)
        if self.quantizations != ANY and packing not in self.quantizations:
            return False
        return any(made_for(name) in names for name in self.targets)


def base_name(model: str) -> tuple[str, str]:
    """A model's name without owner and packing, in lower case, and the packing: of
    mlx-community/Qwen3-8B-4bit these are qwen3-8b and 4bit."""
    name, packing = model.rstrip("/").rsplit("/", 1)[-1].lower(), ""
    while found := PACKED.search(name):
        name = name[: found.start()]
        if not packing.endswith("bit"):
            packing = re.sub("[-_]|(?<=bit)s", "", found[1])
    return name, packing


def names_of(model: str) -> tuple[set[str], str]:
    """What a target may be called: a folder by its path, too; of the Hub's cache by its model."""
    path = Path(model).expanduser()
    if not path.is_dir():
        name, packing = base_name(model)
        return {name}, packing
    cached = re.search(r"/models--[^/]*--([^/]*)/snapshots/", str(path))
    name, packing = base_name(cached[1] if cached else path.resolve().name)
    return {name, str(path.resolve())}, packing


def made_for(target: str) -> str:
    """A target of an entry, as `names_of` writes it: an id's name, or a folder's path."""
    if target.startswith(("/", "~", ".")):
        return str(Path(target).expanduser().resolve())
    return base_name(target)[0]


DEMO = Path(__file__).parents[1] / "demo"
PAIR = Entry(  # that ships with the package
    str(DEMO / "drafter"),
    (str(DEMO / "target"),),
    "dspine",
    ("dspine_mlx/demo/README.md",),
    block=16,
    layout="SpecForge",
    licence="Apache-2.0",
    tested="everything that this package's tests do",
    published=(
        Published(6.68, "85 word problems", "greedy", "dspine_mlx/demo/README.md", 15),
        Published(5.97, "85 word problems", "at temperature 1", "dspine_mlx/demo/README.md", 15),
    ),
)


def registry(home: Path | None = None) -> list[Entry]:
    """The user's own entries, then those that ship; an own one replaces one of the same id."""
    own = own_file(home)
    entries = read_entries(own) if own is not None and present(own) else []
    named = {entry.id for entry in entries}
    return entries + [entry for entry in read_entries(SHIPPED) if entry.id not in named] + [PAIR]


def own_file(home: Path | None = None) -> Path | None:
    try:
        return (home or Path.home()) / OWN
    except RuntimeError:  # a user without a home
        return None


def fitting(target: str, entries: Iterable[Entry]) -> list[Entry]:
    """Entries for a target, in the registry's order, which is that of preference."""
    return [entry for entry in entries if entry.fits(target)]


def read_entries(path: Path) -> list[Entry]:
    listed = read_json(path).get("drafters")
    if not isinstance(listed, list):
        raise InputError(f'{path} must be an object with "drafters", a list')
    return [entry_from(item, f"{path}, drafter {i}") for i, item in enumerate(listed, 1)]


def entry_from(item: Any, where: str) -> Entry:
    """An entry of its JSON object; `InputError` names what is wrong."""
    values = checked(item, Entry, where)
    published = values.pop("published", [])
    if not isinstance(published, list):
        raise InputError(f"{where}: published is {published!r}; it must be a list")
    found = [Published(**checked(one, Published, f"{where}, published")) for one in published]
    for one in found:
        if one.tokens_per_round < 1:
            raise InputError(f"{where}: tokens_per_round is {one.tokens_per_round!r}; from 1 on")
    for name in ("targets", "sources", "quantizations"):
        value = values.get(name, ANY)
        if isinstance(value, list) and all(isinstance(v, str) for v in value) and value:
            values[name] = tuple(value)
        elif name != "quantizations" or value != ANY:
            raise InputError(f"{where}: {name} is {value!r}; it must be a list of names")
    return Entry(**values, published=tuple(found))


def checked(item: Any, kind: type[Entry] | type[Published], where: str) -> dict[str, Any]:
    """The object's values, if it has all needed names and no unknown one."""
    if not isinstance(item, dict):
        raise InputError(f"{where} is {item!r}; it must be an object")
    known = {field.name: field for field in fields(kind)}
    unknown = sorted(item.keys() - known.keys())
    if unknown:
        raise InputError(f"{where} has {', '.join(unknown)}; known are {', '.join(known)}")
    lacking = [name for name, f in known.items() if f.default is MISSING and not item.get(name)]
    if lacking:
        raise InputError(f"{where} lacks {', '.join(lacking)}")
    for name in item.keys() - {*LISTS}:
        if not fits(item[name], known[name].type):
            wanted = in_words(known[name].type)
            raise InputError(f"{where}: {name} is {item[name]!r}; it must be {wanted}")
    return dict(item)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a field's type; numbers must be above 0."""
    kinds = get_args(kind) or (kind,)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return type(value) in kinds
    return (type(value) in kinds or float in kinds) and math.isfinite(value) and value > 0


def in_words(kind: Any) -> str:
    kinds = get_args(kind) or (kind,)
    words = {
        str: "text",
        int: "a whole number above 0",
        float: "a number above 0",
        bool: "true or false",
    }
    return next(words[one] for one in kinds if one in words)

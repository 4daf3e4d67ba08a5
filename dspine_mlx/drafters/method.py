"""A drafting method: one record of what loading, converting and training must know."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.network import Network
from dspine_mlx.drafters.settings import read_own
from dspine_mlx.drafters.transfer_space import SPACE
from dspine_mlx.target.model import Target

Names = dict[str, str]
Config = Mapping[str, Any]  # a checkpoint's config.json
Shapes = Mapping[str, tuple[int, ...]]  # by parameter path
Settings = Callable[[Config, Shapes], dict[str, Any]]  # -> fields of the drafter's config
Fill = Callable[[dict[str, Any], Shapes], dict[str, Any]]


def same(*names: str) -> Names:
    return {name: name for name in names}


def always(config: Config, names: Collection[str]) -> bool:
    return True


def as_stated(flat: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    return flat


def nothing(config: Config) -> tuple[str, ...]:
    return ()


def no_other(config: DrafterConfig, target: Target) -> dict[str, dict[str, Any]]:
    return {}


@dataclass(frozen=True)
class Layout:
    """How one publisher names a method's tensors and settings.

    names maps a tensor's name to the network's parameter. {i} is a layer; `path#k` is part k of a
    parameter that stacks several tensors, in order; "" marks a tensor that holds no parameter. The
    table serves reading and writing: a parameter is written under the first name that leads to it,
    or in its parts.
    """

    name: str  # method and publisher, as "DSpine, SpecForge"
    names: Names
    settings: Settings
    recognise: Callable[[Config, Collection[str]], bool] = always  # by config.json and tensor names
    offsets: bool = True  # d2t holds offsets d -> d + d2t[d]; False: it holds the target's ids
    by_shape: bool = False  # unknown names are told apart by shape

    @cached_property
    def paths(self) -> set[str]:
        """The parameters that the names lead to."""
        return {path.partition("#")[0] for path in self.names.values()} - {""}


@dataclass(frozen=True)
class Method:
    """One entry of `dspine_mlx.drafters.METHODS`.

    A checkpoint is recognised by signs: what its config.json says (architectures,
    speculators_model_type, projector_type, other keys) and names of its tensors (marks). All signs
    must agree. Of the methods with all of them, the first registered one is taken.
    """

    name: str  # in commands and in converted folders
    title: str  # in sentences
    config: type[DrafterConfig]
    network: type[Network]
    layouts: tuple[Layout, ...]  # the first that recognises a checkpoint is taken
    large: tuple[str, ...]  # parameters that --quantize packs; all others stay exact

    architectures: tuple[str, ...] = ()
    speculators_model_type: tuple[str, ...] = ()
    projector_type: tuple[str, ...] = ()  # of dflash_config
    keys: tuple[str, ...] = ()  # of config.json, as "section.key"
    marks: tuple[str, ...] = ()  # parts of tensor names
    required: str | None = None  # a mark that every checkpoint of this method must have

    fill: Fill = as_stated  # settings inferred from tensors where config.json is silent
    codes: str | None = None  # the config's field with the rank of its transfer codes, if any
    flags: tuple[str, ...] = ()  # published one-number tensors that must be true
    # other readings of a checkpoint, {in words: fields of its config}, which a probe tells apart
    readings: Callable[[Any, Target], dict[str, dict[str, Any]]] = no_other
    remarks: Callable[[Config], tuple[str, ...]] = nothing  # on a config.json, for `inspect`
    several_texts: bool = False  # its network has a `propose_texts` of its own kind
    reference: str | None = None  # "module:function", a round in float64; None: can't be verified
    objective: str | None = None  # "module:object" to train it; None: can't be trained here

    @property
    def exported(self) -> Layout:
        """The layout that trained drafters are published in."""
        return self.layouts[-1]

    @property
    def converted(self) -> Layout:
        """The layout that `dspine_mlx.convert` writes: parameter paths and config fields as they
        are."""
        names = self.exported.names | (same(*SPACE) if self.codes else {})
        return Layout(f"{self.title}, dspine-mlx", names, read_own, offsets=False)

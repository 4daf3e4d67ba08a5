"""What a checkpoint is: its method and its layout, by its config and its tensors together."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dspine_mlx.drafters import METHODS
from dspine_mlx.drafters.method import Layout, Method
from dspine_mlx.drafters.settings import section
from dspine_mlx.errors import InputError

Config = Mapping[str, Any]
T = TypeVar("T")

OURS = "dspine_mlx"  # the section that marks a converted folder
SCHEMA = 1


@dataclass(frozen=True)
class Unsupported:
    """A kind of drafter that is refused by name, and its signs; see `Method`. A method that is
    registered with one of these signs goes before it."""

    title: str
    reason: str
    architectures: tuple[str, ...] = ()
    speculators: str | None = None
    projectors: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


EXPERIMENTS = {  # SpecForge's and others' heads: their title and the projector that says so
    "hspec": "HSpec",
    "edsd": "EDSD",
    "dta": "DTA",
    "p-eagle": "P-EAGLE",
    "dspark_kv": "DSpark-KV",
    "dspark_moe": "DSpark-MoE",
    "xpress": "xPress",
    "uno": "UNO",
    "d2sd": "D2SD",
    "jetspec": "JetSpec",
}
UNSUPPORTED = (
    Unsupported(
        "Qwen35DSparkModel",
        "its gated queries and offset norms are not supported yet",
        ("Qwen35DSparkModel",),
    ),
    Unsupported(
        "DFlash2 for MiniMax",
        "its swigluoai activation and offset norms are not supported yet",
        ("MiniMaxDFlash2DraftModel",),
    ),
    Unsupported(
        "LiLiCorr",
        "its correlation head over candidates is not supported",
        ("LiLiCorrDraftModel",),
        projectors=("lilicorr",),
        keys=("dflash_config.lilicorr_enabled", "dflash_config.lilicorr_candidate_topk"),
        marks=("lilicorr",),
    ),
    *(
        Unsupported(
            title,
            "its head is not supported",
            (f"{title.replace('-', '')}DraftModel",),
            projectors=tuple({projector, projector.replace("-", "_")}),
        )
        for projector, title in EXPERIMENTS.items()
    ),
)
Kinds = tuple[Method | Unsupported, ...]  # that share a sign


def detect(config: Config, names: Collection[str]) -> tuple[Method, Layout]:
    """The method and layout of a checkpoint with this config.json and these tensor names.

    A config that says one method over tensors of another is refused, with both named.
    """
    inner = section(config, "config") or config
    if OURS in config:
        return converted(config)
    says, holds = claimed(inner), held(names)
    signs = [*says.values(), *holds.values()]
    for kind in (kinds[0] for kinds in signs):
        if isinstance(kind, Unsupported):
            raise InputError(f"this is a checkpoint of {kind.title}: {kind.reason}")
    fitting = [m for m in METHODS.values() if all(m in kinds for kinds in signs)]
    if not fitting:
        raise InputError(
            f"config.json says {listed(says)}, the tensors are those of {listed(holds)}; "
            "one checkpoint must be of one method"
        )
    check_backbone(names)
    method = fitting[0]
    layout = next((x for x in method.layouts if x.recognise(config, names)), method.layouts[-1])
    if method.required is not None and not layout.by_shape:
        check_required(method, layout, holds)
    return method, layout


def converted(config: Config) -> tuple[Method, Layout]:
    """The layout of a folder that this package wrote."""
    own = section(config, OURS)
    schema = own.get("schema")
    if schema != SCHEMA:
        raise InputError(
            f"this folder has schema {schema!r}, this version reads {SCHEMA}; "
            "convert the checkpoint again"
        )
    method = known("dspine_mlx.method", own.get("method"), METHODS)
    return method, method.converted


def kinds() -> Kinds:
    return (*METHODS.values(), *UNSUPPORTED)


def with_sign(field: str, value: str) -> Kinds:
    """The methods that have a value in one of their fields of signs."""
    return tuple(kind for kind in kinds() if value in (vars(kind)[field] or ()))


def claimed(config: Config) -> dict[str, Kinds]:
    """What the config says: {key that says it: methods}."""
    says: dict[str, Kinds] = {}
    stated = config.get("speculators_model_type")
    if stated is not None:
        types: dict[str, Kinds] = {}
        for kind in kinds():
            if kind.speculators is not None:
                types.setdefault(kind.speculators, (kind,))
        says["speculators_model_type"] = known("speculators_model_type", stated, types)
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise InputError(f"architectures is {architectures!r}; it must be a list of names")
    for name in architectures:
        found = with_sign("architectures", name)
        # vLLM's names for speculators' heads fit several methods: the type beside them decides
        if found and (stated is None or isinstance(found[0], Unsupported)):
            says[name] = found
    for key in dict.fromkeys(key for kind in kinds() for key in kind.keys):
        *path, last = key.split(".")
        if last in (section(config, path[0]) if path else config):
            says[key] = with_sign("keys", key)
    projector = section(config, "dflash_config").get("projector_type")
    if projector is not None:
        types = {
            name: with_sign("projectors", name) for kind in kinds() for name in kind.projectors
        }
        says["dflash_config.projector_type"] = known("projector_type", projector, types)
    return says


def known(key: str, value: Any, table: Mapping[str, T]) -> T:
    if not isinstance(value, str) or value not in table:
        raise InputError(f"{key} is {value!r}; {', '.join(table)} are known")
    return table[value]


def held(names: Collection[str]) -> dict[str, Kinds]:
    """What the tensors are: {a tensor with a mark: the methods that have the mark}."""
    found: dict[str, Kinds] = {}
    for mark in dict.fromkeys(mark for kind in kinds() for mark in kind.marks):
        name = next((name for name in names if mark in name), None)
        if name is not None:
            found[name] = with_sign("marks", mark)
    return found


def listed(signs: Mapping[str, Kinds]) -> str:
    return ", ".join(f"{kinds[0].title} ({key})" for key, kinds in signs.items()) or (
        "no method of its own"
    )


def check_backbone(names: Collection[str]) -> None:
    """Refuse what is no block drafter at all: a target, an EAGLE head, a bare adapter."""
    fused = any(name.endswith(("fc.weight", "fc.scales")) for name in names)
    layers = any("layers.0.self_attn." in name for name in names)
    if not (fused and layers):
        raise InputError(
            "this is no drafter of a known layout: expected fc.weight, hidden_norm.weight and "
            f"layers.0.self_attn.*, found {len(names)} tensors: {', '.join(sorted(names)[:6])} ..."
        )


def check_required(method: Method, layout: Layout, holds: Mapping[str, Kinds]) -> None:
    if method.required is not None and not any(method.required in name for name in holds):
        wanted = [name for name in layout.names if method.required in name]
        raise InputError(
            f"config.json says {method.title} but no tensor is named {method.required}*; expected "
            f"{', '.join(wanted)}"
        )

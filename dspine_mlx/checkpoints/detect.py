"""Detecting a checkpoint's method and layout, from its config and its tensors together."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dspine_mlx.drafters import METHODS
from dspine_mlx.drafters.method import Layout, Method
from dspine_mlx.drafters.settings import section
from dspine_mlx.errors import InputError

Config = Mapping[str, Any]

OURS = "dspine_mlx"  # the section that marks a converted folder
SCHEMA = 1


@dataclass(frozen=True)
class Unsupported:
    """A kind of drafter that is refused by name, and its signs; see `Method`. A method registered
    with one of these signs takes precedence."""

    title: str
    reason: str
    architectures: tuple[str, ...] = ()
    speculators_model_type: tuple[str, ...] = ()
    projector_type: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


EXPERIMENTS = {  # heads of SpecForge and others: their title, and the projector that marks them
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
        projector_type=("lilicorr",),
        keys=("dflash_config.lilicorr_enabled", "dflash_config.lilicorr_candidate_topk"),
        marks=("lilicorr",),
    ),
    *(
        Unsupported(
            title,
            "its head is not supported",
            (f"{title.replace('-', '')}DraftModel",),
            projector_type=tuple({projector, projector.replace("-", "_")}),
        )
        for projector, title in EXPERIMENTS.items()
    ),
)
Kinds = tuple[Method | Unsupported, ...]
Signs = list[tuple[str, Kinds]]  # the sign, and the kinds that it may mark


def detect(config: Config, names: Collection[str]) -> tuple[Method, Layout]:
    """Detect the method and layout of a checkpoint with this config.json and these tensor names.

    A config of one method over tensors of another is refused, with both named.
    """
    inner = section(config, "config") or config
    if OURS in config:
        return converted(config)
    says, holds = claimed(inner), held(names)
    for _, (first, *_) in says + holds:
        if isinstance(first, Unsupported):
            raise InputError(f"this is a checkpoint of {first.title}: {first.reason}")
    fitting = [m for m in METHODS.values() if all(m in kinds for _, kinds in says + holds)]
    if not fitting:
        raise InputError(
            f"config.json says {listed(says)}, the tensors are those of {listed(holds)}; "
            "one checkpoint must be of one method"
        )
    check_backbone(names)
    method = fitting[0]
    layout = next((x for x in method.layouts if x.recognise(config, names)), method.layouts[-1])
    required = method.required
    if required and not layout.by_shape and not any(required in name for name in names):
        wanted = ", ".join(name for name in layout.names if required in name)
        raise InputError(
            f"config.json says {method.title} but no tensor is named {required}*; expected {wanted}"
        )
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
    name = own.get("method")
    if not isinstance(name, str) or name not in METHODS:
        raise InputError(f"dspine_mlx.method is {name!r}; {', '.join(METHODS)} are known")
    return METHODS[name], METHODS[name].converted


def all_kinds() -> Kinds:
    return (*METHODS.values(), *UNSUPPORTED)


def with_sign(field: str, value: str) -> Kinds:
    """Kinds with this value in a field of signs, methods first."""
    return tuple(kind for kind in all_kinds() if value in vars(kind)[field])


def values_of(field: str) -> list[str]:
    """All values of a field of signs, without repeats."""
    return list(dict.fromkeys(value for kind in all_kinds() for value in vars(kind)[field]))


def claimed(config: Config) -> Signs:
    """The config's signs, by key."""
    says: Signs = []
    stated = config.get("speculators_model_type")
    if stated is not None:
        says.append(("speculators_model_type", known("speculators_model_type", stated)))
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise InputError(f"architectures is {architectures!r}; it must be a list of names")
    for name in architectures:
        found = with_sign("architectures", name)
        # vLLM's names for speculators' heads fit several methods: the type beside them decides.
        if found and (stated is None or isinstance(found[0], Unsupported)):
            says.append((name, found))
    for key in values_of("keys"):
        *path, last = key.split(".")
        if last in (section(config, path[0]) if path else config):
            says.append((key, with_sign("keys", key)))
    projector = section(config, "dflash_config").get("projector_type")
    if projector is not None:
        says.append(("dflash_config.projector_type", known("projector_type", projector)))
    return says


def known(key: str, value: Any) -> Kinds:
    """Kinds that a stated value is a sign of; `InputError` if there are none."""
    values = values_of(key)
    if not isinstance(value, str) or value not in values:
        raise InputError(f"{key} is {value!r}; {', '.join(values)} are known")
    return with_sign(key, value)


def held(names: Collection[str]) -> Signs:
    """The tensors' signs: one tensor for each mark."""
    found = ((mark, next((n for n in names if mark in n), None)) for mark in values_of("marks"))
    return [(name, with_sign("marks", mark)) for mark, name in found if name is not None]


def listed(signs: Signs) -> str:
    named = [f"{kinds[0].title} ({what})" for what, kinds in signs]
    return ", ".join(named) or "no method of its own"


def check_backbone(names: Collection[str]) -> None:
    """Refuse folders that hold no block drafter: a target, an EAGLE head, a bare adapter."""
    fused = any(name.endswith(("fc.weight", "fc.scales")) for name in names)
    layers = any("layers.0.self_attn." in name for name in names)
    if not (fused and layers):
        raise InputError(
            "this is no drafter of a known layout: expected fc.weight, hidden_norm.weight and "
            f"layers.0.self_attn.*, found {len(names)} tensors: {', '.join(sorted(names)[:6])} ..."
        )

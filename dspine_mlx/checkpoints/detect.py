"""What a checkpoint is: its layout, by its tensors and its config together."""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from dspine_mlx.checkpoints import layouts
from dspine_mlx.checkpoints.layouts import Layout
from dspine_mlx.checkpoints.settings import section
from dspine_mlx.errors import InputError

Config = Mapping[str, Any]
T = TypeVar("T")

OURS = "dspine_mlx"  # the section that marks a converted folder
SCHEMA = 1
BRIDGE = "selected_prefix_code_bridge"
GEMMA4 = "Gemma4DSparkModel"

# architectures -> method. DFlashDraftModel is no evidence: Tencent's DSpine says it too.
ARCHITECTURES = {
    "DSpineDraftModel": "DSpine",
    "DSparkDraftModel": "DSpark",
    "Qwen3DSparkModel": "DSpark",
    GEMMA4: "DSpark",
    "Lfm2DSparkDraftModel": "DSpark",
    "DSparkSpeculator": "DSpark",
    "DFlashSpeculator": "DFlash",
    "DFlash2DraftModel": "DFlash2",
    "DominoDraftModel": "Domino",
}
UNSUPPORTED = {
    "DFlash2": "DFlash2 is not supported yet",
    "Domino": "Domino is not supported yet",
    "Qwen35DSparkModel": "its gated queries and offset norms are not supported yet",
}
# parts of tensor names that only one method has
EVIDENCE = {
    "injection.": "DSpine",
    "markov_head.": "DSpark",
    "confidence_head.": "DSpark",
    "candidate_selector.": "DFlash2",
    "attention_conv.": "DFlash2",
    "prefix_gru.": "Domino",
}
SPECULATORS = {"dspark": "DSpark", "dflash": "DFlash", "dflash2": "DFlash2"}
PROJECTORS = {
    "dspine": "DSpine",
    "dspark": "DSpark",
    "domino": "Domino",
    "dflash2": "DFlash2",
    "dflash": "DFlash",
}


def detect(config: Config, names: Collection[str]) -> Layout:
    """The layout of a checkpoint with this config.json and these tensor names.

    A config that says one method over tensors of another is refused, with both named.
    """
    inner = section(config, "config") or config
    if OURS in config:
        return converted(config)
    says, holds = claimed(inner), evidence(names)
    for what in (*says.values(), *holds):
        if what in UNSUPPORTED:
            raise InputError(f"this is a checkpoint of {what}: {UNSUPPORTED[what]}")
    methods = (set(says.values()) | set(holds)) - {"DFlash"}
    if len(methods) > 1 or ("DFlash" in says.values() and methods):
        raise InputError(
            f"config.json says {listed(says)}, the tensors are those of {listed(holds)}; "
            "one checkpoint must be of one method"
        )
    backbone(names)
    if "DSpine" in methods:
        return dspine(config, inner, holds)
    if "DSpark" in methods:
        return dspark(inner, names)
    return layouts.DFLASH_SPECULATORS if "speculators_model_type" in inner else layouts.DFLASH


def converted(config: Config) -> Layout:
    """The layout of a folder that this package wrote."""
    own = section(config, OURS)
    schema = own.get("schema")
    if schema != SCHEMA:
        raise InputError(
            f"this folder has schema {schema!r}, this version reads {SCHEMA}; "
            "convert the checkpoint again"
        )
    return known("dspine_mlx.method", own.get("method"), layouts.CONVERTED)


def claimed(config: Config) -> dict[str, str]:
    """What the config says: {key that says it: method}."""
    says = {}
    kind = config.get("speculators_model_type")
    if kind is not None:
        says["speculators_model_type"] = known("speculators_model_type", kind, SPECULATORS)
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise InputError(f"architectures is {architectures!r}; it must be a list of names")
    for name in architectures:
        if name in UNSUPPORTED:
            says[name] = name
        # vLLM's names for speculators' heads fit several methods: the type beside them decides
        elif name in ARCHITECTURES and kind is None:
            says[name] = ARCHITECTURES[name]
    dflash = section(config, "dflash_config")
    if BRIDGE in dflash:
        says[f"dflash_config.{BRIDGE}"] = "DSpine"
    if "dspine_config" in config:
        says["dspine_config"] = "DSpine"
    projector = dflash.get("projector_type")
    if projector is not None:
        says["dflash_config.projector_type"] = known("projector_type", projector, PROJECTORS)
    return says


def known(key: str, value: Any, table: Mapping[str, T]) -> T:
    if not isinstance(value, str) or value not in table:
        raise InputError(f"{key} is {value!r}; {', '.join(table)} are known")
    return table[value]


def evidence(names: Collection[str]) -> dict[str, str]:
    """What the tensors are: {method: one tensor that only it has}."""
    found: dict[str, str] = {}
    for part, method in EVIDENCE.items():
        for name in names:
            if part in name and method not in found:
                found[method] = name
    return found


def listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{value} ({key})" for key, value in found.items()) or "no method of its own"


def backbone(names: Collection[str]) -> None:
    """Refuse what is no block drafter at all: a target, an EAGLE head, a bare adapter."""
    fused = any(name.endswith(("fc.weight", "fc.scales")) for name in names)
    layers = any("layers.0.self_attn." in name for name in names)
    if not (fused and layers):
        raise InputError(
            "this is no drafter of a known layout: expected fc.weight, hidden_norm.weight and "
            f"layers.0.self_attn.*, found {len(names)} tensors: {', '.join(sorted(names)[:6])} ..."
        )


def dspine(config: Config, inner: Config, holds: Mapping[str, str]) -> Layout:
    if BRIDGE in section(inner, "dflash_config"):
        return layouts.DSPINE_TENCENT
    if "DSpine" not in holds:
        raise InputError(
            "config.json says DSpine but no tensor is named injection.*; expected "
            f"{', '.join(layouts.INJECTION)}"
        )
    return layouts.DSPINE_SPECFORGE if inner is config else layouts.DSPINE_REFERENCE


def dspark(config: Config, names: Collection[str]) -> Layout:
    if "speculators_model_type" in config:
        return layouts.DSPARK_SPECULATORS
    if GEMMA4 in (config.get("architectures") or []):
        return layouts.DSPARK_GEMMA4
    nested = "dflash_config" in config or any("logit_head." in name for name in names)
    return layouts.DSPARK_SPECFORGE if nested else layouts.DSPARK_DEEPSPEC

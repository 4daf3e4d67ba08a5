"""From config.json of every layout to the fields of a drafter's config, under one precedence.

Each reader takes the config and the shapes by parameter path, and returns a flat dictionary for
`DrafterConfig.from_dict`. Stated values win over what shapes suggest; a value that neither gives is
an error.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from dspine_mlx.drafters.config import flatten
from dspine_mlx.errors import InputError

Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

# transformers' Qwen3Config: what an absent key of speculators' transformer_layer_config means.
QWEN3_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "attention_bias": False,
}
FULL_WINDOW_LAYERS = 28  # Qwen3Config.max_window_layers
ROPES = ("default", "linear", "yarn", "llama3", "mrope")
PROPORTIONAL = "proportional"  # of Gemma 4


def section(config: Config, name: str) -> dict[str, Any]:
    """A nested section; empty when absent."""
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise InputError(f"{name} is {value!r} in config.json; it must be an object")
    return value


def read_own(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Read a converted folder's config: the fields themselves."""
    flat = flatten(config)
    scaling = flat.get("rope_scaling") or {}
    if scaling.get("rope_type") == PROPORTIONAL:
        check_proportional(scaling)
    else:
        scaling = rope_scaling(flat)
    return flat | {"layer_types": layer_types(flat), "rope_scaling": scaling}


def check_proportional(scaling: Mapping[str, Any]) -> None:
    """Check the numbers of Gemma 4's scaling, which is kept as it is."""
    for name, value in scaling.items():
        if name not in ("rope_type", "type") and not (
            type(value) in (int, float) and 0 < value < 1 << 50
        ):
            raise InputError(f"rope_scaling has {name} {value!r}; it must be a number above 0")
    share = scaling.get("partial_rotary_factor", 1.0)
    if share > 1:
        raise InputError(f"rope_scaling has partial_rotary_factor {share}; it must be at most 1")


def read_flat(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Read z-lab's, SpecForge's and DeepSpec's config: flat keys under dflash_config and
    dspine_config.

    The method decides which slot proposes first: in DSpark's blocks it is the anchor's, unless
    sample_from_anchor says otherwise.
    """
    flat = flatten(config)
    supported(flat, section(config, "rope_parameters"))
    if isinstance(flat.get("sample_from_anchor"), bool):
        flat["first_slot"] = int(not flat["sample_from_anchor"])
    if flat.get("causal") is None and isinstance(flat.get("dflash_query_causal"), bool):
        flat["causal"] = flat["dflash_query_causal"]
    flat["layer_types"] = layer_types(flat)
    flat["rope_scaling"] = rope_scaling(flat)
    return backbone_settings(flat, shapes)


def read_reference(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Read model keys under "config". Some files don't state the block size, which is 16."""
    return read_flat({"block_size": 16} | section(config, "config"), shapes)


def read_speculators(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Read transformer_layer_config over Qwen3's defaults; aux ids count one above the taps."""
    layer = QWEN3_DEFAULTS | {
        k: v for k, v in section(config, "transformer_layer_config").items() if v is not None
    }
    own = {k: v for k, v in config.items() if v is not None and k != "transformer_layer_config"}
    flat = flatten({"block_size": 8} | layer | own)
    supported(flat, section(layer, "rope_parameters"))
    flat["target_layer_ids"] = [tap_of(i) for i in aux_ids(config)]
    flat["first_slot"] = first_slot(flat)
    flat["is_causal"], flat["causal"] = None, None
    if flat.get("sliding_window_non_causal"):
        flat["causal"] = False
    flat["window_from_anchor"] = True
    flat["layer_types"] = layer_types(flat)
    flat["rope_scaling"] = rope_scaling(flat)
    return backbone_settings(flat | {"draft_vocab_size": None}, shapes)


def aux_ids(config: Config) -> list[Any]:
    ids = config.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids:
        raise InputError(
            "config.json states no aux_hidden_state_layer_ids; which target layers this drafter "
            "reads can't be guessed, so give --target-layer-ids"
        )
    return ids


def tap_of(aux_id: Any) -> int:
    """Tap of speculators' aux id a: the output of target layer a - 1; 0 is the embedding."""
    if type(aux_id) is not int or aux_id < 1:
        raise InputError(
            f"aux_hidden_state_layer_ids holds {aux_id!r}; ids from 1 (the first layer's output) "
            "can be read"
        )
    return aux_id - 1


def first_slot(flat: Config) -> int:
    """The first proposing slot, 0 if it is the anchor's: stated, or block_size less the number of
    speculative tokens."""
    stated = flat.get("sample_from_anchor")
    if isinstance(stated, bool):
        return int(not stated)
    methods = section(flat, "speculators_config").get("proposal_methods")
    method = methods[0] if isinstance(methods, list) and methods else {}
    tokens = method.get("speculative_tokens") if isinstance(method, dict) else None
    if type(tokens) is int and type(flat["block_size"]) is int:
        difference = flat["block_size"] - tokens
        if difference in (0, 1):
            return difference
    raise InputError(
        f"config.json states neither sample_from_anchor nor speculative_tokens of block_size "
        f"({flat['block_size']}) or one less, but {tokens!r}; which slot proposes first is unknown"
    )


def supported(flat: Config, rope: Config) -> None:
    """Refuse what the backbone here does not compute; rope: the stated rope_parameters."""
    if any(isinstance(value, dict) for value in rope.values()):
        raise InputError(
            f"rope_parameters differ by layer type ({', '.join(rope)}); one is supported"
        )
    act = flat.get("hidden_act", "silu")
    if act != "silu":
        raise InputError(f"hidden_act is {act!r}; this backbone computes silu")
    if flat.get("mlp_bias"):
        raise InputError("mlp_bias is true; this backbone's MLP has no biases")
    if flat.get("rope_is_neox_style") is not None:
        kind = type(flat["rope_is_neox_style"])
        if kind is not bool:
            raise InputError(f"rope_is_neox_style is a {kind.__name__}; it must be true or false")


def layer_types(flat: Config) -> list[str]:
    """Types per layer. Absent: windows from layer max_window_layers on if use_sliding_window is
    true."""
    count = flat.get("num_hidden_layers")
    types = flat.get("layer_types")
    if type(count) is not int:
        return []  # the config's own check names what is wrong
    if types is None:
        first = flat.get("max_window_layers", FULL_WINDOW_LAYERS)
        first = first if flat.get("use_sliding_window") and isinstance(first, int) else count
        first, count = min(first, 1 << 16), min(count, 1 << 16)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list | tuple) or any(t not in known for t in types):
        raise InputError(f"layer_types is {types!r}; each must be {' or '.join(known)}")
    return list(types)


def rope_scaling(flat: Config) -> dict[str, Any] | None:
    """The scaling under mlx-lm's keys; absent and extra keys mean what they mean in transformers.

    partial_rotary_factor and mrope sections of a copied target config are ignored: heads of these
    drafters rotate whole.
    """
    scaling = flat.get("rope_scaling")
    if not scaling:
        return None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPES:
        raise InputError(f"rope_type is {kind!r}; {', '.join(ROPES)} are supported")
    if kind in ("default", "mrope"):
        return None
    numbers = {
        k: v
        for k, v in scaling.items()
        if type(v) in (int, float) and k not in ("partial_rotary_factor", "rope_theta")
    }
    if numbers.get("factor", 0) < 1:
        raise InputError(
            f"rope_scaling has the factor {scaling.get('factor')!r}; it must be 1 or above"
        )
    for name, value in numbers.items():
        if not math.isfinite(value) or value < 0 or (value == 0 and "mscale" not in name):
            raise InputError(f"rope_scaling has {name} {value}; it must be above 0")
    if kind == "yarn":
        if scaling.get("truncate") is False:
            raise InputError("rope_scaling has truncate false, which is not supported")
        numbers.setdefault(
            "original_max_position_embeddings", flat.get("max_position_embeddings", 32768)
        )
        attention = numbers.pop("attention_factor", None)
        if attention is not None and numbers["factor"] > 1:  # 0.1 mscale ln(factor) + 1
            numbers["mscale"] = (attention - 1) / (0.1 * math.log(numbers["factor"]))
            numbers["mscale_all_dim"] = 0
    return {"rope_type": kind} | numbers


def backbone_settings(flat: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Infer from tensors what keys leave open: sinks, and the size of the draft vocabulary."""
    if flat.get("attention_sink_bias") is None:
        flat["attention_sink_bias"] = "layers.0.self_attn.attention_sink_bias" in shapes
    if "d2t" in shapes:
        flat["draft_vocab_size"] = shapes["d2t"][0]
    elif "lm_head.weight" not in shapes:  # the size is the target's, whatever the key says
        flat["draft_vocab_size"] = None
    return flat


def is_speculators(config: Config, names: Collection[str]) -> bool:
    return "speculators_model_type" in config


def is_nested(config: Config, names: Collection[str]) -> bool:
    return bool(section(config, "config"))

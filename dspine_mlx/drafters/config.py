"""Drafter hyperparameters, under the names that public checkpoints give them."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from dspine_mlx.errors import InputError

Config = TypeVar("Config", bound="DrafterConfig")
NESTED = ("dflash_config", "dspine_config")
SIZE = (1, 1 << 30)
LIMITS = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    + ("vocab_size", "max_position_embeddings", "transfer_rank", "message_size"),
    SIZE,
) | {
    "num_hidden_layers": (1, 1024),
    "block_size": (1, 4096),
    "top_k": (1, 4096),
    "injection_reach": (1, 2),
    "rope_theta": (2, 1 << 50),
    "rms_norm_eps": (1e-20, 1),
    "first_slot": (0, 1),
}


@dataclass(frozen=True)
class DrafterConfig:
    """The parallel backbone (DFlash, arXiv:2602.06036), a stack of Qwen3-like layers.

    `from_dict` accepts `dflash_config` and `dspine_config` nested, as checkpoints have them; their
    keys win over equal ones at the top level. Other keys are ignored.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int  # B: the anchor and B - 1 masks
    mask_token_id: int
    target_layer_ids: tuple[
        int, ...
    ]  # taps; id i is the output of target layer i, before the final norm
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    rope_scaling: dict[str, Any] | None = None
    rope_is_neox_style: bool = True  # rotate halves; False: interleaved pairs
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()  # "full_attention" or "sliding_attention"; empty: all full
    sliding_window: int | None = None
    window_from_anchor: bool = False  # window counted from the anchor for every slot (speculators)
    is_causal: bool | None = None  # inside the block; None: `causal`, then the layer's type
    causal: bool | None = None
    first_slot: int = 1  # slot that makes the first proposal: 1 (a mask) or 0 (the anchor)
    target_hidden_size: int | None = None  # None: hidden_size
    num_target_layers: int | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    attention_value_scale: float = 1.0
    attention_sink_bias: bool = False  # a learned sink logit per query head
    top_k: int = 16  # K, candidates per slot
    draft_vocab_size: int | None = None  # tokens the drafter can propose; None: all

    @classmethod
    def from_dict(cls: type[Config], config: Mapping[str, Any]) -> Config:
        """Build from a checkpoint's config.json; `InputError` names every key that is missing."""
        flat = flatten(config)
        names = [f.name for f in fields(cls) if f.default is MISSING and flat.get(f.name) is None]
        if names:
            raise InputError(
                f"the drafter's config.json lacks {', '.join(names)}; a {cls.__name__} needs them"
            )
        values = {
            f.name: checked(f.name, f.type, flat[f.name]) for f in fields(cls) if f.name in flat
        }
        return cls(**{name: value for name, value in values.items() if value is not None})

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            low, high = LIMITS.get(name, (0, SIZE[1]))
            if isinstance(value, int | float) and not low <= value <= high:
                raise InputError(f"{name} is {value}; it must be from {low} to {high}")
        if self.block_size - self.first_slot < 1:
            raise InputError(
                f"block_size {self.block_size} leaves no slot to propose from; it must be at least "
                f"{self.first_slot + 1}"
            )
        if not self.target_layer_ids:
            raise InputError("target_layer_ids is empty; name at least one target layer to read")
        if min(self.target_layer_ids) < 0:
            raise InputError(
                f"target_layer_ids {list(self.target_layer_ids)} has a negative id; "
                "ids count the target's layers from 0"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise InputError(
                f"layer_types names {len(self.layer_types)} layers, "
                f"num_hidden_layers says {self.num_hidden_layers}"
            )
        if not 0 < self.num_draft_tokens <= self.vocab_size:
            raise InputError(
                f"draft_vocab_size is {self.draft_vocab_size}; the vocabulary has {self.vocab_size}"
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise InputError("layer_types has sliding_attention but sliding_window is not set")

    @property
    def num_proposals(self) -> int:
        """M: tokens proposed from one block."""
        return self.block_size - self.first_slot

    @property
    def num_unused_slots(self) -> int:
        """Slots of a block that propose nothing."""
        return self.block_size - self.num_proposals

    @property
    def num_draft_tokens(self) -> int:
        """Vd: rows of the drafter's LM head."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    def layer_type(self, layer: int) -> str:
        return self.layer_types[layer] if self.layer_types else "full_attention"

    def layer_window(self, layer: int) -> int | None:
        """Context keys a slot of this layer sees, or None for all of them."""
        return self.sliding_window if self.layer_type(layer) == "sliding_attention" else None

    def layer_causal(self, layer: int) -> bool:
        """Whether slots see only earlier slots: is_causal, else causal, else by the layer's
        type."""
        for stated in (self.is_causal, self.causal):
            if stated is not None:
                return stated
        return self.layer_type(layer) == "sliding_attention"

    @property
    def causal_block(self) -> bool:
        """Whether no slot of a block sees a later one, in any layer."""
        return all(self.layer_causal(layer) for layer in range(self.num_hidden_layers))


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """One level of keys: nested sections win, rope_parameters over rope_scaling and rope_theta."""
    flat = dict(config)
    for name in (*NESTED, "rope_parameters", "rope_scaling"):
        if not isinstance(flat.get(name) or {}, dict):
            raise InputError(f"{name} is {flat[name]!r} in config.json; it must be an object")
        if name in NESTED:
            flat |= flat.pop(name, None) or {}
    rope = flat.pop("rope_parameters", None)
    if rope:
        flat["rope_theta"] = rope.get("rope_theta", flat.get("rope_theta"))
        flat["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    scaling = flat.get("rope_scaling")
    if scaling and scaling.get("type", scaling.get("rope_type", "default")) == "default":
        flat["rope_scaling"] = None
    if flat.get("swa_window_size"):
        flat["sliding_window"] = flat["swa_window_size"]
    layers, size = flat.get("num_hidden_layers"), flat.get("hidden_size")
    heads = flat.get("num_attention_heads")
    if flat.get("use_swa") and not flat.get("layer_types") and type(layers) is int:
        flat["layer_types"] = ["sliding_attention"] * min(layers, LIMITS["num_hidden_layers"][1])
    if flat.get("head_dim") is None and type(size) is type(heads) is int and heads > 0:
        flat["head_dim"] = size // heads
    return flat


def checked(name: str, kind: Any, value: Any) -> Any:
    """Check a value against its field's type, or raise `InputError`; numbers in strings are
    refused."""
    if value is None:
        return None
    kind = str(kind).removeprefix("<class '").removesuffix("'>")
    if kind.startswith("tuple"):
        items = {"int": (int,), "float": (int, float), "str": (str,)}[kind[6:].split(",")[0]]
        if isinstance(value, list | tuple) and all(type(v) in items for v in value):
            return tuple(value)
    elif kind.startswith("dict"):
        if isinstance(value, dict):
            return value
    elif kind.startswith("float"):
        if type(value) in (int, float):
            return float(value)
    elif type(value) is {"bool": bool, "str": str}.get(kind.split(" ")[0], int):
        return value
    raise InputError(f"{name} is {value!r} in the drafter's config.json; it must be {kind}")

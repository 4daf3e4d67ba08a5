"""The published layouts: one literal table of tensor names each, and how its config reads.

A table maps a checkpoint's name to the drafter module's parameter; {i} is a layer. `name#k` is
part k of a parameter that stacks several tensors, in order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dspine_mlx.checkpoints import settings
from dspine_mlx.checkpoints.transfer_space import SPACE
from dspine_mlx.drafters.config import DrafterConfig, DSparkConfig, DSpineConfig
from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.dspark import DSpark
from dspine_mlx.drafters.dspark_gemma4 import Gemma4DSpark, Gemma4DSparkConfig
from dspine_mlx.drafters.dspine import DSpine

Names = dict[str, str]
Settings = Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], dict[str, Any]]

METHODS: dict[str, tuple[type[DFlash], type[DrafterConfig]]] = {
    "dflash": (DFlash, DrafterConfig),
    "dspark": (DSpark, DSparkConfig),
    "dspark_gemma4": (Gemma4DSpark, Gemma4DSparkConfig),
    "dspine": (DSpine, DSpineConfig),
}


def same(*names: str) -> Names:
    return {name: name for name in names}


BACKBONE = same(
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
    "layers.{i}.input_layernorm.weight",
    "layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.self_attn.q_proj.bias",  # these four with attention_bias
    "layers.{i}.self_attn.k_proj.bias",
    "layers.{i}.self_attn.v_proj.bias",
    "layers.{i}.self_attn.o_proj.bias",
    "layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.self_attn.k_norm.weight",
    "layers.{i}.self_attn.attention_sink_bias",
    "layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.mlp.up_proj.weight",
    "layers.{i}.mlp.down_proj.weight",
    "d2t",  # with a reduced draft vocabulary
) | {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}

GEMMA4 = BACKBONE | same(
    "layers.{i}.pre_feedforward_layernorm.weight",
    "layers.{i}.post_feedforward_layernorm.weight",
    "layers.{i}.layer_scalar",
)

# A drafter's own embedding and head, where it does not use the target's.
ENDS = same("embed_tokens.weight", "lm_head.weight")

HEADS = same(
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
    "markov_head.gate_proj.weight",
    "markov_head.gate_proj.bias",
    "markov_head.joint_proj.weight",
    "markov_head.joint_proj.bias",
    "confidence_head.proj.weight",
    "confidence_head.proj.bias",
)

INJECTION = {
    "injection.readouts.{i}.weight": "injection.readouts.{i}.weight",  # R_i
    "injection.writes.{i}.weight": "injection.writes.{i}.weight",  # W_i
    "injection.receiver_gate.weight": "injection.gates.weight#0",  # G_q
    "injection.predecessor_gate.weight": "injection.gates.weight#1",  # G_p
    "injection.message.weight": "injection.gates.weight#2",  # A
    "injection.bias": "injection.bias",  # b
    "transfer_codes": "transfer_codes.weight",  # C
    "injection.gates.weight": "injection.gates.weight",  # stacked, as the modules hold them
    "transfer_codes.weight": "transfer_codes.weight",
}

IGNORED = ("mask_embedding", "mask_embedding.weight", "transfer_ready", "t2d")


@dataclass(frozen=True)
class Layout:
    """How one kind of checkpoint names its tensors and its settings."""

    name: str
    method: str  # of METHODS
    names: Names
    settings: Settings  # config.json and the shapes found -> fields of the drafter's config
    offsets: bool = True  # d2t holds offsets d -> d + d2t[d]; False: the target's ids
    by_shape: bool = False  # names may be unknown and are then told apart by shape


DFLASH = Layout("DFlash, z-lab", "dflash", BACKBONE | ENDS, settings.read_flat)
DFLASH_SPECULATORS = Layout(
    "DFlash, speculators", "dflash", BACKBONE | ENDS, settings.read_speculators
)
DSPARK_DEEPSPEC = Layout("DSpark, DeepSpec", "dspark", BACKBONE | ENDS | HEADS, settings.read_flat)
DSPARK_GEMMA4 = Layout(
    "DSpark for Gemma 4, DeepSpec", "dspark_gemma4", GEMMA4 | ENDS | HEADS, settings.read_gemma4
)
DSPARK_SPECFORGE = Layout(
    "DSpark, SpecForge",
    "dspark",
    BACKBONE | ENDS | HEADS | {f"logit_head.{name}": path for name, path in HEADS.items()},
    settings.read_flat,
)
DSPARK_SPECULATORS = Layout(
    "DSpark, speculators", "dspark", BACKBONE | ENDS | HEADS, settings.read_speculators
)
DSPINE_SPECFORGE = Layout("DSpine, SpecForge", "dspine", BACKBONE | INJECTION, settings.read_flat)
DSPINE_REFERENCE = Layout(
    "DSpine, reference",
    "dspine",
    BACKBONE | INJECTION | {"codes": "transfer_codes.weight"},
    settings.read_reference,
)
DSPINE_TENCENT = Layout(
    "DSpine, Tencent", "dspine", BACKBONE | INJECTION, settings.read_tencent, by_shape=True
)
CONVERTED = {  # what this package writes: parameter paths and config fields as they are
    method: Layout(f"{title}, dspine-mlx", method, names, settings.read_own, offsets=False)
    for method, title, names in (
        ("dflash", "DFlash", BACKBONE | ENDS),
        ("dspark", "DSpark", BACKBONE | ENDS | HEADS),
        ("dspark_gemma4", "DSpark for Gemma 4", GEMMA4 | ENDS | HEADS),
        ("dspine", "DSpine", BACKBONE | INJECTION | same(*SPACE)),
    )
}

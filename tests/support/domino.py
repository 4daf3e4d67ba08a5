"""Domino checkpoints with random weights under the published names, tensor by tensor."""

from dataclasses import dataclass
from typing import Any

from tests.support.checkpoints import Checkpoint, Maker, Shape, Weights


@dataclass(frozen=True)
class Sizes:
    """Of the GRU (F) and the correction's rank (E)."""

    F: int = 10
    E: int = 6


SHAPE, SIZES = Shape(), Sizes()


def head(m: Maker, sizes: Sizes) -> Weights:
    H, V, F, E = m.s.H, m.s.V, sizes.F, sizes.E
    return {
        "prefix_gru.weight_ih_l0": m.matrix(3 * F, H),
        "prefix_gru.weight_hh_l0": m.matrix(3 * F, F, 2),
        "embed_proj.0.weight": m.matrix(E, H + F, 2),
        "embed_proj.2.weight": m.matrix(V, E, 3),
    }


def domino_specforge(
    shape: Shape = SHAPE,
    sizes: Sizes = SIZES,
    shift: bool | None = True,
    prefix: int = 1,
    older: bool = False,
    **extra: Any,
) -> Checkpoint:
    """As published: block and emb_dim at the top, too; older: nested under logit_head."""
    m = Maker(shape)
    config = m.qwen3() | {
        "architectures": ["DominoDraftModel"],
        "auto_map": {"AutoModel": "domino.DominoDraftModel"},
        "block_size": shape.B,
        "num_target_layers": shape.target_layers,
        "layer_types": ["full_attention"] * shape.L,
        "emb_dim": sizes.E,
        "dflash_config": m.blocks()
        | {
            "projector_type": "domino",
            "emb_dim": sizes.E,
            "gru_hidden_dim": sizes.F,
            "pure_draft_prefix_len": prefix,
        },
    }
    if shift is not None:
        config["dflash_config"] |= {"shift_label": shift}
    tensors = head(m, sizes)
    if older:
        tensors = {f"logit_head.{name}": value for name, value in tensors.items()}
    return config | extra, m.backbone() | tensors

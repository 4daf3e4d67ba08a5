"""One drafter of every kind, with random weights, for a tiny target."""

from collections.abc import Callable
from typing import Any

import mlx.nn as nn

from dspine_mlx.drafters.dflash2 import DFlash2, DFlash2Config
from dspine_mlx.drafters.domino import Domino, DominoConfig
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspark import DSpark, DSparkConfig
from dspine_mlx.target.model import Target
from tests.support.tiny import drafter_config, randomise, tiny_dflash, tiny_dspine


def tiny_dspark(model: nn.Module, seed: int = 1, **changes: Any) -> Drafter:
    heads = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    config = drafter_config(markov_rank=6) | heads | changes
    return randomise(DSpark(DSparkConfig.from_dict(config)), seed).bind(Target(model))


def tiny_dflash2(model: nn.Module, seed: int = 1, **changes: Any) -> Drafter:
    sizes = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
    config = DFlash2Config.from_dict(drafter_config(**sizes) | changes)
    return randomise(DFlash2(config), seed, 0.3).bind(Target(model))


def tiny_domino(model: nn.Module, seed: int = 1, **changes: Any) -> Drafter:
    config = drafter_config(gru_hidden_dim=6, emb_dim=4, pure_draft_prefix_len=1) | changes
    return randomise(Domino(DominoConfig.from_dict(config)), seed, 0.4).bind(Target(model))


def kind(make: Callable[..., Drafter], **own: Any) -> Callable[..., Drafter]:
    return lambda model, **changes: make(model, **own | changes)


EVERY: dict[str, Callable[..., Drafter]] = {
    "dflash": tiny_dflash,
    "dspine": tiny_dspine,
    "dspark": tiny_dspark,
    "dspark, gated": kind(tiny_dspark, markov_head_type="gated"),
    "dspark, rnn": kind(tiny_dspark, markov_head_type="rnn"),
    "dspark, a table": kind(tiny_dspark, candidate_pool=0),
    "dflash2": tiny_dflash2,
    "domino": kind(tiny_domino, shift_label=True),
    "domino, not shifted": kind(tiny_domino, shift_label=False),
}

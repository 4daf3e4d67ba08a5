"""The start of training: the tokens that can be drafted, and weights from the target."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.errors import InputError
from dspine_mlx.target.model import Target
from dspine_mlx.train.data import Sequence


def start_vocabulary(network: DFlash, target: Target, sequences: list[Sequence]) -> None:
    """Choose a reduced draft vocabulary: the answers' most frequent tokens."""
    answers = [sequence.tokens[sequence.start :] for sequence in sequences]
    counts = np.bincount(np.concatenate(answers), minlength=target.vocab_size)
    kept = np.argsort(-counts, kind="stable")[: network.config.num_draft_tokens]
    network.d2t = mx.array(np.sort(kept).astype(np.uint32))
    start_head(network, target)


def start_head(network: DFlash, target: Target) -> None:
    """Start the network's own head for a reduced vocabulary as the target's; a network without one
    uses the target's."""
    if "lm_head" in network:
        network.lm_head.weight = target.head_rows(network.d2t).astype(mx.float32)


def start_layers(network: DFlash, target: Target, ids: tuple[int, ...]) -> list[str]:
    """Copy target layers into the draft layers where shapes agree; fc becomes the mean of the taps.
    Returns the names of copied parameters.
    """
    copied = []
    if len(ids) != len(network.layers):
        raise InputError(
            f"{len(ids)} target layers were named for {len(network.layers)} draft layers; "
            "name one for each"
        )
    for i, (layer, source) in enumerate(zip(network.layers, ids, strict=True)):
        weights = dict(tree_flatten(target.layers[source].parameters()))
        own = dict(tree_flatten(layer.parameters()))
        fit = [(n, w) for n, w in weights.items() if n in own and own[n].shape == w.shape]
        layer.load_weights([(n, w.astype(mx.float32)) for n, w in fit], strict=False)
        copied += [f"layers.{i}.{name}" for name, _ in fit]
    taps = len(network.config.target_layer_ids)
    if network.feature_size == taps * network.config.hidden_size:
        network.fc.weight = (
            mx.concatenate([mx.eye(network.config.hidden_size)] * taps, axis=1) / taps
        )
    norms = [target.layers[i].get("input_layernorm") for i in ids]
    if all(isinstance(norm, nn.RMSNorm) for norm in norms):
        network.hidden_norm.weight = sum(n.weight.astype(mx.float32) for n in norms) / len(norms)
    norm = next((target.body[n] for n in ("norm", "final_layernorm") if n in target.body), None)
    if isinstance(norm, nn.RMSNorm) and norm.weight.shape == network.norm.weight.shape:
        network.norm.weight = norm.weight.astype(mx.float32)
        copied.append("norm.weight")
    return copied

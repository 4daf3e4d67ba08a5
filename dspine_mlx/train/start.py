"""Where training starts: the transfer space, target layers, or a DFlash checkpoint."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from dspine_mlx.checkpoints.transfer_space import transfer_codes
from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.dspark import DSpark
from dspine_mlx.drafters.dspine import DSpine
from dspine_mlx.errors import InputError
from dspine_mlx.target.model import Target
from dspine_mlx.train.data import Sequence


def start_dspine(network: DSpine, target: Target) -> None:
    """C and the projection P from the target's LM head; every R_l starts as P^T, so that a state's
    readout is its own place in the space; W and G_p start at zero: no message, open to learn.

    C is not trained.
    """
    config = network.config
    head = target.head_rows(mx.arange(target.vocab_size)).astype(mx.float32)
    codes, projection = transfer_codes(head, config.transfer_rank)
    network.transfer_codes.weight = codes.astype(mx.float32)
    network.transfer_codes.freeze()
    injection, a = network.injection, config.message_size
    for readout, write in zip(injection.readouts, injection.writes, strict=True):
        readout.weight = projection.T.astype(mx.float32)
        write.weight = mx.zeros_like(write.weight)
    injection.gates.weight = mx.concatenate(
        [
            injection.gates.weight[:a],
            mx.zeros((a, config.transfer_rank)),
            injection.gates.weight[2 * a :],
        ]
    )


def start_vocabulary(network: DFlash, target: Target, sequences: list[Sequence]) -> None:
    """A reduced draft vocabulary: the answers' most frequent tokens."""
    answers = [sequence.tokens[sequence.start :] for sequence in sequences]
    counts = np.bincount(np.concatenate(answers), minlength=target.vocab_size)
    kept = np.argsort(-counts, kind="stable")[: network.config.num_draft_tokens]
    network.d2t = mx.array(np.sort(kept).astype(np.uint32))
    start_head(network, target)


def start_head(network: DFlash, target: Target) -> None:
    """The head that a DSpark drafter has of its own for a reduced vocabulary starts as the
    target's; other drafters use the target's."""
    if isinstance(network, DSpark):
        network.lm_head.weight = target.head_rows(network.d2t).astype(mx.float32)


def start_layers(network: DFlash, target: Target, ids: tuple[int, ...]) -> list[str]:
    """Copy target layers into the draft layers where shapes agree; fc becomes the mean of the taps.

    Returns the names of what was copied.
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

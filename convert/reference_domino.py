"""One round of Domino in NumPy float64, along a path; see `dspine_mlx.convert.reference`."""

import numpy as np

from dspine_mlx.convert.reference import (
    Chain,
    Config,
    Head,
    Tensors,
    Weights,
    base_logits,
    context_rows,
    draft_layer,
    embed_block,
    flat,
    rms_norm,
    sigmoid,
)


def next_state(w: Weights, embedded: np.ndarray, s: np.ndarray) -> np.ndarray:
    r, z, n = np.split(w["prefix_gru.weight_ih_l0"] @ embedded, 3)
    hr, hz, hn = np.split(w["prefix_gru.weight_hh_l0"] @ s, 3)
    z = sigmoid(z + hz)
    return (1 - z) * np.tanh(n + sigmoid(r + hr) * hn) + z * s


def corrected(
    w: Weights, c: Config, target: Head, h: np.ndarray, anchor: int, path: list[int] | None = None
) -> Chain:
    """Score along a path, or along the greedy one. h: normalised states [M, d] of the proposing
    slots."""
    base = base_logits(w, c, target, h)
    prefix = c.get("pure_draft_prefix_len", 0)
    s = next_state(w, target.embedding[anchor], np.zeros(w["prefix_gru.weight_hh_l0"].shape[1]))
    taken, scores = [], base.copy()
    for k in range(len(h)):
        if k >= prefix:
            x = w["embed_proj.0.weight"] @ np.concatenate([h[k], s])
            scores[k] += w["embed_proj.2.weight"] @ (x * sigmoid(x))
        taken.append(int(scores[k].argmax()) if path is None else path[k])
        s = next_state(w, target.embedding[taken[-1]], s)
    return Chain(taken, scores, base)


def domino_round(
    weights: Weights,
    config: Config,
    target: Head,
    features: np.ndarray,
    anchor: int,
    path: list[int] | None = None,
) -> Chain:
    w, c = Tensors(weights), flat(config)
    h, context = embed_block(c, target.embedding, anchor), context_rows(w, c, features)
    for i in range(c["num_hidden_layers"]):
        h = draft_layer(w, c, i, h, context)
    first = 0 if c.get("shift_label", False) else 1
    h = rms_norm(h, w["norm.weight"], c["rms_norm_eps"])[first : first + len(h) - 1]
    return corrected(w, c, target, h, anchor, path)

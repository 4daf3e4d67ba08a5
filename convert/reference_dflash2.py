"""One round of DFlash2 in NumPy float64; see `dspine_mlx.convert.reference`."""

import numpy as np

from dspine_mlx.convert.reference import (
    Config,
    Head,
    Round,
    Tensors,
    Weights,
    attention,
    base_logits,
    context_rows,
    embed_block,
    flat,
    rms_norm,
    sigmoid,
    top,
)

SPECULATORS_DEFAULTS = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}


def block_kernel(base: np.ndarray, projection: np.ndarray, normed: np.ndarray) -> np.ndarray:
    """[side, tap, slot, channel]: the slot's own value of channel c is that of group c // g."""
    sides, taps, width = base.shape
    dynamic = (normed @ projection.T).reshape(len(normed), sides, taps, -1)
    channels = np.arange(width) // (width // dynamic.shape[-1])
    return base[:, :, None] + dynamic[..., channels].transpose(1, 2, 0, 3)


def convolved(kernel: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Slot s: the sum over taps t of kernel[t, s] * rows[s - t], with nothing before slot 0."""
    out = np.zeros_like(rows)
    for slot in range(len(rows)):
        for tap in range(min(len(kernel), slot + 1)):
            out[slot] += kernel[tap, slot] * rows[slot - tap]
    return out


def convolved_layer(
    w: Weights, c: Config, i: int, x: np.ndarray, context: np.ndarray
) -> np.ndarray:
    at, eps = f"layers.{i}.", c["rms_norm_eps"]

    def kernel(name: str, normed: np.ndarray) -> np.ndarray:
        conv = f"{at}{name}_conv."
        return block_kernel(w[f"{conv}base_kernel"], w[f"{conv}kernel_projection.weight"], normed)

    n = rms_norm(x, w[f"{at}input_layernorm.weight"], eps)
    before, after = kernel("attention", n)
    x = x + convolved(after, attention(w, c, i, convolved(before, n), context))
    n = rms_norm(x, w[f"{at}post_attention_layernorm.weight"], eps)
    before, after = kernel("mlp", n)
    u = convolved(before, n)
    gate, up = (u @ w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + convolved(after, (gate * sigmoid(gate) * up) @ w[f"{at}mlp.down_proj.weight"].T)


def dflash2_states(
    w: Weights, c: Config, target: Head, features: np.ndarray, anchor: int
) -> np.ndarray:
    """Normalised states [M, d] of the slots that propose."""
    h, context = embed_block(c, target.embedding, anchor), context_rows(w, c, features)
    for i in range(c["num_hidden_layers"]):
        h = convolved_layer(w, c, i, h, context)
    return rms_norm(h[c["first_slot"] :], w["norm.weight"], c["rms_norm_eps"])


def dflash2_round(
    weights: Weights,
    config: Config,
    target: Head,
    features: np.ndarray,
    anchor: int,
    candidates: np.ndarray | None = None,
    k: int | None = None,
) -> Round:
    """k: candidates per slot; None: the config's selector_top_k."""
    w = Tensors(weights)
    c = SPECULATORS_DEFAULTS | {"first_slot": 1} | flat(config)
    states = dflash2_states(w, c, target, features, anchor)
    base = base_logits(w, c, target, states)
    base[:, c.get("selector_vocab_size") or c["vocab_size"] :] = -np.inf
    candidates = top(base, k or c["selector_top_k"]) if candidates is None else candidates
    at = "candidate_selector."
    predecessors, successors = (w[f"{at}{side}_codebook"] for side in ("predecessor", "successor"))
    projection = w[f"{at}hidden_projection.weight"]
    M, K = candidates.shape
    table = np.empty((M, K, K))
    for t in range(M):
        for i in range(K):
            token = anchor if t == 0 else candidates[t - 1, i]
            for j, successor in enumerate(candidates[t]):
                affinity = predecessors[token] * (projection @ states[t]) @ successors[successor]
                table[t, i, j] = base[t, successor] + affinity
    return Round(candidates, table[0, 0], table[1:], base)

"""One drafting round in NumPy float64, from a checkpoint's own tensors and config.

`convert --verify` and the tests compare the package with this module. It shares no line with the
MLX code and reads config.json on its own. It prefers clarity to speed: batch 1, no cache. The
context is given whole, feature row i is position i, and the anchor is at position n.

    round = dspine_round(weights, config, target, features, anchor)
    round.base [M, V], round.candidates [M, K], round.first [K], round.transitions [M-1, K, K]

weights: torch names -> float arrays. config: config.json as published (nested sections are read
here). target: `Head(embedding [V, d], head [V, d])`. features [n, m*d].
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

Weights = Mapping[str, np.ndarray]
Config = dict[str, Any]
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
    "sliding_window": 4096,
}


class Table(Protocol):
    """A matrix [V, d] that is read in rows: an array, or an object that makes the rows."""

    def __len__(self) -> int: ...
    def __getitem__(self, rows: Any) -> np.ndarray: ...


class Head(NamedTuple):
    """The target's embedding and LM head, both [V, d]; one table twice when they are tied."""

    embedding: Table
    head: Table


class Round(NamedTuple):
    candidates: np.ndarray  # [M, K], descending base logit
    first: np.ndarray  # [K]
    transitions: np.ndarray  # [M-1, K, K]
    base: np.ndarray  # [M, V] base logits, -inf outside a reduced draft vocabulary
    confidence: np.ndarray | None = None  # [M, K]


class Chain(NamedTuple):
    """Along one path, for drafters whose slots are scored one after the other."""

    path: list[int]  # M tokens
    scores: np.ndarray  # [M, V] of each slot after the tokens before it; -inf: can't be proposed
    base: np.ndarray  # [M, V] of the backbone alone
    confidence: np.ndarray | None = None  # [M]


# --- config and names ---------------------------------------------------------------------------


def flat(config: Config) -> Config:
    """One level of keys, nested sections first; speculators' names and conventions translated."""
    if "speculators_model_type" in config:
        return flat_speculators(config)
    if config.get("architectures") == ["Gemma4DSparkModel"]:
        return flat_gemma4(config)
    inner = config["config"] if isinstance(config.get("config"), dict) else config
    out: Config = {"block_size": 16} | inner  # the one with "config" may leave it out
    for section in ("dflash_config", "dspine_config"):
        out.update(inner.get(section) or {})
    out["is_causal"] = inner.get("is_causal")
    out["causal"] = (inner.get("dflash_config") or {}).get("causal")
    if out.get("swa_window_size"):
        out["sliding_window"] = out["swa_window_size"]
    return with_rope(out)


def flat_speculators(config: Config) -> Config:
    out = QWEN3_DEFAULTS | config["transformer_layer_config"]
    out |= {k: v for k, v in config.items() if k != "transformer_layer_config"}
    out["target_layer_ids"] = [i - 1 for i in config["aux_hidden_state_layer_ids"]]
    out.setdefault("block_size", 8)
    method = config["speculators_model_type"]
    out["first_slot"] = 0 if config.get("sample_from_anchor", method == "dspark") else 1
    out["is_causal"] = None
    non_causal = config.get("sliding_window_non_causal", method == "dflash2")
    out["causal"] = False if non_causal else None
    out["window_from_anchor"] = True
    return with_rope(out)


def flat_gemma4(config: Config) -> Config:
    """A copy of the target's text config, read as a stack of global layers."""
    out: Config = {"attention_k_eq_v": False} | config
    out |= {"gemma4": True, "is_causal": None, "head_dim": out["global_head_dim"]}
    if out["attention_k_eq_v"]:
        out["num_key_value_heads"] = out["num_global_key_value_heads"]
    out["input_embedding_scale"] = np.sqrt(out["hidden_size"])
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    out["rope"] = (out.get("rope_parameters") or {}).get("full_attention", rope)
    return out


def with_rope(out: Config) -> Config:
    rope = dict(out.get("rope_parameters") or out.get("rope_scaling") or {})
    out["rope"] = {"rope_theta": out.get("rope_theta", 1e4)} | rope
    out["head_dim"] = out.get("head_dim") or out["hidden_size"] // out["num_attention_heads"]
    return out


RENAMES = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "logit_head.": "",
    "codes": "transfer_codes",
    "transfer_codes.weight": "transfer_codes",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}
TABLES = (
    "transfer_codes",
    "embed_tokens.weight",
    "lm_head.weight",
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
)  # large, and read in rows
CHUNK = 8192  # rows of a table in float64 at a time


class Tensors(Weights):
    """A checkpoint's tensors, without the prefixes and aliases of published files. Each is
    converted to float64 when used, except for the large tables."""

    def __init__(self, weights: Weights):
        self.weights, self.names = weights, {plain_name(name): name for name in weights}

    def __getitem__(self, name: str) -> np.ndarray:
        value = self.weights[self.names[name]]
        wide = value.dtype.kind == "f" and name not in TABLES
        return value.astype(np.float64) if wide else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def plain_name(name: str) -> str:
    name = name.removeprefix("model.")
    for old, new in RENAMES.items():
        if name.startswith(old):
            name = new + name[len(old) :]
    return name


# --- the backbone -------------------------------------------------------------------------------


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rope_frequencies(c: Config) -> tuple[np.ndarray, float]:
    """Radians per position [hd/2], and the factor on cos and sin (YaRN's attention factor)."""
    dim, rope = c["head_dim"], c["rope"]
    base = rope["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base, 1.0
    if kind == "proportional":  # the slower pairs don't rotate
        base[int(rope["partial_rotary_factor"] * dim) // 2 :] = 0
        return base, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return base / factor, 1.0
    assert kind == "yarn", kind
    length = rope.get("original_max_position_embeddings", c.get("max_position_embeddings"))

    def dimension(rotations: float) -> float:  # where a full context turns this many times
        return dim * np.log(length / (rotations * 2 * np.pi)) / (2 * np.log(rope["rope_theta"]))

    low = max(np.floor(dimension(rope.get("beta_fast", 32))), 0)
    high = min(np.ceil(dimension(rope.get("beta_slow", 1))), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    frequencies = base / factor * ramp + base * (1 - ramp)
    return frequencies, rope.get("attention_factor") or (0.1 * np.log(factor) + 1)


def rotate(x: np.ndarray, positions: np.ndarray, c: Config) -> np.ndarray:
    """Rotate x [heads, n, hd] at absolute positions [n]: halves, or interleaved pairs if the config
    says so."""
    frequencies, factor = rope_frequencies(c)
    angle = positions[:, None] * frequencies
    cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
    out = np.empty_like(x)
    half = x.shape[-1] // 2
    if c.get("rope_is_neox_style", True):
        first, second = slice(0, half), slice(half, None)
    else:
        first, second = slice(0, None, 2), slice(1, None, 2)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def layer_kind(c: Config, layer: int) -> tuple[int | None, bool]:
    """(window or None, causal) of a layer, by the precedence of config keys."""
    sliding = bool(c.get("use_swa"))
    if c.get("layer_types"):
        sliding = c["layer_types"][layer] == "sliding_attention"
    stated = [flag for flag in (c.get("is_causal"), c.get("causal")) if flag is not None]
    return c["sliding_window"] if sliding else None, stated[0] if stated else sliding


def visible(c: Config, layer: int, anchor: int, block: int) -> np.ndarray:
    """Which keys [anchor + block] each slot [block] sees."""
    window, causal = layer_kind(c, layer)
    mask = np.zeros((block, anchor + block), dtype=bool)
    for slot in range(block):
        for key in range(anchor + block):
            if key >= anchor:
                mask[slot, key] = not causal or key - anchor <= slot
            elif window is None:
                mask[slot, key] = True
            elif c.get("window_from_anchor"):
                mask[slot, key] = key >= anchor - window
            else:
                mask[slot, key] = anchor + slot - key < window
    return mask


def attention(w: Weights, c: Config, layer: int, x: np.ndarray, ctx: np.ndarray) -> np.ndarray:
    """Attend from normalised block rows x [B, d] to context rows ctx [n, d], then the block."""
    n_heads, n_kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    at = f"layers.{layer}.self_attn."

    def project(name: str, rows: np.ndarray, heads: int) -> np.ndarray:
        y = rows @ w[f"{at}{name}.weight"].T
        if f"{at}{name}.bias" in w:
            y = y + w[f"{at}{name}.bias"]
        return y.reshape(len(rows), heads, dim).swapaxes(0, 1)

    n, block, eps = len(ctx), len(x), c["rms_norm_eps"]
    rows = np.concatenate([ctx, x])
    q = rms_norm(project("q_proj", x, n_heads), w[f"{at}q_norm.weight"], eps)
    k = rms_norm(project("k_proj", rows, n_kv), w[f"{at}k_norm.weight"], eps)
    if c.get("gemma4"):
        v = project("k_proj" if c["attention_k_eq_v"] else "v_proj", rows, n_kv)
        v, scale = rms_norm(v, np.ones(dim), eps), 1.0
    else:
        v, scale = project("v_proj", rows, n_kv) * c.get("attention_value_scale", 1.0), dim**-0.5
    q, k = rotate(q, np.arange(n, n + block), c), rotate(k, np.arange(n + block), c)
    k, v = k.repeat(n_heads // n_kv, axis=0), v.repeat(n_heads // n_kv, axis=0)
    scores = q @ k.swapaxes(1, 2) * scale
    scores = np.where(visible(c, layer, n, block), scores, -np.inf)
    sink = w.get(f"{at}attention_sink_bias")
    if sink is not None:  # one more key whose value is zero
        scores = np.concatenate(
            [scores, np.broadcast_to(sink[:, None, None], (n_heads, block, 1))], 2
        )
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p = (p / p.sum(axis=-1, keepdims=True))[..., : n + block]
    out = (p @ v).swapaxes(0, 1).reshape(block, n_heads * dim) @ w[f"{at}o_proj.weight"].T
    return out + w.get(f"{at}o_proj.bias", 0.0)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gemma4_layer(w: Weights, c: Config, layer: int, h: np.ndarray, ctx: np.ndarray) -> np.ndarray:
    at = f"layers.{layer}."

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, w[f"{at}{name}_layernorm.weight"], c["rms_norm_eps"])

    attended = attention(w, c, layer, norm("input", h), ctx)
    h = h + norm("post_attention", attended)
    x = norm("pre_feedforward", h)
    x = gelu_tanh(x @ w[f"{at}mlp.gate_proj.weight"].T) * (x @ w[f"{at}mlp.up_proj.weight"].T)
    h = h + norm("post_feedforward", x @ w[f"{at}mlp.down_proj.weight"].T)
    return h * w[f"{at}layer_scalar"]


def draft_layer(w: Weights, c: Config, layer: int, h: np.ndarray, ctx: np.ndarray) -> np.ndarray:
    if c.get("gemma4"):
        return gemma4_layer(w, c, layer, h, ctx)
    at, eps = f"layers.{layer}.", c["rms_norm_eps"]
    h = h + attention(w, c, layer, rms_norm(h, w[f"{at}input_layernorm.weight"], eps), ctx)
    x = rms_norm(h, w[f"{at}post_attention_layernorm.weight"], eps)
    gate = x @ w[f"{at}mlp.gate_proj.weight"].T
    return (
        h
        + (gate * sigmoid(gate) * (x @ w[f"{at}mlp.up_proj.weight"].T))
        @ w[f"{at}mlp.down_proj.weight"].T
    )


def context_rows(w: Weights, c: Config, features: np.ndarray) -> np.ndarray:
    return rms_norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], c["rms_norm_eps"])


def embed_block(c: Config, embedding: Table, anchor: int) -> np.ndarray:
    tokens = [anchor] + [c["mask_token_id"]] * (c["block_size"] - 1)
    return embedding[tokens] * c.get("input_embedding_scale", 1.0)


def project(states: np.ndarray, table: Table) -> np.ndarray:
    """Multiply states [M, d] by all rows of a table: [M, V]."""
    starts = range(0, len(table), CHUNK)
    parts = [states @ table[i : i + CHUNK].astype(np.float64).T for i in starts]
    return np.concatenate(parts, axis=1)


def scale_logits(c: Config, logits: np.ndarray) -> np.ndarray:
    logits = logits * c.get("output_multiplier", 1.0)
    cap = c.get("final_logit_softcapping")
    return cap * np.tanh(logits / cap) if cap else logits


def draft_tokens(w: Weights, c: Config, target: Head) -> np.ndarray:
    """The target's ids of proposable tokens: a published d2t holds offsets to them."""
    if "d2t" not in w:
        return np.arange(len(target.embedding))
    kept = w["d2t"].astype(np.int64)
    return kept if "dspine_mlx" in c else kept + np.arange(len(kept))


def base_logits(w: Weights, c: Config, target: Head, states: np.ndarray) -> np.ndarray:
    """Base logits [M, V], by the drafter's own head if it has one; -inf for tokens that can't be
    proposed."""
    ids = draft_tokens(w, c, target)
    shared = target.head[ids] if "d2t" in w else target.head
    head = w.get("lm_head.weight", shared)
    base = np.full((len(states), len(target.embedding)), -np.inf)
    base[:, ids] = scale_logits(c, project(states, head))
    return base


def top(base: np.ndarray, k: int) -> np.ndarray:
    """The k best tokens per row, descending; equal logits in index order."""
    return np.argsort(-base, axis=-1, kind="stable")[:, :k]


# --- the three methods --------------------------------------------------------------------------


def dflash_round(
    weights: Weights,
    config: Config,
    target: Head,
    features: np.ndarray,
    anchor: int,
    candidates: np.ndarray | None = None,
    k: int = 16,
) -> Round:
    w, c = Tensors(weights), {"first_slot": 1} | flat(config)
    return markov_round(w, c, target, features, anchor, candidates, k)


def gates(w: Weights) -> list[np.ndarray]:
    """G_q, G_p and A, each [a, r], stacked in one tensor as this package saves them or not."""
    if "injection.gates.weight" in w:
        return np.split(w["injection.gates.weight"], 3)
    return [w[f"injection.{n}.weight"] for n in ("receiver_gate", "predecessor_gate", "message")]


def dspine_round(
    weights: Weights,
    config: Config,
    target: Head,
    features: np.ndarray,
    anchor: int,
    candidates: np.ndarray | None = None,
    k: int = 16,
) -> Round:
    w, c = Tensors(weights), flat(config)
    c["is_causal"] = True
    codes = w["transfer_codes"]
    r, d = codes.shape[1], c["hidden_size"]
    Gq, Gp, A = gates(w)

    def direction(u: np.ndarray, layer: int) -> np.ndarray:
        y = u @ w[f"injection.readouts.{layer}.weight"].T
        return np.sqrt(r) * y / np.maximum(np.linalg.norm(y, axis=-1, keepdims=True), 1e-12)

    def inject(u: np.ndarray, layer: int, previous: np.ndarray) -> np.ndarray:
        gate = sigmoid(direction(u, layer) @ Gq.T + previous @ Gp.T + w["injection.bias"])
        write = (gate * (previous @ A.T)) @ w[f"injection.writes.{layer}.weight"].T
        return u + np.linalg.norm(u, axis=-1, keepdims=True) / np.sqrt(d) * write

    code = np.sqrt(r) * codes[anchor][None]
    h, ctx = embed_block(c, target.embedding, anchor), context_rows(w, c, features)
    for layer in range(c["num_hidden_layers"]):
        u = draft_layer(w, c, layer, h, ctx)
        if c.get("injection_reach", 1) == 2:
            u = np.concatenate(
                [u[:1], from_two_back(w, u[1:], direction(u[1:], layer), layer, code)]
            )
        z = direction(u[1:], layer)
        previous = np.concatenate([code, z[:-1]])
        h = np.concatenate([u[:1], inject(u[1:], layer, previous)])
    states = rms_norm(h[1:], w["norm.weight"], c["rms_norm_eps"])
    base = base_logits(w, c, target, states)
    candidates = top(base, k) if candidates is None else candidates
    M, K = candidates.shape
    table = np.empty((M, K, K))
    for t in range(M):
        for i in range(K):
            token = anchor if t == 0 else candidates[t - 1, i]
            state = inject(u[t + 1], c["num_hidden_layers"] - 1, np.sqrt(r) * codes[token])
            state = rms_norm(state, w["norm.weight"], c["rms_norm_eps"])
            table[t, i] = scale_logits(c, target.head[candidates[t]] @ state)
    return Round(candidates, table[0, 0], table[1:], base)


def from_two_back(
    w: Weights, u: np.ndarray, z: np.ndarray, layer: int, code: np.ndarray
) -> np.ndarray:
    """u [M, d] with the messages of the slots two back, z their readouts; slot 2's is the
    anchor's code [1, r], slot 1 gets none."""
    Gq, Gp, A = np.split(w["earlier.gates.weight"], 3)
    before = np.concatenate([np.zeros_like(code), code, z[:-2]])[: len(u)]
    gate = sigmoid(z @ Gq.T + before @ Gp.T + w["earlier.bias"])
    write = (gate * (before @ A.T)) @ w[f"earlier.writes.{layer}.weight"].T
    return u + np.linalg.norm(u, axis=-1, keepdims=True) / np.sqrt(u.shape[-1]) * write


class MarkovHead:
    """DSpark's bias of the next token given those before, and its confidence."""

    def __init__(self, w: Weights, c: Config):
        self.w, self.kind = w, c.get("markov_head_type", "vanilla")
        self.rank = c.get("markov_rank") or 0
        self.with_markov = bool(c.get("confidence_head_with_markov", False)) and self.rank > 0
        if self.rank:
            self.w1 = w["markov_head.markov_w1.weight"]
            self.w2 = w["markov_head.markov_w2.weight"]

    def bias(self, states: np.ndarray, previous: list[int], rows: np.ndarray | slice) -> np.ndarray:
        """Bias of some draft tokens in a path's last slot; previous[t] is the token before slot
        t."""
        h, e = states[-1], self.w1[previous[-1]]
        if self.kind == "gated":
            at = "markov_head.gate_proj."
            e = sigmoid(self.w[f"{at}weight"] @ np.concatenate([h, e]) + self.w[f"{at}bias"]) * e
        if self.kind == "rnn":
            e = np.tanh(self.outputs(states, previous)[-1])
        return self.w2[rows] @ e

    def outputs(self, states: np.ndarray, previous: list[int]) -> list[np.ndarray]:
        """Outputs of kind rnn at every slot of the path."""
        at, s, out = "markov_head.joint_proj.", np.zeros(self.rank), []
        for h, token in zip(states, previous, strict=True):
            x = np.concatenate([s, self.w1[token], h])
            gate, candidate, output = np.split(self.w[f"{at}weight"] @ x + self.w[f"{at}bias"], 3)
            s = sigmoid(gate) * s + (1 - sigmoid(gate)) * np.tanh(candidate)
            out.append(output)
        return out

    def confidence(self, h: np.ndarray, previous: int) -> float:
        if self.with_markov:
            h = np.concatenate([h, self.w1[previous]])
        at = "confidence_head.proj."
        return float(sigmoid(self.w[f"{at}weight"][0] @ h + self.w[f"{at}bias"][0]))


def dspark_round(
    weights: Weights,
    config: Config,
    target: Head,
    features: np.ndarray,
    anchor: int,
    candidates: np.ndarray | None = None,
    k: int = 16,
    path: list[int] | None = None,
) -> Round | Chain:
    """A table of candidates; given a path, the scores along it as published: of all tokens."""
    w, c = Tensors(weights), {"first_slot": 0} | flat(config)
    if path is not None:
        return markov_chain(w, c, target, features, anchor, path)
    return markov_round(w, c, target, features, anchor, candidates, k)


def markov_states(
    w: Weights, c: Config, target: Head, features: np.ndarray, anchor: int
) -> np.ndarray:
    """Normalised states [M, d] of the slots that propose."""
    h = embed_block(c, w.get("embed_tokens.weight", target.embedding), anchor)
    ctx = context_rows(w, c, features)
    for layer in range(c["num_hidden_layers"]):
        h = draft_layer(w, c, layer, h, ctx)
    return rms_norm(h[c["first_slot"] :], w["norm.weight"], c["rms_norm_eps"])


def markov_chain(
    w: Weights, c: Config, target: Head, features: np.ndarray, anchor: int, path: list[int]
) -> Chain:
    states = markov_states(w, c, target, features, anchor)
    base, head = base_logits(w, c, target, states), MarkovHead(w, c)
    ids, before, scores = draft_tokens(w, c, target), [anchor, *path[:-1]], base.copy()
    for t in range(len(states)):
        scores[t, ids] += head.bias(states[: t + 1], before[: t + 1], slice(None))
    confidence = None
    if "confidence_head.proj.weight" in w:
        confidence = np.array(list(map(head.confidence, states, before)))
    return Chain(path, scores, base, confidence)


def markov_round(
    w: Weights,
    c: Config,
    target: Head,
    features: np.ndarray,
    anchor: int,
    candidates: np.ndarray | None,
    k: int,
) -> Round:
    """A block without injection, with or without a Markov head; candidates are target ids.

    Kind rnn depends on the whole path: row i of slot t follows the greedy path up to slot t - 2 and
    then candidate i.
    """
    states = markov_states(w, c, target, features, anchor)
    base = base_logits(w, c, target, states)
    candidates = top(base, k) if candidates is None else candidates
    ids, rows = draft_tokens(w, c, target), np.zeros(base.shape[1], dtype=np.int64)
    rows[ids] = np.arange(len(ids))
    head = MarkovHead(w, c)
    M, K = candidates.shape
    table = np.repeat(np.take_along_axis(base, candidates, axis=1)[:, None], K, axis=1)
    confidence = np.empty((M, K)) if "confidence_head.proj.weight" in w else None
    path, greedy = [anchor], 0  # tokens before each slot, and the row of the last one
    for t in range(M):
        before = [anchor] * K if t == 0 else [int(token) for token in candidates[t - 1]]
        for i, token in enumerate(before):
            if head.rank:
                previous = [*path[:-1], token]
                table[t, i] += head.bias(states[: t + 1], previous, rows[candidates[t]])
            if confidence is not None:
                confidence[t, i] = head.confidence(states[t], token)
        greedy = int(table[t, greedy].argmax())
        path.append(int(candidates[t, greedy]))
    return Round(candidates, table[0, 0], table[1:], base, confidence)

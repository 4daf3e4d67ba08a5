"""Tiny batches, and the training losses in float64 NumPy, one block at a time."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from dspine_mlx.convert import reference
from dspine_mlx.convert.reference import Head, MarkovHead, rms_norm, sigmoid
from dspine_mlx.train.blocks import Batch
from dspine_mlx.train.config import LossConfig
from tests.support.checkpoints import Config, Shape, Weights

SHAPE = Shape(H=16, I=24, L=2, heads=4, kv=2, hd=4, V=40, taps=(0, 2), B=5, r=12, a=6, rank=5)


def random_batch(shape: Shape, M: int, *, n: int = 14, anchors: int = 3, seed: int = 0) -> Batch:
    """Two sequences. The last block of each runs over the end, one block is empty, and about half
    of the blocks have their predecessors replaced."""
    rng = np.random.default_rng(seed)
    starts = np.stack([np.sort(rng.choice(n - 2, anchors, replace=False)) for _ in range(2)])
    starts[:, -1] = n - 3
    weights = np.exp(-np.arange(M) / 7) * (starts[..., None] + 1 + np.arange(M) < n)
    weights[0, 0] = 0
    return Batch(
        tokens=mx.array(rng.integers(0, shape.V, (2, n)).astype(np.int32)),
        features=mx.array(rng.normal(size=(2, n, len(shape.taps) * shape.H)).astype("f4")),
        hidden=mx.array(rng.normal(size=(2, n, shape.H)).astype("f4")),
        anchors=mx.array(starts.astype(np.int32)),
        weights=mx.array(weights.astype("f4")),
        replaced=mx.array(rng.random((2, anchors)) < 0.5),
    )


@dataclass
class NumpyLoss:
    """The loss of a batch as a function of a checkpoint's tensors, by the equations.

    What has no gradient (the candidates, the weights of the alignment, the confidence's target) is
    kept from the first call, so that finite differences see the function that is differentiated.
    """

    config: Config
    head: Head
    batch: Batch
    loss: LossConfig
    alpha: float
    beta: float
    kept: dict[Any, Any] = field(default_factory=dict)

    def __call__(self, weights: Weights) -> float:
        w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        c = reference.flat(self.config)
        if "transfer_codes" in w:
            c["is_causal"] = True
        c.setdefault("first_slot", 0 if "confidence_head.proj.weight" in w else 1)
        batch = [np.array(x, np.float64 if x.dtype == mx.float32 else None) for x in self.batch]
        tokens, features, hidden, anchors, slot_weights, replaced = batch
        total, rejected = 0.0, 0.0
        for s, a in np.ndindex(*anchors.shape):
            if slot_weights[s, a].any():
                anchor, accepted = anchors[s, a], np.ones(2)
                rows = self.block(w, c, tokens[s], features[s, :anchor], bool(replaced[s, a]))
                for t in range(len(rows)):
                    if slot_weights[s, a, t]:
                        logits = self.head.head @ hidden[s, anchor + t]
                        p = softmax(reference.scale_logits(c, logits))
                        label = tokens[s, anchor + 1 + t]
                        loss = self.row(w, c, (s, a, t), rows[t], p, label)
                        total += slot_weights[s, a, t] * loss
                        accepted = accepted * self.accepted(w, c, (s, a, t), rows[t], p)
                        greedy = self.loss.length_greedy
                        rejected += 1 - greedy * accepted[0] - (1 - greedy) * accepted[1]
        share = self.loss.length_weight
        slots, length = total / slot_weights.sum(), rejected / (slot_weights > 0).sum()
        return (1 - share) * slots + share * length

    def accepted(
        self, w: Weights, c: Config, key: tuple, row: dict[str, Any], p: np.ndarray
    ) -> np.ndarray:
        """A slot's chances to be accepted if those before it are: greedily (the drafter's
        probability of the target's best token), and of a draft drawn at temperature 1."""
        q = softmax(self.proposed(w, c, row["base"], row.get("bias", 0.0)))
        if "refined" in row:
            order = np.argsort(-q, kind="stable")[: c["top_k"]]
            on = self.kept.setdefault(("candidates", key), order)
            q = np.zeros(len(p))
            q[on] = softmax(reference.scale_logits(c, self.head.head[on] @ row["refined"]))
        return np.array([q[p.argmax()], np.minimum(p, q).sum()])

    def block(
        self, w: Weights, c: Config, tokens: np.ndarray, features: np.ndarray, true: bool
    ) -> list[dict[str, Any]]:
        """What every proposal's loss needs: states, and after them what the method adds. The anchor
        is where the features end; true: its first layers see the true predecessors."""
        anchor = len(features)
        embedding = w.get("embed_tokens.weight", self.head.embedding)
        h = reference.embed_block(c, embedding, tokens[anchor])
        ctx = reference.context_rows(w, c, features)
        M = c["block_size"] - c["first_slot"]
        padded = np.concatenate([tokens, np.zeros(M, int)])
        before = padded[anchor : anchor + M]
        if "transfer_codes" not in w:
            for i in range(c["num_hidden_layers"]):
                h = reference.draft_layer(w, c, i, h, ctx)
            states = rms_norm(h[c["first_slot"] :], w["norm.weight"], 1e-6)
            markov = MarkovHead(w, c) if "markov_head.markov_w1.weight" in w else None
            rows: list[dict[str, Any]] = [{"base": x} for x in states]
            if markov is not None:
                path = [int(token) for token in before]
                everything = np.arange(len(w["markov_head.markov_w2.weight"]))
                for t, row in enumerate(rows):
                    row["bias"] = markov.bias(states[: t + 1], path[: t + 1], everything)
                    row["confidence"] = markov.confidence(states[t], path[t])
            return rows
        known = np.sqrt(w["transfer_codes"].shape[1]) * w["transfer_codes"][before]
        after = []
        for i in range(c["num_hidden_layers"]):
            u = reference.draft_layer(w, c, i, h, ctx)
            replaced = true and i < min(self.loss.replacement_layers, c["num_hidden_layers"] - 1)
            if "earlier.bias" in w:
                sent = known if replaced else direction(w, u[1:], i)
                before = np.concatenate([0 * known[:1], known[:1], sent[1 if replaced else 0 :]])
                u = np.concatenate([u[:1], inject_earlier(w, u[1:], i, before[:M])])
            z = direction(w, u[1:], i)
            previous = known if replaced else np.concatenate([known[:1], z[:-1]])
            written = inject(w, u[1:], i, previous) if self.loss.injection else u[1:]
            after.append(written)
            h = np.concatenate([u[:1], written])
        refined = inject(w, u[1:], i, known)
        norm = w["norm.weight"]
        return [
            {
                "base": rms_norm(after[-1][t], norm, 1e-6),
                "refined": rms_norm(refined[t], norm, 1e-6),
                "layers": [x[t] for x in after],
            }
            for t in range(M)
        ]

    def row(
        self, w: Weights, c: Config, key: tuple, row: dict[str, Any], p: np.ndarray, label: int
    ) -> float:
        logits = self.proposed(w, c, row["base"], row.get("bias", 0.0))
        total = self.mix(logits, p, label)
        q = softmax(logits)
        if "confidence" in row:
            wanted = self.kept.setdefault(("stands", key), 1 - np.abs(p - q).sum() / 2)
            chance = row["confidence"]
            total -= self.loss.confidence_weight * (
                wanted * np.log(chance) + (1 - wanted) * np.log(1 - chance)
            )
        if "refined" not in row:
            return total
        order = np.argsort(-logits, kind="stable")[: c["top_k"]]
        on = self.kept.setdefault(("candidates", key), order)
        mass = p[on].sum()
        scores = reference.scale_logits(c, self.head.head[on] @ row["refined"])
        refined = 0.0
        if self.loss.reference == "token":
            if label in on:
                refined -= self.alpha * np.log(softmax(scores)[list(on).index(label)])
        elif mass > self.loss.candidate_mass_threshold:
            refined -= self.alpha * (p[on] / mass * np.log(softmax(scores))).sum()
        if mass > self.loss.candidate_mass_threshold:
            refined += (1 - self.alpha) * np.abs(p[on] / mass - softmax(scores)).sum()
        if self.loss.refinement:
            total += self.loss.refined_weight * refined
        ce = self.kept.setdefault(("ce", key), -np.log(q[label]) if q[label] else 0.0)
        return total + self.beta * self.alignment(w, c, row, label, ce)

    def proposed(self, w: Weights, c: Config, states: np.ndarray, bias: Any = 0.0) -> np.ndarray:
        """Logits of the whole vocabulary: -inf of what the drafter can't propose."""
        ids = reference.draft_tokens(w, c, self.head)
        logits = np.full(len(self.head.head), -np.inf)
        head = w.get("lm_head.weight", self.head.head[ids])
        logits[ids] = reference.scale_logits(c, head @ states) + bias
        return logits

    def mix(self, logits: np.ndarray, p: np.ndarray, label: int) -> float:
        q, can = softmax(logits), np.isfinite(logits)  # what it can't propose costs no CE
        seen = np.eye(len(p))[label] if self.loss.reference == "token" else p
        ce = -(seen[can] * np.log(q[can])).sum()
        return self.alpha * ce + (1 - self.alpha) * np.abs(p - q).sum()

    def alignment(self, w: Weights, c: Config, row: dict[str, Any], label: int, ce: float) -> float:
        terms = []
        for i, h in enumerate(row["layers"]):
            if self.loss.alignment == "token":
                states = rms_norm(h, w["norm.weight"], 1e-6)
                q = softmax(self.proposed(w, c, states))
                terms.append(-np.log(q[label]) if q[label] else 0.0)
            else:
                f, code = w[f"injection.readouts.{i}.weight"] @ h, w["transfer_codes"][label]
                cosine = f @ code / np.linalg.norm(f) / np.linalg.norm(code)
                terms.append(ce * (1 - cosine))
        return float(np.mean(terms))


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def direction(w: Weights, u: np.ndarray, layer: int) -> np.ndarray:
    y = u @ w[f"injection.readouts.{layer}.weight"].T
    return np.sqrt(y.shape[-1]) * y / np.linalg.norm(y, axis=-1, keepdims=True)


def inject_earlier(w: Weights, u: np.ndarray, layer: int, before: np.ndarray) -> np.ndarray:
    names = ("receiver_gate", "predecessor_gate", "message")
    gates = zip(names, np.split(w["earlier.gates.weight"], 3), strict=True)
    own = {f"injection.{name}.weight": gate for name, gate in gates}
    own["injection.bias"] = w["earlier.bias"]
    own[f"injection.writes.{layer}.weight"] = w[f"earlier.writes.{layer}.weight"]
    own[f"injection.readouts.{layer}.weight"] = w[f"injection.readouts.{layer}.weight"]
    return inject(own, u, layer, before)


def inject(w: Weights, u: np.ndarray, layer: int, previous: np.ndarray) -> np.ndarray:
    receiver = direction(w, u, layer) @ w["injection.receiver_gate.weight"].T
    gate = previous @ w["injection.predecessor_gate.weight"].T
    opened = sigmoid(receiver + gate + w["injection.bias"])
    message = opened * (previous @ w["injection.message.weight"].T)
    rms = np.sqrt((u**2).mean(axis=-1, keepdims=True))
    return u + rms * (message @ w[f"injection.writes.{layer}.weight"].T)

"""DSpark: a Markov head over the parallel backbone, and a confidence head.

The heads are DeepSpec's: a block of B slots starts with the anchor, whose slot makes the first of B
proposals. Slot t scores token v after token u as U_t(v) + B_t(u, v). A head stronger than the
backbone prefers tokens that U_t ranks low, so slots are walked over a large pool.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.drafters.chain import POOL, AnyProposal, shared_pool
from dspine_mlx.drafters.config import DrafterConfig, flatten
from dspine_mlx.drafters.dflash import LARGE, TENSORS, DFlash
from dspine_mlx.drafters.markov_walk import MarkovProposal
from dspine_mlx.drafters.method import Config, Layout, Method, Shapes, same
from dspine_mlx.drafters.proposal import Proposal
from dspine_mlx.drafters.proposals import Proposals
from dspine_mlx.drafters.settings import is_speculators, read_flat, read_speculators
from dspine_mlx.drafters.top_k import rank, scale_scores
from dspine_mlx.errors import InputError
from dspine_mlx.metal.kernel import OFF, Kernels, Lookup
from dspine_mlx.metal.markov import markov_scores
from dspine_mlx.target.model import Target

POOLS = (64, 1024, POOL)  # that a probe or a calibration tries, and the whole vocabulary


@dataclass(frozen=True)
class DSparkConfig(DrafterConfig):
    """Markov and confidence heads (DeepSpec). The anchor's slot makes the first proposal."""

    first_slot: int = 0
    markov_rank: int = 0  # r; 0: no Markov head
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    confidence_temperatures: tuple[float, ...] = ()  # one per slot, divides the confidence's logit
    candidate_pool: int = POOL  # tokens that slots pick from in turn; 0: a table of top_k

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "DSparkConfig":
        """Also read `sample_from_anchor`, which some checkpoints state in place of first_slot."""
        flat = flatten(config)
        if isinstance(flat.get("sample_from_anchor"), bool):
            flat.setdefault("first_slot", int(not flat["sample_from_anchor"]))
        return super().from_dict(flat)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_rank and self.markov_head_type not in ("vanilla", "gated", "rnn"):
            raise InputError(
                f"markov_head_type is {self.markov_head_type!r}; it must be vanilla, gated or rnn"
            )
        mixed = self.enable_confidence_head and self.confidence_head_with_markov
        if mixed and not self.markov_rank:
            raise InputError("confidence_head_with_markov is true but markov_rank is 0")
        if len(self.confidence_temperatures) not in (0, self.num_proposals):
            raise InputError(
                f"confidence_temperatures has {len(self.confidence_temperatures)} values; "
                f"this drafter proposes {self.num_proposals} tokens"
            )
        if any(t <= 0 for t in self.confidence_temperatures):
            raise InputError("confidence_temperatures must be above 0")


class VanillaMarkov(nn.Module):
    """B_t(u, v) = w2[v] . w1[u]

    Only rows of either matrix are read, so both are embeddings.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Embedding(config.num_draft_tokens, config.markov_rank)

    def __call__(
        self, base: mx.array, previous: mx.array, successors: mx.array, states: mx.array
    ) -> mx.array:
        """The table [M, K, K]: base [M, K] plus the bias of each candidate after each predecessor.

        previous: [M, K, r], w1 of the predecessors; successors: [M, K, r], w2 of the candidates;
        states: [M, d] normalised.
        """
        mixed = self.mix(
            previous, mx.broadcast_to(states[:, None], (*base.shape, states.shape[-1]))
        )
        return base[:, None] + bias(mixed, successors)

    def mix(self, previous: mx.array, states: mx.array) -> mx.array:
        return previous

    def step(
        self, previous: mx.array, states: mx.array, memory: mx.array
    ) -> tuple[mx.array, mx.array]:
        """See `dspine_mlx.drafters.markov_walk.MarkovHead`."""
        return self.mix(previous, states), memory


class GatedMarkov(VanillaMarkov):
    """B_t(u, v) = w2[v] . (sigmoid(G [h_t; w1[u]] + g) * w1[u])"""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        rank = config.markov_rank
        self.gate_proj = nn.Linear(config.hidden_size + rank, rank)

    def mix(self, previous: mx.array, states: mx.array) -> mx.array:
        gate = mx.sigmoid(self.gate_proj(mx.concatenate([states, previous], axis=-1)))
        return gate * previous


class RNNMarkov(VanillaMarkov):
    """B_t(v) = w2[v] . tanh(o),  s_t = g s_{t-1} + (1 - g) tanh(c)

    with [g; c; o] = J [s_{t-1}; w1[u]; h_t] + j, a sigmoid on g, and s_0 = 0. The state depends on
    the whole path, so a table follows the greedy one: row i of slot t is exact for a path that is
    greedy up to slot t - 2 and has candidate i at t - 1.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        rank = config.markov_rank
        self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def __call__(
        self, base: mx.array, previous: mx.array, successors: mx.array, states: mx.array
    ) -> mx.array:
        M, K, rank = previous.shape
        state, visited, table = mx.zeros((rank,), previous.dtype), mx.array(0), []
        for t in range(M):
            shared = [mx.broadcast_to(x, (K, x.shape[-1])) for x in (state, states[t])]
            joint = self.joint_proj(mx.concatenate([shared[0], previous[t], shared[1]], axis=-1))
            gate, candidate, output = mx.split(joint, 3, axis=-1)
            gate = mx.sigmoid(gate)
            rows = base[t] + bias(mx.tanh(output), successors[t])
            state = (gate * state + (1 - gate) * mx.tanh(candidate))[visited]
            visited = mx.argmax(rows[visited])
            table.append(rows)
        return mx.stack(table)

    def step(
        self, previous: mx.array, states: mx.array, memory: mx.array
    ) -> tuple[mx.array, mx.array]:
        joint = self.joint_proj(mx.concatenate([memory, previous, states], axis=-1))
        gate, candidate, output = mx.split(joint, 3, axis=-1)
        gate = mx.sigmoid(gate)
        return mx.tanh(output), gate * memory + (1 - gate) * mx.tanh(candidate)


MARKOV_HEADS = {"vanilla": VanillaMarkov, "gated": GatedMarkov, "rnn": RNNMarkov}


def bias(mixed: mx.array, successors: mx.array) -> mx.array:
    return (mixed @ successors.swapaxes(-1, -2)).astype(mx.float32)


class ConfidenceHead(nn.Module):
    """c_t = sigmoid(w [h_t; w1[u]] + b), the chance that slot t is accepted if t - 1 is."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        token = config.markov_rank if config.confidence_head_with_markov else 0
        self.proj = nn.Linear(config.hidden_size + token, 1)

    def __call__(self, features: mx.array) -> mx.array:
        """Logits of c [...] from features [..., d + r] or [..., d]."""
        return self.proj(features)[..., 0].astype(mx.float32)


class DSpark(DFlash):
    config: DSparkConfig

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        if config.markov_rank:
            self.markov_head = MARKOV_HEADS[config.markov_head_type](config)
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(config)
        if config.num_draft_tokens < config.vocab_size:
            self.lm_head = nn.Linear(config.hidden_size, config.num_draft_tokens, bias=False)

    def proposal(
        self, anchor: mx.array, states: mx.array, logits: mx.array, kernels: Kernels = OFF
    ) -> AnyProposal:
        """See `DFlash.proposal`.

        Slot t scores v after u as U_t(v) + B_t(u, v): over a pool of `candidate_pool` tokens,
        walked slot by slot, or if that is 0 over the `top_k` best base candidates of both slots, as
        a table.
        """
        if "markov_head" not in self:
            return self.slotwise(logits, self.confidence(states))
        if self.config.candidate_pool:
            base = scale_scores(logits, self.config)
            pool = shared_pool(base, self.config.candidate_pool)
            vocabulary = self.d2t if "d2t" in self else None
            return MarkovProposal(
                self.markov_head, base, states, anchor, vocabulary, pool, self.confidence
            )
        return self.table(anchor, states, logits, kernels)

    def proposals(
        self, anchors: mx.array, states: mx.array, logits: mx.array, kernels: Kernels
    ) -> Proposals:
        """See `DFlash.proposals`. Each text has a pool or a table of its own."""
        if "markov_head" not in self:
            return Proposals(self.slotwise(logits, self.confidence_of_texts(states)))
        texts = zip(anchors, states, logits, strict=True)
        return Proposals([self.proposal(*text, kernels) for text in texts])

    def confidence_of_texts(self, states: mx.array) -> mx.array | None:
        """Chances [B, M] of the slots of several texts."""
        known = [self.confidence(own) for own in states]
        return mx.stack(known) if all(own is not None for own in known) else None

    def table(
        self, anchor: mx.array, states: mx.array, logits: mx.array, kernels: Kernels = OFF
    ) -> Proposal:
        """The table T_t[i, j] = U_t(v_j) + B_t(v_i, v_j), and every slot's confidence after each
        candidate of the one before."""
        ids, scores = rank(logits, self.config)
        candidates = self.tokens(ids)
        before = mx.broadcast_to(anchor.reshape(1, 1), (1, ids.shape[1])).astype(candidates.dtype)
        before = mx.concatenate([before, candidates[:-1]])
        table = self.markov_table(scores, before, ids, states, kernels)
        over = mx.broadcast_to(states[:, None], (*ids.shape, states.shape[-1]))
        confidence = self.confidence(over, self.markov_head.markov_w1(before))
        return Proposal(candidates, table[0, 0], table[1:], confidence)

    def markov_table(
        self,
        base: mx.array,
        before: mx.array,
        ids: mx.array,
        states: mx.array,
        kernels: Kernels = OFF,
    ) -> mx.array:
        """The Markov head's table [M, K, K] after predecessors `before` [M, K]. An unpacked vanilla
        head takes one launch where kernels run."""
        head = self.markov_head
        w1, w2 = head.markov_w1, head.markov_w2
        if type(head) is VanillaMarkov and "scales" not in w1 and "scales" not in w2:
            predecessors, successors = Lookup(before, w1.weight), Lookup(ids, w2.weight)
            return markov_scores(base, predecessors, successors, kernels)
        return head(base, w1(before), w2(ids), states)

    def confidence(self, features: mx.array, previous: mx.array | None = None) -> mx.array | None:
        """Chances [M, ...] of the slots, from states [M, ..., d] and, if the head reads them, w1
        [M, ..., r] of the tokens before; None without a head."""
        if "confidence_head" not in self:
            return None
        if previous is not None and self.config.confidence_head_with_markov:
            features = mx.concatenate([features, previous], axis=-1)
        logits = self.confidence_head(features)
        if self.config.confidence_temperatures:
            temperatures = mx.array(self.config.confidence_temperatures[: len(logits)])
            logits = logits / temperatures.reshape(-1, *[1] * (logits.ndim - 1))
        return mx.sigmoid(logits)


def heads_from_tensors(flat: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Infer rank and heads from tensors, where keys leave them open."""
    w1, confidence = (
        shapes.get(f"{name}.weight") for name in ("markov_head.markov_w1", "confidence_head.proj")
    )
    if flat.get("markov_rank") is None:
        flat["markov_rank"] = w1[-1] if w1 else 0
    if flat.get("enable_confidence_head") is None:
        flat["enable_confidence_head"] = confidence is not None
    if flat.get("confidence_head_with_markov") is None:
        flat["confidence_head_with_markov"] = bool(
            confidence and confidence[-1] != flat.get("hidden_size")
        )
    if not flat["enable_confidence_head"] or not flat["markov_rank"]:
        flat["confidence_head_with_markov"] = False
    return flat


def readings(config: DSparkConfig, target: Target) -> dict[str, dict[str, Any]]:
    """Offer other pools and a table: smaller ones are cheaper, and good enough if the head seldom
    promotes low-ranked tokens."""
    if not config.markov_rank:
        return {}
    V = config.num_draft_tokens
    sizes = {0: f"a table of each slot's {config.top_k} best"}
    sizes |= {n: f"a pool of {n}" for n in POOLS if n < V} | {V: "a pool of the whole vocabulary"}
    own = min(config.candidate_pool, V)
    return {name: {"candidate_pool": n} for n, name in sizes.items() if n != own}


def is_specforge(config: Config, names: Collection[str]) -> bool:
    return "dflash_config" in config or any("logit_head." in name for name in names)


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
NESTED_HEADS = {f"logit_head.{name}": path for name, path in HEADS.items()}
MARKS = ("markov_head.", "confidence_head.")

METHOD = Method(
    name="dspark",
    title="DSpark",
    config=DSparkConfig,
    network=DSpark,
    layouts=(
        Layout("DSpark, speculators", TENSORS | HEADS, read_speculators, is_speculators),
        Layout("DSpark, SpecForge", TENSORS | HEADS | NESTED_HEADS, read_flat, is_specforge),
        Layout("DSpark, DeepSpec", TENSORS | HEADS, read_flat),
    ),
    large=LARGE,
    architectures=(
        "DSparkDraftModel",
        "Qwen3DSparkModel",
        "Lfm2DSparkDraftModel",
        "DSparkSpeculator",
    ),
    speculators_model_type=("dspark",),
    projector_type=("dspark",),
    marks=MARKS,
    fill=heads_from_tensors,
    readings=readings,
    several_texts=True,
    reference="dspine_mlx.convert.reference:dspark_round",
    objective="dspine_mlx.train.objectives.dspark:OBJECTIVE",
)

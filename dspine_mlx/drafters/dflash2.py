"""DFlash2: short convolutions around every sub-layer, and a selector over the best tokens.

The checkpoints are z-lab's and incoai's; https://inco.ai/blog/dflash2/ states the equations. A slot
scores its K best tokens after the token before it, which gives a K x K table as in DSpine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dspine_mlx.drafters.config import DrafterConfig, flatten
from dspine_mlx.drafters.dflash import BACKBONE, LARGE, DFlash, DraftLayer
from dspine_mlx.drafters.method import Config, Layout, Method, Shapes, same
from dspine_mlx.drafters.proposal import Proposal
from dspine_mlx.drafters.proposals import Proposals, flat
from dspine_mlx.drafters.settings import is_speculators, read_flat, read_speculators
from dspine_mlx.drafters.top_k import rank
from dspine_mlx.errors import InputError
from dspine_mlx.metal.kernel import OFF, Kernels, Lookup
from dspine_mlx.metal.markov import markov_scores
from dspine_mlx.target.model import Target


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DrafterConfig):
    """Convolutions over `conv_kernel_size` slots in groups of channels, and the selector's rank."""

    conv_kernel_size: int  # C
    conv_group_size: int  # g: channels that share the slot-dependent part of a kernel
    selector_rank: int  # r
    selector_top_k: int  # K, in place of top_k
    selector_vocab_size: int | None = None  # only ids below this are proposed; None: all

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "DFlash2Config":
        flat = flatten(config)
        if flat.get("selector_top_k") is not None:
            flat["top_k"] = flat["selector_top_k"]
        return super().from_dict(flat)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be 1 or above")
        if self.hidden_size % self.conv_group_size:
            raise InputError(
                f"conv_group_size {self.conv_group_size} does not divide hidden_size "
                f"{self.hidden_size}"
            )
        if not 0 < self.num_selectable <= self.vocab_size:
            raise InputError(
                f"selector_vocab_size is {self.selector_vocab_size}; the vocabulary has "
                f"{self.vocab_size}"
            )
        if self.selector_top_k > self.num_selectable:
            raise InputError(
                f"selector_top_k is {self.selector_top_k}; there are only {self.num_selectable} "
                "tokens to select from"
            )
        if self.output_multiplier <= 0:  # applied after ranking
            raise InputError(f"output_multiplier is {self.output_multiplier}; it must be above 0")
        if self.num_draft_tokens < self.vocab_size:
            raise InputError(
                f"draft_vocab_size is {self.draft_vocab_size}; DFlash2 drafters propose from the "
                f"whole vocabulary of {self.vocab_size}"
            )

    @property
    def num_selectable(self) -> int:
        """Number of proposable tokens: the ids below this."""
        return self.vocab_size if self.selector_vocab_size is None else self.selector_vocab_size


class BlockConvolution(nn.Module):
    """Conv(u)_s = sum over taps t < C of (b_t + d_{s,t}) * u_{s-t}, with u = 0 before the block.

    There is a kernel on each side of a sub-layer. b is `base_kernel` [2, C, H] (side, tap,
    channel); d comes from the sub-layer's normalised input n_s by `kernel_projection`, one value
    for each of the H / g groups of neighbouring channels, on both sides from the same n_s.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__()
        d, taps = config.hidden_size, config.conv_kernel_size
        groups = d // config.conv_group_size
        self.base_kernel = mx.zeros((2, taps, d))
        self.base_kernel[:, 0] = 1  # leaves every slot as it is
        self.kernel_projection = nn.Linear(d, 2 * taps * groups, bias=False)

    def kernels(self, normed: mx.array) -> mx.array:
        """Both sides' kernels b + d of every slot [..., 2, C, H], from normalised rows [..., H]."""
        sides, taps, width = self.base_kernel.shape
        dynamic = self.kernel_projection(normed).reshape(*normed.shape[:-1], sides, taps, -1, 1)
        base = self.base_kernel.reshape(sides, taps, dynamic.shape[-2], -1)
        return (base + dynamic).reshape(*normed.shape[:-1], sides, taps, width)


def convolve(kernel: mx.array, rows: mx.array) -> mx.array:
    """Convolve a block's rows [..., B, H] with one side's kernels [..., B, C, H]."""
    out = kernel[..., 0, :] * rows
    for tap in range(1, min(kernel.shape[-2], rows.shape[-2])):
        earlier = [(0, 0)] * (rows.ndim - 2) + [(tap, 0), (0, 0)]
        out = out + kernel[..., tap, :] * mx.pad(rows[..., :-tap, :], earlier)
    return out


class DFlash2Layer(DraftLayer):
    """x + Conv(attention(Conv(norm(x)))), then the same around the MLP.

    Only the block's rows are convolved: context rows go to the keys and values as they are.
    """

    def __init__(self, config: DFlash2Config, layer: int):
        super().__init__(config, layer)
        self.attention_conv = BlockConvolution(config)
        self.mlp_conv = BlockConvolution(config)

    def around(
        self, attend: Callable[[mx.array], mx.array], x: mx.array, normed: mx.array
    ) -> mx.array:
        kernels = self.attention_conv.kernels(normed)
        attended = attend(convolve(kernels[..., 0, :, :], normed))
        h = x + convolve(kernels[..., 1, :, :], attended)
        normed = self.post_attention_layernorm(h)
        kernels = self.mlp_conv.kernels(normed)
        return h + convolve(
            kernels[..., 1, :, :], self.mlp(convolve(kernels[..., 0, :, :], normed))
        )


class CandidateSelector(nn.Module):
    """B_t(u, v) = < P[u] * W h_t, S[v] >, with codebooks P of predecessors and S of successors."""

    def __init__(self, config: DFlash2Config):
        super().__init__()
        self.predecessor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.successor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def after(self, previous: mx.array, states: mx.array) -> mx.array:
        """P[u] * W h_t in float32 [M, K, r], for tokens [M, K] before slots with states [M, d]."""
        slots = self.hidden_projection(states).astype(mx.float32)
        return self.predecessor_codebook(previous).astype(mx.float32) * slots[:, None]

    def successors(self, tokens: mx.array) -> Lookup:
        """Rows S[v] of tokens."""
        if "scales" not in self.successor_codebook:
            return Lookup(tokens, self.successor_codebook.weight)
        return lookup_all(self.successor_codebook(tokens))


def lookup_all(rows: mx.array) -> Lookup:
    """Rows [..., r] as a lookup that reads them in order."""
    indices = mx.arange(rows.size // rows.shape[-1], dtype=mx.uint32).reshape(rows.shape[:-1])
    return Lookup(indices, rows.reshape(-1, rows.shape[-1]))


class DFlash2(DFlash):
    config: DFlash2Config
    layer_class = DFlash2Layer

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def proposal(
        self, anchor: mx.array, states: mx.array, logits: mx.array, kernels: Kernels = OFF
    ) -> Proposal:
        """T_t[i, j] = U_t(v_j) + B_t(v_i, v_j), in float32. See `DFlash.proposal`."""
        anchors, states, logits = anchor.reshape(1), states[None], logits[None]
        return self.joint(anchors, states, logits, kernels).texts()[0]

    def proposals(
        self, anchors: mx.array, states: mx.array, logits: mx.array, kernels: Kernels
    ) -> Proposals:
        """See `DFlash.proposals`."""
        return Proposals(self.joint(anchors, states, logits, kernels))

    def joint(
        self, anchors: mx.array, states: mx.array, logits: mx.array, kernels: Kernels
    ) -> Proposal:
        """All texts' tables, of anchors [B], states [B, M, d] and logits [B, M, Vd]: a slot's
        scores depend on no other text, so all slots are one long block."""
        B, M, _ = logits.shape
        ids, base = rank(flat(logits)[:, : self.config.num_selectable], self.config)
        tokens = ids.reshape(B, M, -1)
        K = tokens.shape[-1]
        first = mx.broadcast_to(anchors[:, None, None], (B, 1, K)).astype(tokens.dtype)
        before = mx.concatenate([first, tokens[:, :-1]], axis=1)
        selector = self.candidate_selector
        after = lookup_all(selector.after(flat(before), flat(states)))
        table = markov_scores(base, after, selector.successors(ids), kernels)
        table = table.reshape(B, M, K, K)
        return Proposal(tokens, table[:, 0, 0], table[:, 1:])


# speculators' class defaults of what its config.json may leave out
SPECULATORS_DEFAULTS = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
    "sliding_window_non_causal": True,
}


def read_speculators_dflash2(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Read speculators' config (see `read_speculators`). Only the whole vocabulary is drafted
    from."""
    stated = {key: value for key, value in config.items() if value is not None}
    flat = read_speculators(SPECULATORS_DEFAULTS | stated, shapes)
    return flat | {"draft_vocab_size": stated.get("draft_vocab_size")}


def readings(config: DFlash2Config, target: Target) -> dict[str, dict[str, Any]]:
    """Other readings of a checkpoint. The authors' two implementations differ where the target
    scales its own embeddings, and a checkpoint does not say which one it was trained with. Raw rows
    are tried first."""
    if "gemma" not in type(target.model).__module__:
        return {}
    scale = config.input_embedding_scale * config.hidden_size**0.5
    return {"embeddings scaled as the target's own": {"input_embedding_scale": scale}}


CONVOLUTIONS = same(
    "layers.{i}.attention_conv.base_kernel",
    "layers.{i}.attention_conv.kernel_projection.weight",
    "layers.{i}.mlp_conv.base_kernel",
    "layers.{i}.mlp_conv.kernel_projection.weight",
)
SELECTOR = {
    "candidate_selector.predecessor_codebook": "candidate_selector.predecessor_codebook.weight",
    "candidate_selector.successor_codebook": "candidate_selector.successor_codebook.weight",
} | same(
    "candidate_selector.hidden_projection.weight",
    "candidate_selector.predecessor_codebook.weight",  # in copies that others have converted
    "candidate_selector.successor_codebook.weight",
)
NAMES = BACKBONE | CONVOLUTIONS | SELECTOR

METHOD = Method(
    name="dflash2",
    title="DFlash2",
    config=DFlash2Config,
    network=DFlash2,
    layouts=(
        Layout("DFlash2, speculators", NAMES, read_speculators_dflash2, is_speculators),
        Layout("DFlash2, z-lab", NAMES, read_flat),
    ),
    large=LARGE,
    architectures=(
        "DFlash2DraftModel",
        "DFlash2BeamDraftModel",
        "Qwen3DFlash2DraftModel",
        "DFlash2Qwen3ForCausalLM",
    ),
    speculators_model_type=("dflash2",),
    projector_type=("dflash2",),
    marks=("candidate_selector.", "attention_conv.", "mlp_conv."),
    required="candidate_selector.",
    readings=readings,
    several_texts=True,
    reference="dspine_mlx.convert.reference_dflash2:dflash2_round",
    objective="dspine_mlx.train.objectives.dflash2:OBJECTIVE",
)

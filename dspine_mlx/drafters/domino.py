"""Domino: a recurrent state of the drafted prefix corrects the backbone's logits
(arXiv:2605.29707).

The state needs the whole path, so there is no table of pairs: slots are scored one by one, over a
pool of tokens that the block shares.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from dspine_mlx.batch.draft_rows import DraftRows
from dspine_mlx.drafters.chain import ChainProposal, shared_pool
from dspine_mlx.drafters.config import DrafterConfig, flatten
from dspine_mlx.drafters.dflash import BACKBONE, LARGE, DFlash
from dspine_mlx.drafters.method import Config, Layout, Method, Shapes, same
from dspine_mlx.drafters.proposals import Proposals
from dspine_mlx.drafters.settings import read_flat, section
from dspine_mlx.drafters.top_k import scale_scores
from dspine_mlx.errors import InputError
from dspine_mlx.metal.kernel import OFF, Kernels
from dspine_mlx.target.model import Target


@dataclass(frozen=True)
class DominoConfig(DrafterConfig):
    """A block of B slots makes B - 1 proposals, from the anchor's slot on with `shift_label`, else
    from the first mask's."""

    emb_dim: int = 256  # E
    gru_hidden_dim: int = 1024  # F
    pure_draft_prefix_len: int = 0  # p: the first p proposals are the backbone's own
    shift_label: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_slot", 0 if self.shift_label else 1)
        super().__post_init__()
        for name in ("emb_dim", "gru_hidden_dim"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be 1 or above")
        if self.block_size < 2:
            raise InputError(f"block_size is {self.block_size}; it must be 2 or above")
        if self.num_draft_tokens < self.vocab_size:
            raise InputError(
                f"draft_vocab_size is {self.draft_vocab_size}; Domino drafters propose from the "
                f"whole vocabulary of {self.vocab_size}"
            )

    @property
    def num_proposals(self) -> int:
        return self.block_size - 1


class PrefixGRU(nn.Module):
    """s' = (1 - z) n + z s,  r, z = sigmoid(W_i e + W_h s),  n = tanh(W_in e + r * (W_hn s))

    e: the embedding [..., H] of the newest token; s [..., F] starts at 0. The weights stack the
    rows of r, z and n, and there are no biases.
    """

    def __init__(self, config: DominoConfig):
        super().__init__()
        self.size = size = config.gru_hidden_dim
        self.weight_ih_l0 = mx.zeros((3 * size, config.hidden_size))
        self.weight_hh_l0 = mx.zeros((3 * size, size))

    def __call__(self, embedded: mx.array, state: mx.array) -> mx.array:
        """The next state."""
        return gru_step(embedded @ self.weight_ih_l0.T, state @ self.weight_hh_l0.T, state)


@mx.compile
def gru_step(inputs: mx.array, recurrent: mx.array, state: mx.array) -> mx.array:
    """inputs = W_i e and recurrent = W_h s, each [..., 3F]."""
    (r, z, n), (hr, hz, hn) = mx.split(inputs, 3, axis=-1), mx.split(recurrent, 3, axis=-1)
    z = mx.sigmoid(z + hz)
    return (1 - z) * mx.tanh(n + mx.sigmoid(r + hr) * hn) + z * state


class DominoProposal(ChainProposal):
    """logits_k = U_k + W_2 silu(W_1 [h_k; s_{k-1}]), where s_{k-1} is the state after the anchor
    and k - 1 proposals; of the first p proposals logits_k = U_k."""

    def __init__(self, network: "Domino", states: mx.array, anchor: mx.array, target: Target):
        config = network.config
        base = scale_scores(target.head(states)[:, : config.vocab_size], config)
        pool = shared_pool(base)
        hidden, _, out = network.embed_proj
        if pool is None:
            self.base, self.rows = base, out.weight  # U [M, P], W_2 [P, E]
            pool = mx.arange(config.vocab_size, dtype=mx.uint32)
        else:
            self.base, self.rows = base[:, pool], out.weight[pool]
        super().__init__(len(states), pool)
        from_states, self.from_prefix = mx.split(hidden.weight, [config.hidden_size], axis=1)
        self.mixed = states @ from_states.T  # [M, E]
        self.prefix, self.gru = config.pure_draft_prefix_len, network.prefix_gru
        self.anchor, self.embed = anchor, target.embed

    def start(self, paths: int) -> mx.array:
        """s [N, F] after the anchor."""
        zero = mx.zeros((paths, self.gru.size), self.mixed.dtype)
        return self.gru(self.embed(mx.broadcast_to(self.anchor.reshape(1), (paths,))), zero)

    def scores(self, slot: int, state: mx.array) -> tuple[mx.array, mx.array]:
        base = self.base[slot]
        if slot < self.prefix:
            return mx.broadcast_to(base, (len(state), base.size)), state
        mixed = nn.silu(self.mixed[slot] + state @ self.from_prefix.T)
        return base + (mixed @ self.rows.T).astype(mx.float32), state

    def follow(self, state: mx.array, picks: mx.array) -> mx.array:
        return self.gru(self.embed(self.tokens[picks]), state)


class Domino(DFlash):
    config: DominoConfig

    def __init__(self, config: DominoConfig):
        super().__init__(config)
        self.prefix_gru = PrefixGRU(config)
        width, E = config.hidden_size + config.gru_hidden_dim, config.emb_dim
        self.embed_proj = [
            nn.Linear(width, E, bias=False),
            nn.SiLU(),
            nn.Linear(E, config.vocab_size, bias=False),
        ]

    def propose(
        self,
        anchor: int | mx.array,
        features: mx.array,
        cache: list[KVCache],
        target: Target,
        kernels: Kernels = OFF,
    ) -> DominoProposal:
        """Propose M tokens after the anchor. See `Drafter.propose`."""
        anchor = mx.array(anchor)
        states = self.backbone(anchor, features, cache, target)[: self.config.num_proposals]
        return DominoProposal(self, states, anchor, target)

    def propose_texts(
        self,
        anchors: mx.array,
        features: mx.array,
        cache: list[DraftRows],
        slots: int | None,
        target: Target,
        kernels: Kernels = OFF,
    ) -> Proposals:
        """See `Drafter.propose_texts`."""
        states = self.backbone(anchors[:, None], features, cache, target, slots)
        texts = zip(states[:, : slots or self.config.num_proposals], anchors, strict=True)
        return Proposals([DominoProposal(self, own, anchor, target) for own, anchor in texts])


def read_domino(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Read as `read_flat` does. Some configs state emb_dim twice."""
    stated, nested = config.get("emb_dim"), section(config, "dflash_config").get("emb_dim")
    if stated is not None and nested is not None and stated != nested:
        raise InputError(
            f"emb_dim is {stated!r} in config.json but {nested!r} in its dflash_config; they must "
            "agree"
        )
    return read_flat(config, shapes)


def remarks(config: Config) -> tuple[str, ...]:
    if OURS in config or "shift_label" in flatten(config):
        return ()
    return ("shift_label is absent: taken for false, so that the first mask's slot proposes first",)


OURS = "dspine_mlx"  # the section of a converted config.json, whose fields are all resolved
HEAD = same(
    "prefix_gru.weight_ih_l0",
    "prefix_gru.weight_hh_l0",
    "embed_proj.{i}.weight",  # 0: W_1, 2: W_2
)
NESTED_HEAD = {f"logit_head.{name}": path for name, path in HEAD.items()}

METHOD = Method(
    name="domino",
    title="Domino",
    config=DominoConfig,
    network=Domino,
    layouts=(Layout("Domino, SpecForge", BACKBONE | HEAD | NESTED_HEAD, read_domino),),
    large=LARGE,
    architectures=("DominoDraftModel",),
    projector_type=("domino",),
    marks=("prefix_gru.", "embed_proj."),
    required="prefix_gru.",
    remarks=remarks,
    several_texts=True,
    reference="dspine_mlx.convert.reference_domino:domino_round",
    objective="dspine_mlx.train.objectives.domino:OBJECTIVE",
)

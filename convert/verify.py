"""Does a converted folder equal its source? One round in MLX against NumPy on the source."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dspine_mlx.checkpoints.files import load_tensors
from dspine_mlx.checkpoints.open import Checkpoint, open_checkpoint
from dspine_mlx.convert.reference import Head
from dspine_mlx.drafters.chain import AnyProposal, ChainProposal
from dspine_mlx.drafters.dflash import OWN_EMBEDDINGS
from dspine_mlx.drafters.transfer_space import CODES, SPACE
from dspine_mlx.errors import InputError
from dspine_mlx.load import assemble_drafter
from dspine_mlx.metal.kernel import Lookup
from dspine_mlx.target.model import Target

TOKENS = 2048  # tokens of the stand-in target with rows; all others have zeros
CONTEXT = 24  # positions before the anchor
EXACT = 1e-4  # of the largest score: rounding in float32 stays below


class Verification(NamedTuple):
    difference: float  # the largest one between scores of the two rounds
    scale: float  # the largest score
    exact: bool  # whether nothing was packed or cast, so that only rounding may differ

    @property
    def passed(self) -> bool:
        finite = np.isfinite([self.difference, self.scale]).all()
        return bool(finite) and (not self.exact or self.difference <= EXACT * self.scale)


class SparseMatrix:
    """A matrix [V, d] with few rows that are not zero."""

    def __init__(self, where: np.ndarray, rows: np.ndarray):
        self.where, self.rows = where, rows

    def __len__(self) -> int:
        return len(self.where)

    def __getitem__(self, tokens: slice | list[int] | np.ndarray) -> np.ndarray:
        return self.rows[self.where[tokens]]


class RowsModule(nn.Module):
    """A matrix in the roles of embedding and head."""

    def __init__(self, table: SparseMatrix):
        super().__init__()
        self.weight, self._where = mx.array(table.rows), mx.array(table.where)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.weight[self._where[tokens]]

    def as_linear(self, states: mx.array) -> mx.array:
        return (states @ self.weight.T)[..., self._where]


class SparseTarget(Target):
    """A float32 target without layers; its embedding and head have rows for some tokens only."""

    def __init__(self, V: int, d: int, mask: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        tokens = np.unique(np.append(rng.choice(V, min(V, TOKENS), replace=False), mask))
        where = np.full(V, len(tokens))  # the last row is the zero one
        where[tokens] = np.arange(len(tokens))
        rows = rng.normal(size=(2, len(tokens) + 1, d)).astype(np.float32)
        rows[:, -1] = 0
        rows[1] /= d**0.5
        self.anchor = int(tokens[tokens != mask][0])
        embedding, head = SparseMatrix(where, rows[0]), SparseMatrix(where, rows[1])
        self.numpy = Head(embedding, head)
        self.embed, self.lm_head = RowsModule(embedding), RowsModule(head)
        self.layers, self.tied, self.dtype = [], True, mx.float32
        self.vocab_size, self.hidden_size = V, d

    def head_rows(self, tokens: mx.array) -> mx.array:
        return self.lm_head(tokens)

    def head_lookup(self, tokens: mx.array) -> Lookup:
        return Lookup(self.lm_head._where[tokens], self.lm_head.weight)

    def with_head_rows(self, tokens: mx.array) -> "SparseTarget":
        other, other.lm_head = copy(self), copy(self.lm_head)
        other.lm_head._where = self.lm_head._where[tokens]
        return other


class Source(Mapping[str, np.ndarray]):
    """A checkpoint's tensors in NumPy, each read on demand."""

    def __init__(self, checkpoint: Checkpoint, without: set[str]):
        self.tensors = {n: t for n, t in checkpoint.tensors.items() if n not in without}

    def __getitem__(self, name: str) -> np.ndarray:
        value = load_tensors({name: self.tensors[name]})[name]
        wide = mx.issubdtype(value.dtype, mx.floating)
        return np.array(value.astype(mx.float32) if wide else value)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def verify(source: Checkpoint, converted: Path) -> Verification:
    """Propose one block with the converted drafter in float32, and score its candidates in float64
    from the source's own tensors, by the method's own reference."""
    if source.method.reference is None:
        raise InputError(f"{source.method.title} has no round in float64 to verify with")
    ours = open_checkpoint(converted)
    if SPACE[0] in ours.sources:
        raise InputError(
            "a folder that rebuilds its codes from a head can't be verified without it"
        )
    config = ours.config
    target = SparseTarget(config.vocab_size, config.hidden_size, config.mask_token_id)
    drafter = assemble_drafter(ours, target)
    size = drafter.network.feature_size
    features = np.random.default_rng(1).normal(size=(CONTEXT, size)).astype(np.float32)
    rows = mx.array(features)[None]
    proposal = drafter.propose(target.anchor, rows, drafter.make_cache())
    dropped = {
        name
        for path in OWN_EMBEDDINGS
        if path not in ours.sources
        for name in source.sources.get(path, ())
    }
    weights: dict[str, np.ndarray] | Source = Source(source, dropped)
    if CODES in ours.sources and CODES not in source.sources:
        weights = {**weights, "transfer_codes": np.array(ours.arrays([CODES])[CODES])}
    given = (weights, source.raw, target.numpy, features, target.anchor)
    pairs = differences(proposal, partial(resolve_name(source.method.reference), *given))
    difference = max(float(np.abs(np.array(a) - b).max(initial=0)) for a, b in pairs)
    scale = float(np.abs(pairs[-1][1]).max(initial=1))
    return Verification(difference, scale, stored_as(source, ours))


def differences(
    proposal: AnyProposal, reference: Callable[..., Any]
) -> list[tuple[mx.array, np.ndarray]]:
    """Compare a proposal's arrays with the reference's, the scores last: a table as a whole, a
    chain along its greedy path."""
    if isinstance(proposal, ChainProposal):
        ((path, _),) = proposal.paths([mx.zeros(proposal.candidates.shape)], 1.0)
        tokens = proposal.tokens
        wanted = reference(path=tokens[path].tolist())
        pairs = [(proposal.scores_on(path), wanted.scores[:, np.array(tokens)])]
        confidence = proposal.confidence_on(path)
    else:
        proposal = proposal.ranked()
        wanted = reference(candidates=np.array(proposal.candidates))
        pairs = [(proposal.first, wanted.first), (proposal.transitions, wanted.transitions)]
        confidence = proposal.confidence
    if confidence is not None and wanted.confidence is not None:
        pairs.insert(0, (confidence, wanted.confidence))
    return pairs


def stored_as(source: Checkpoint, ours: Checkpoint) -> bool:
    """Whether every parameter kept its dtype and none was packed."""
    return "quantization" not in ours.raw and all(
        source.tensors[names[0]].dtype == ours.tensors[path].dtype
        for path, names in source.sources.items()
        if path in ours.tensors and path != "d2t"
    )

"""The transfer space of DSpine (arXiv:2609.36173): codes of tokens from the target's LM head.

With w_v the unit row of token v and mu their mean, the scatter sum_v (w_v - mu)(w_v - mu)^T
has eigenvectors Q [d, r] for its r largest eigenvalues L, and

    c_v = (w_v - mu) Q L^-1/2, scaled to unit length

Products run in float32 over chunks of the vocabulary, sums in float64, all in NumPy, whose BLAS is
fast everywhere. Eigenvalues ascend, as in `numpy.linalg.eigh`.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dspine_mlx.errors import InputError
from dspine_mlx.target.model import Target

# A converted folder holds these in place of C: mu, Q L^-1/2, and a few ids with their codes.
SPACE = tuple(f"transfer_space.{name}" for name in ("mean", "projection", "sample", "sample_codes"))
CODES = "transfer_codes.weight"  # C
SAMPLES = 8
TOLERANCE = 0.01  # of a code's entries: bfloat16 rounding of unit rows stays below

CHUNK = 4096  # rows of the head in float32 at a time
SMALLEST = 1e-6  # of the largest eigenvalue: float32 products leave noise below it


@dataclass(frozen=True)
class TransferSpace:
    mean: np.ndarray  # mu [d]
    directions: np.ndarray  # Q [d, r]
    values: np.ndarray  # L [r], ascending

    def codes(self, head: mx.array, chunk: int = CHUNK) -> mx.array:
        """C [V, r] float32 of a head [V, d]: unit rows."""
        scale = (self.directions / np.sqrt(self.values)).astype(np.float32)
        mean, out = self.mean.astype(np.float32), np.empty((head.shape[0], scale.shape[1]), "f4")
        for start in range(0, len(out), chunk):
            rows = (unit_rows(head[start : start + chunk]) - mean) @ scale
            out[start : start + chunk] = normalise(rows)
        return mx.array(out)


def transfer_codes(lm_head: mx.array, rank: int) -> tuple[mx.array, mx.array]:
    """C [V, r] and the projection Q [d, r], both float32, of an unquantised head [V, d].

    Signs of eigenvectors are arbitrary; here the entry of largest magnitude is positive, so the
    same head gives the same codes. A checkpoint's own C keeps its own signs: never replace it.
    """
    space = transfer_space(lm_head, rank)
    return space.codes(lm_head), mx.array(space.directions.astype(np.float32))


def transfer_space(lm_head: mx.array, rank: int, chunk: int = CHUNK) -> TransferSpace:
    if lm_head.ndim != 2 or not mx.issubdtype(lm_head.dtype, mx.floating):
        raise InputError(
            f"the LM head is {list(lm_head.shape)} in {lm_head.dtype}; the transfer space needs "
            "its unquantised matrix [V, d]"
        )
    V, d = lm_head.shape
    if not 0 < rank <= min(d, V - 1):
        raise InputError(f"rank {rank} must be from 1 to {min(d, V - 1)}, as the head is {V} x {d}")
    total, scatter = np.zeros(d), np.zeros((d, d))
    for start in range(0, V, chunk):
        rows = unit_rows(lm_head[start : start + chunk])
        total += rows.sum(axis=0, dtype=np.float64)
        scatter += rows.T @ rows
    mean = total / V
    scatter -= V * np.outer(mean, mean)
    values, vectors = np.linalg.eigh(scatter)
    usable = int((values > SMALLEST * values[-1]).sum())
    if not np.isfinite(values).all() or usable < rank:
        raise InputError(f"the LM head spans {usable} directions; rank {rank} needs as many")
    return TransferSpace(mean, positive(vectors[:, -rank:]), values[-rank:])


def stored_space(head: mx.array, own: mx.array | None, rank: int) -> dict[str, mx.array]:
    """The parameters of `SPACE`, with the signs of a checkpoint's own C if it has one.

    `InputError` when C is not the head's up to signs: then C itself must be stored.
    """
    space = transfer_space(head, rank)
    codes = np.array(space.codes(head))
    scale = space.directions / np.sqrt(space.values)
    if own is not None:
        stored = np.array(own.astype(mx.float32))
        signs = np.sign((stored * codes).sum(axis=0, dtype=np.float64))
        codes, scale = codes * signs.astype(np.float32), scale * signs
        off = float(np.abs(codes - stored).max())
        if off > TOLERANCE:
            raise InputError(
                f"the checkpoint's codes differ by {off:.2g} from those of this target's head; "
                "keep them (without --codes-from-head)"
            )
    sample = np.linspace(0, len(codes) - 1, SAMPLES).astype(np.uint32)
    values = (space.mean, scale, sample, codes[sample])
    return {
        name: mx.array(value if value.dtype == np.uint32 else value.astype(np.float32))
        for name, value in zip(SPACE, values, strict=True)
    }


def space_shapes(d: int, r: int) -> dict[str, tuple[int, ...]]:
    return dict(zip(SPACE, ((d,), (d, r), (SAMPLES,), (SAMPLES, r)), strict=True))


def rebuilt_codes(stored: Mapping[str, mx.array], target: Target) -> mx.array:
    """C from the parameters of `SPACE` and the target's head, checked against the stored sample."""
    mean, projection, sample, wanted = (np.array(stored[name]) for name in SPACE)
    codes = TransferSpace(mean, projection, np.ones(projection.shape[1])).codes(head_matrix(target))
    off = float(np.abs(np.array(codes[mx.array(sample)]) - wanted).max())
    if not off <= TOLERANCE:
        raise InputError(
            f"the codes rebuilt from this target's LM head differ by {off:.2g} from the stored "
            "sample; the drafter was converted for another target"
        )
    return codes


def positive(vectors: np.ndarray) -> np.ndarray:
    """Columns with signs such that the entry of largest magnitude is positive."""
    largest = np.abs(vectors).argmax(axis=0)
    return vectors * np.sign(vectors[largest, np.arange(vectors.shape[1])])


def unit_rows(rows: mx.array) -> np.ndarray:
    return normalise(np.array(rows.astype(mx.float32)))


def normalise(rows: np.ndarray) -> np.ndarray:
    """Rows of unit length, in place; zero rows stay."""
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return rows


def head_matrix(target: Target, dequantize: bool = False) -> mx.array:
    """The target's LM head [V, d]; a quantised one only on request, with a warning."""
    if "scales" not in target.lm_head:
        return target.lm_head.weight
    if not dequantize:
        raise InputError(
            "the target's LM head is quantised, and the small directions of its transfer space "
            "would be those of the rounding; give the unquantised target, or --dequantize-head"
        )
    warnings.warn("transfer codes of a dequantised head differ from the original's", stacklevel=2)
    return target.head_rows(mx.arange(target.vocab_size))

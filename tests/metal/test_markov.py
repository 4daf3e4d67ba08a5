"""The kernel of DSpark's table against float64, and within a drafter."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.metal.kernel import Lookup
from dspine_mlx.metal.markov import MARKOV_SCORES, markov_scores
from tests.support.metal_device import DTYPES, launch, needs_device, needs_emulator, normal, wide

pytestmark = pytest.mark.slow

Inputs = tuple[mx.array, Lookup, Lookup]


def inputs(M: int, K: int, rank: int, dtype: mx.Dtype) -> Inputs:
    before, after = (
        Lookup(mx.random.randint(0, V, (M, K)).astype(mx.uint32), normal((V, rank), dtype))
        for V in (50, 40)
    )
    return normal((M, K), scale=4.0), before, after


def exact(args: Inputs) -> np.ndarray:
    before, after = (wide(x.weight)[np.array(x.rows)] for x in args[1:])
    return wide(args[0])[:, None] + np.einsum("tir,tjr->tij", before, after)


def assert_exact(args: Inputs, check: bool = True) -> None:
    """Sums are float32 whatever the weights' dtype."""
    (scores,), wanted = launch(MARKOV_SCORES, *args, check=check), exact(args)
    np.testing.assert_allclose(wide(scores), wanted, atol=1e-5 * max(1, np.abs(wanted).max()))


@needs_device
@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 31),
    st.sampled_from([1, 7, 16, 32]),
    st.integers(1, 100),
    st.sampled_from(DTYPES),
    st.integers(0, 2**31),
)
def test_scores_of_any_size(M: int, K: int, rank: int, dtype: mx.Dtype, seed: int) -> None:
    mx.random.seed(seed)
    assert_exact(inputs(M, K, rank, dtype))


@needs_device
def test_at_the_sizes_of_an_8b_target() -> None:
    assert_exact(inputs(7, 16, 256, mx.bfloat16))


@needs_emulator
def test_every_order_of_threads_gives_the_same_bits() -> None:
    args = inputs(3, 16, 70, mx.float32)
    forward, *others = [launch(MARKOV_SCORES, *args, order=order)[0] for order in range(3)]
    assert all(mx.array_equal(forward, other).item() for other in others)


@pytest.mark.parametrize("K", [1, 16])
def test_the_plain_path_is_the_definition(K: int) -> None:
    args = inputs(5, K, 24, mx.float32)
    np.testing.assert_allclose(wide(markov_scores(*args)), exact(args), atol=1e-5)

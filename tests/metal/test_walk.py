"""The selection walk's kernel: the plain walk's very path, ties included, and its probs."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dspine_mlx.metal.walk import WALK, walk
from tests.support.metal_device import launch, needs_device, needs_emulator, normal, wide

pytestmark = pytest.mark.slow


def serial(first: np.ndarray, transitions: np.ndarray, noise: np.ndarray) -> list[int]:
    """Slot by slot; np.argmax, too, takes the first maximum."""
    path = [int(np.argmax(first + noise[0]))]
    for table, g in zip(transitions, noise[1:], strict=True):
        path.append(int(np.argmax(table[path[-1]] + g)))
    return path


def exact_probs(
    first: np.ndarray, transitions: np.ndarray, path: list[int], scale: float
) -> np.ndarray:
    rows = np.stack([first, *(table[i] for table, i in zip(transitions, path, strict=False))])
    e = np.exp((rows - rows.max(axis=1, keepdims=True)) * scale)
    return e / e.sum(axis=1, keepdims=True)


@needs_device
@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 31),
    st.integers(1, 32),
    st.booleans(),
    st.booleans(),
    st.floats(0.1, 5.0),
    st.integers(0, 2**31),
)
def test_the_path_is_the_serial_one(
    M: int, K: int, ties: bool, sampled: bool, scale: float, seed: int
) -> None:
    mx.random.seed(seed)
    first, transitions = normal((K,), scale=3.0), normal((M - 1, K, K), scale=3.0)
    if ties:
        first, transitions = mx.round(first), mx.round(transitions)
    noise = mx.random.gumbel((M, K)) if sampled else mx.zeros((M, K))
    path, probs = launch(WALK, first, transitions, noise, scale)
    wanted = serial(*(np.array(x) for x in (first, transitions, noise)))
    assert path.tolist() == wanted
    assert path.tolist() == walk(first, transitions, noise, scale)[0].tolist()
    exact = exact_probs(wide(first), wide(transitions), wanted, scale)
    np.testing.assert_allclose(wide(probs), exact, atol=1e-6)


@needs_device
def test_the_first_maximum_wins() -> None:
    """As mx.argmax has it: all equal, equal to the last, and rows of -inf but one."""
    first = mx.array([1.0, 2.0, 2.0])
    transitions = mx.stack(
        [
            mx.zeros((3, 3)),
            mx.array([[0.0, 5.0, 5.0], [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]),
            mx.array([[0.0, 1.0, 1.0]] * 3),
            mx.full((3, 3), -mx.inf).at[:, 2].maximum(0.0),
        ]
    )
    path, probs = launch(WALK, first, transitions, mx.zeros((5, 3)), 1.0)
    assert path.tolist() == [1, 0, 1, 1, 2]
    assert probs[4].tolist() == [0.0, 0.0, 1.0]


@needs_device
@settings(max_examples=20, deadline=None)
@given(st.integers(2, 31), st.integers(1, 32), st.integers(1, 9), st.integers(0, 2**31))
def test_texts_walk_in_one_launch(M: int, K: int, texts: int, seed: int) -> None:
    """Each with its own scale: the serial path, and the bits of a launch of its own."""
    mx.random.seed(seed)
    first, table = normal((texts, K), scale=3.0), normal((texts, M - 1, K, K), scale=3.0)
    noise, scale = mx.random.gumbel((texts, M, K)), mx.random.uniform(0.1, 5.0, (texts,))
    path, probs = launch(WALK, first, table, noise, scale)
    plain = walk(first, table, noise, scale)
    for i, own in enumerate(zip(first, table, noise, scale.tolist(), strict=True)):
        wanted = serial(*(np.array(x) for x in own[:3]))
        assert path[i].tolist() == plain[0][i].tolist() == wanted
        exact = exact_probs(wide(own[0]), wide(own[1]), wanted, own[3])
        np.testing.assert_allclose(wide(probs[i]), exact, atol=1e-6)
        np.testing.assert_allclose(wide(plain[1][i]), exact, atol=1e-6)
        assert mx.array_equal(launch(WALK, *own, check=False)[1], probs[i]).item()


@needs_emulator
def test_texts_walk_alike_in_every_order_of_threads() -> None:
    args = normal((3, 5)), normal((3, 6, 5, 5)), normal((3, 7, 5)), mx.array([0.5, 1.0, 2.0])
    forward, *others = [launch(WALK, *args, order=order) for order in range(3)]
    for other in others:
        assert all(mx.array_equal(a, b).item() for a, b in zip(forward, other, strict=True))


@needs_device
def test_inputs_may_be_broadcast() -> None:
    """DFlash's table has one row per slot, and greedy noise is a broadcast zero."""
    rows = normal((6, 4))
    table = mx.broadcast_to(rows[1:, None], (5, 4, 4))
    noise = mx.broadcast_to(mx.array(0.0), (6, 4))
    path, _ = launch(WALK, rows[0], table, noise, 1.0)
    assert path.tolist() == mx.argmax(rows, axis=-1).tolist()


@needs_device
@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_paths_follow_the_distribution_of_the_rows(temperature: float) -> None:
    """Walks of 31 slots over one table are a Markov chain: chi-square of its transition counts. A
    wrong temperature must fail the same test."""
    M, table, scale = 31, normal((3, 3)), 1 / temperature
    transitions, counts = mx.broadcast_to(table, (M - 1, 3, 3)), np.zeros((3, 3))
    for noise in mx.random.gumbel((400, M, 3)) * temperature:
        path, probs = launch(WALK, table[0], transitions, noise, scale, check=False)
        np.add.at(counts, (path.tolist()[:-1], path.tolist()[1:]), 1)

    def p_value(scale: float) -> float:
        rows = np.stack(
            [exact_probs(row, np.empty((0, 3, 3)), [], scale)[0] for row in wide(table)]
        )
        expected = counts.sum(axis=1, keepdims=True) * rows
        return stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), df=6)

    assert p_value(scale) > 0.01
    assert p_value(scale * 1.25) < 1e-6


@needs_emulator
def test_every_order_of_threads_gives_the_same_bits() -> None:
    args = (normal((7,)), normal((5, 7, 7)), mx.random.gumbel((6, 7)), 0.7)
    forward, *others = [launch(WALK, *args, order=order) for order in range(3)]
    for other in others:
        for a, b in zip(forward, other, strict=True):
            assert mx.array_equal(a, b).item()


def test_sizes_that_the_kernel_does_not_serve() -> None:
    def limit(M: int, K: int, dtype: mx.Dtype = mx.float32) -> str | None:
        return WALK.limits(mx.zeros((K,)), mx.zeros((M - 1, K, K)), mx.zeros((M, K), dtype), 1.0)

    assert limit(31, 32) is None
    assert limit(2, 1) is None
    assert limit(1, 4) is not None
    assert limit(32, 4) is not None
    assert limit(4, 33) is not None
    assert limit(4, 4, mx.float16) == "scores and noise are not all float32"

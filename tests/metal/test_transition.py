"""The transition table's kernels against float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.metal.kernel import Lookup, signature, widened
from dspine_mlx.metal.transition import (
    CANDIDATE_MESSAGES,
    TRANSITION_SCORES,
    candidate_messages,
    transition_scores,
)
from tests.support.metal_device import (
    DTYPES,
    assert_close,
    launch,
    needs_device,
    needs_emulator,
    normal,
    wide,
)

pytestmark = pytest.mark.slow

# (K, bits, group size, dtype): every one is a compilation, so a covering few
FORMS = (
    (16, 0, 0, mx.bfloat16),
    (16, 4, 64, mx.bfloat16),
    (16, 8, 32, mx.float16),
    (32, 8, 64, mx.float32),
    (5, 4, 128, mx.float32),
    (9, 2, 32, mx.float16),
    (3, 0, 0, mx.float16),
    (1, 0, 0, mx.float32),
)
seeds = st.integers(0, 2**31)


def exact_messages(receiver: mx.array, codes: Lookup) -> list[np.ndarray]:
    receivers, table, rows = map(wide, (receiver, codes.weight, codes.rows))
    a = receiver.shape[1]
    messages = np.empty((*rows.shape, a))
    for t, i in np.ndindex(rows.shape):
        gate = receivers[t] + table[rows[t, i], :a]
        messages[t, i] = table[rows[t, i], a:] / (1 + np.exp(-gate))
    return [messages]


def unpacked(packed: mx.array, scales: mx.array, biases: mx.array, group: int, bits: int) -> Any:
    """MLX's affine quantisation, from its definition: fields of little-endian words, q s + b."""
    words = np.array(packed)
    fields = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & (2**bits - 1)
    q = fields.reshape(len(words), -1).astype(np.float64)
    return q * np.repeat(wide(scales), group, axis=1) + np.repeat(wide(biases), group, axis=1)


def exact_scores(
    u: np.ndarray, write: np.ndarray, weight: np.ndarray, eps: float, head: np.ndarray
) -> list[np.ndarray]:
    """head: [n, K, d], each slot's rows."""
    n, K, _ = write.shape
    scores = np.empty((n, K, K))
    for t, i in np.ndindex(n, K):
        h = u[t] + np.sqrt((u[t] ** 2).mean()) * write[t, i]
        scores[t, i] = head[t] @ (h / np.sqrt((h**2).mean() + eps) * weight)
    return [scores]


def scores_inputs(
    n: int, size: int, form: tuple[int, int, int, mx.Dtype], V: int = 60
) -> tuple[tuple[Any, ...], list[np.ndarray]]:
    """The kernel's arguments, and the exact scores."""
    K, bits, group, dtype = form
    u, write = normal((n, size), dtype, 2.0), normal((n, K, size), dtype, 0.3)
    weight, rows = 1 + normal((size,), dtype, 0.1), mx.random.randint(0, V, (n, K))
    matrix = normal((V, size), dtype, size**-0.5)
    head, exact_rows = Lookup(rows.astype(mx.uint32), matrix), wide(matrix)
    if bits:
        q, scales, biases = mx.quantize(matrix, group_size=group, bits=bits)
        head = Lookup(head.rows, q, scales, biases, group, bits)
        exact_rows = unpacked(q, scales, biases, group, bits)
    exact = exact_scores(wide(u), wide(write), wide(weight), 1e-6, exact_rows[np.array(rows)])
    return (u, write, weight, 1e-6, head), exact


def messages_inputs(n: int, K: int, a: int, dtype: mx.Dtype, V: int = 40) -> tuple[Any, ...]:
    rows = mx.random.randint(0, V, (n, K)).astype(mx.uint32)
    return normal((n, a), dtype), Lookup(rows, normal((V, 2 * a), dtype))


@needs_device
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(1, 32), st.integers(1, 90), st.sampled_from(DTYPES), seeds)
def test_candidate_messages_of_any_size(n: int, K: int, a: int, dtype: mx.Dtype, seed: int) -> None:
    mx.random.seed(seed)
    args = messages_inputs(n, K, a, dtype)
    assert_close(CANDIDATE_MESSAGES, args, exact_messages(*args))


@needs_device
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from(FORMS), seeds)
def test_scores_of_any_size(
    n: int, blocks: int, form: tuple[int, int, int, mx.Dtype], seed: int
) -> None:
    mx.random.seed(seed)
    step = max(64, form[2])  # hidden sizes with whole groups; 64 and 192 leave a ragged last tile
    args, exact = scores_inputs(n, step * blocks, form)
    assert_close(TRANSITION_SCORES, args, exact)


@needs_device
@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_at_the_sizes_of_an_8b_target(form: tuple[int, int, int, mx.Dtype]) -> None:
    K, _, _, dtype = form
    messages = messages_inputs(14, K, 512, dtype, V=500)
    assert_close(CANDIDATE_MESSAGES, messages, exact_messages(*messages), check=False)
    args, scores = scores_inputs(14, 4096, form, V=300)
    assert_close(TRANSITION_SCORES, args, scores, check=False)


@needs_device
def test_a_hidden_size_that_ends_inside_a_tile() -> None:
    args, exact = scores_inputs(2, 160, (3, 0, 0, mx.float16))
    assert_close(TRANSITION_SCORES, args, exact)


@needs_emulator
def test_every_order_of_threads_gives_the_same_bits() -> None:
    args, _ = scores_inputs(2, 192, FORMS[3])
    forward, *others = [launch(TRANSITION_SCORES, *args, order=order)[0] for order in range(3)]
    assert all(mx.array_equal(forward, other).item() for other in others)


def test_rows_of_a_packed_head_are_dequantised() -> None:
    q, scales, biases = mx.quantize(normal((20, 64)), group_size=32, bits=8)
    rows = mx.array([[3, 0], [19, 3]])
    wanted = unpacked(q, scales, biases, 32, 8)[np.array(rows)]
    got = Lookup(rows, q, scales, biases, 32, 8).take()
    np.testing.assert_allclose(wide(got), wanted, atol=1e-6)


@pytest.mark.parametrize("form", FORMS[3:5], ids=str)
def test_the_plain_path_is_the_definition(form: tuple[int, int, int, mx.Dtype]) -> None:
    args, exact = scores_inputs(3, 128, form)
    np.testing.assert_allclose(wide(transition_scores(*args)), exact[0], atol=1e-5)
    messages = messages_inputs(3, 4, 6, mx.float32)
    exact = exact_messages(*messages)
    np.testing.assert_allclose(wide(candidate_messages(*messages)), exact[0], atol=1e-5)


@pytest.mark.parametrize("bits", [0, 4])
def test_the_check_widens_looked_up_rows_only(bits: int) -> None:
    """A float32 copy of a whole LM head would not fit many machines."""
    args, exact = scores_inputs(3, 128, (5, bits, 64, mx.float32), V=500)
    compact = widened(args[4])
    assert compact.weight.shape == (15, 128)
    assert compact.weight.dtype == mx.float32
    assert mx.array_equal(compact.take(), args[4].take()).item()
    assert signature(compact) != signature(args[4])


def test_sizes_that_the_kernel_does_not_serve() -> None:
    def limit(size: int, K: int, bits: int = 0) -> str | None:
        u = mx.zeros((2, size))
        head = Lookup(mx.zeros((2, K), mx.uint32), u, u, u, 64, bits)
        return TRANSITION_SCORES.limits(u, u, u, 1e-6, head)

    assert limit(64, 32) is None
    assert limit(8192, 16, 4) is None
    assert limit(100, 16) == "hidden size 100 is no multiple of 32 from 64 to 8192"
    assert limit(8224, 16) is not None
    assert limit(4096, 33) == "33 candidates are more than 32"
    assert limit(4096, 16, 6) == "6-bit rows are not read packed"

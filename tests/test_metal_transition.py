"""The transition table's kernels against float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.metal.kernel import Kernels
from dspine_mlx.metal.transition import (
    CANDIDATE_MESSAGES,
    TRANSITION_SCORES,
    Rows,
    transition_scores,
)
from tests.metal_device import (
    DTYPES,
    assert_close,
    launch,
    needs_device,
    needs_emulator,
    normal,
    wide,
)

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


def exact_messages(receiver: np.ndarray, table: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    a = receiver.shape[1]
    messages = np.empty((*rows.shape, a))
    for t, i in np.ndindex(rows.shape):
        gate = receiver[t] + table[rows[t, i], :a]
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
    head, scales, biases = normal((V, size), dtype, size**-0.5), weight, weight
    matrix = wide(head)
    if bits:
        head, scales, biases = mx.quantize(head, group_size=group, bits=bits)
        matrix = unpacked(head, scales, biases, group, bits)
    rows = rows.astype(mx.uint32)
    args = (u, write, weight, head, scales, biases, rows, 1e-6, group, bits)
    exact = exact_scores(wide(u), wide(write), wide(weight), 1e-6, matrix[np.array(rows)])
    return args, exact


@needs_device
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(1, 32), st.integers(1, 90), st.sampled_from(DTYPES), seeds)
def test_candidate_messages_of_any_size(n: int, K: int, a: int, dtype: mx.Dtype, seed: int) -> None:
    mx.random.seed(seed)
    rows = mx.random.randint(0, 40, (n, K)).astype(mx.uint32)
    args = (normal((n, a), dtype), normal((40, 2 * a), dtype), rows)
    assert_close(CANDIDATE_MESSAGES, args, exact_messages(*map(wide, args)))


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
    rows = mx.random.randint(0, 500, (14, K)).astype(mx.uint32)
    messages = (normal((14, 512), dtype), normal((500, 1024), dtype), rows)
    exact = exact_messages(*map(wide, messages))
    assert_close(CANDIDATE_MESSAGES, messages, exact, check=False)
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
    head, scales, biases = mx.quantize(normal((20, 64)), group_size=32, bits=8)
    rows = mx.array([[3, 0], [19, 3]])
    got = Rows(head, scales, biases, 32, 8).take(rows)
    wanted = unpacked(head, scales, biases, 32, 8)[np.array(rows)]
    np.testing.assert_allclose(wide(got), wanted, atol=1e-6)


@pytest.mark.parametrize("form", FORMS[3:5], ids=str)
def test_the_plain_path_is_the_definition(form: tuple[int, int, int, mx.Dtype]) -> None:
    args, exact = scores_inputs(3, 128, form)
    u, write, weight, head, scales, biases, rows, eps, group, bits = args
    table = Rows(head, scales, biases, group, bits)
    got = transition_scores(u, write, (weight, eps), table, rows, Kernels("off"))
    np.testing.assert_allclose(wide(got), exact[0], atol=1e-5)


def test_sizes_that_the_kernel_does_not_serve() -> None:
    def limit(size: int, K: int, bits: int = 0) -> str | None:
        u, rows = mx.zeros((2, size)), mx.zeros((2, K), mx.uint32)
        return TRANSITION_SCORES.limits(u, u, u, u, u, u, rows, 1e-6, 64, bits)

    assert limit(64, 32) is None
    assert limit(8192, 16, 4) is None
    assert limit(100, 16) == "hidden size 100 is no multiple of 32 from 64 to 8192"
    assert limit(8224, 16) is not None
    assert limit(4096, 33) == "33 candidates are more than 32"
    assert limit(4096, 16, 6) == "6-bit rows are not read packed"


@pytest.mark.parametrize("form", [FORMS[4], FORMS[7]], ids=str)
def test_the_check_widens_looked_up_rows_only(form: tuple[int, int, int, mx.Dtype]) -> None:
    """A float32 copy of a whole LM head would not fit many machines."""
    args, _ = scores_inputs(3, 128, form, V=500)
    compact = TRANSITION_SCORES.compact(*args)
    assert max(x.size for x in compact if isinstance(x, mx.array)) <= 3 * form[0] * 128
    one, two = (TRANSITION_SCORES.reference(*x)[0] for x in (args, compact))
    assert mx.array_equal(one, two).item()
    rows = mx.random.randint(0, 500, (3, 5)).astype(mx.uint32)
    messages = (normal((3, 8)), normal((500, 16)), rows)
    compact = CANDIDATE_MESSAGES.compact(*messages)
    assert compact[1].shape == (15, 16)
    one, two = (CANDIDATE_MESSAGES.reference(*x)[0] for x in (messages, compact))
    assert mx.array_equal(one, two).item()

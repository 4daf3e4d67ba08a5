"""The injection's kernels against float64."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine_mlx.metal.inject import GATED_MESSAGE, RESIDUAL_WRITE, gated_message, residual_write
from dspine_mlx.metal.kernel import Kernel
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

WriteInputs = tuple[mx.array, mx.array, mx.array, float]
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31)


def exact_message(
    y: np.ndarray, products: np.ndarray, anchor: np.ndarray, bias: np.ndarray
) -> list[np.ndarray]:
    """From the definition: z_t = sqrt(r) y_t / max(||y_t||, 1e-12), slot by slot."""
    M, r, a = len(y), y.shape[1], len(bias)
    messages, receivers = [], []
    previous_gate, previous_message = anchor[:a], anchor[a:]
    for t in range(M):
        s = np.sqrt(r) / max(np.linalg.norm(y[t]), 1e-12)
        own, gate, message = s * products[t].reshape(3, a)
        receivers.append(own + bias)
        with np.errstate(over="ignore"):
            messages.append(previous_message / (1 + np.exp(-(receivers[t] + previous_gate))))
        previous_gate, previous_message = gate, message
    return [np.stack(messages), np.stack(receivers)]


def exact_write(args: WriteInputs) -> list[np.ndarray]:
    (h, write, weight), eps = map(wide, args[:3]), args[3]
    for u, w in zip(h[len(h) - len(write) :], write, strict=True):
        u += np.sqrt((u**2).mean()) * w
    return [h, h / np.sqrt((h**2).mean(axis=1, keepdims=True) + eps) * weight]


def message_inputs(M: int, r: int, a: int, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    """y as R u is, with rows of very different lengths."""
    lengths = mx.exp(normal((M, 1)))
    y = (normal((M, r)) * lengths).astype(dtype)
    products = (normal((M, 3 * a)) * lengths).astype(dtype)
    return y, products, normal((2 * a,), dtype), normal((a,), dtype)


def write_inputs(rows: int, kept: int, size: int, dtype: mx.Dtype) -> WriteInputs:
    block, write = normal((rows, size), dtype, 3.0), normal((rows - kept, size), dtype)
    return block, write, 1 + normal((size,), dtype, 0.1), 1e-6


def several(args: tuple, shared: int) -> tuple:
    """Two texts of the same rows; what follows the first `shared` arguments is every text's."""
    return (*(mx.stack([x, -x]) for x in args[:shared]), *args[shared:])


@needs_device
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 31), st.integers(1, 300), st.integers(1, 300), dtypes, seeds)
def test_gated_message_of_any_size(M: int, r: int, a: int, dtype: mx.Dtype, seed: int) -> None:
    mx.random.seed(seed)
    args = message_inputs(M, r, a, dtype)
    assert_close(GATED_MESSAGE, args, exact_message(*map(wide, args)))


@needs_device
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 32), st.integers(0, 2), st.integers(2, 20), dtypes, seeds)
def test_residual_write_of_any_size(
    rows: int, kept: int, blocks: int, dtype: mx.Dtype, seed: int
) -> None:
    mx.random.seed(seed)
    args = write_inputs(rows, min(kept, rows - 1), 32 * blocks, dtype)
    assert_close(RESIDUAL_WRITE, args, exact_write(args))


@needs_device
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 70), st.integers(1, 40), dtypes, seeds)
def test_gated_messages_of_several_texts(
    texts: int, M: int, r: int, a: int, dtype: mx.Dtype, seed: int
) -> None:
    """One launch: no text's first slot follows the slots of the text before it."""
    mx.random.seed(seed)
    own = [message_inputs(M, r, a, dtype) for _ in range(texts)]
    bias = own[0][3]
    args = (*(mx.stack([one[i] for one in own]) for i in range(3)), bias)
    exact = [exact_message(*map(wide, (*one[:3], bias))) for one in own]
    assert_close(GATED_MESSAGE, args, [np.stack(outputs) for outputs in zip(*exact, strict=True)])
    assert_bits_of_each(GATED_MESSAGE, args, [(*one[:3], bias) for one in own])


@needs_device
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 2), st.integers(2, 6), dtypes, seeds)
def test_residual_writes_of_several_texts(
    texts: int, rows: int, kept: int, blocks: int, dtype: mx.Dtype, seed: int
) -> None:
    mx.random.seed(seed)
    own = [write_inputs(rows, min(kept, rows - 1), 32 * blocks, dtype) for _ in range(texts)]
    norm = own[0][2:]
    args = (mx.stack([one[0] for one in own]), mx.stack([one[1] for one in own]), *norm)
    exact = [exact_write((one[0], one[1], *norm)) for one in own]
    assert_close(RESIDUAL_WRITE, args, [np.stack(outputs) for outputs in zip(*exact, strict=True)])
    assert_bits_of_each(RESIDUAL_WRITE, args, [(one[0], one[1], *norm) for one in own])


def assert_bits_of_each(kernel: Kernel, args: tuple, own: list[tuple]) -> None:
    """A launch for all texts has the bits of a launch for each."""
    together = launch(kernel, *args, check=False)
    for i, one in enumerate(own):
        for output, alone in zip(together, launch(kernel, *one, check=False), strict=True):
            assert mx.array_equal(output[i], alone).item()


@needs_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_the_sizes_of_an_8b_target(dtype: mx.Dtype) -> None:
    args = message_inputs(15, 1024, 512, dtype)
    assert_close(GATED_MESSAGE, args, exact_message(*map(wide, args)), check=False)
    written = write_inputs(16, 1, 4096, dtype)
    exact = exact_write(written)
    assert_close(RESIDUAL_WRITE, written, exact, check=False)


@needs_device
def test_the_largest_hidden_size() -> None:
    args = write_inputs(3, 1, 8192, mx.float32)
    assert_close(RESIDUAL_WRITE, args, exact_write(args))


@needs_device
def test_a_readout_of_zero_is_clamped() -> None:
    y, products, anchor, bias = message_inputs(4, 16, 8, mx.float32)
    args = (y.at[1].multiply(0), products.at[1].multiply(0), anchor, bias)
    assert_close(GATED_MESSAGE, args, exact_message(*map(wide, args)))


@needs_device
def test_a_tiny_readout_is_scaled_in_full() -> None:
    y, products, anchor, bias = message_inputs(4, 16, 8, mx.float32)
    args = (y * 1e-9, products * 1e-9, anchor, bias)
    assert_close(GATED_MESSAGE, args, exact_message(*map(wide, args)))


@needs_device
def test_the_norm_is_that_of_the_rounded_h() -> None:
    """One rounding away from the norm of the h that was written, as for plain operations."""
    args = write_inputs(6, 1, 512, mx.bfloat16)
    h, normed = map(wide, launch(RESIDUAL_WRITE, *args))
    exact = h / np.sqrt((h**2).mean(axis=1, keepdims=True) + args[3]) * wide(args[2])
    assert (np.abs(normed - exact) <= 1.01 * 2**-8 * np.abs(exact)).all()


@needs_device
def test_a_zero_row_is_normalised_to_zero() -> None:
    block, write, weight, eps = write_inputs(4, 1, 64, mx.float32)
    args = (block.at[2].multiply(0), write, weight, eps)
    assert_close(RESIDUAL_WRITE, args, exact_write(args))
    assert not launch(RESIDUAL_WRITE, *args)[1][2].any().item()


@needs_device
def test_saturated_gates() -> None:
    y, products, anchor, bias = message_inputs(3, 16, 8, mx.float32)
    args = (y, products * 1000, anchor, bias)
    assert_close(GATED_MESSAGE, args, exact_message(*map(wide, args)))


@needs_emulator
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_every_order_of_threads_gives_the_same_bits(dtype: mx.Dtype) -> None:
    for kernel, args in (
        (GATED_MESSAGE, message_inputs(5, 70, 40, dtype)),
        (GATED_MESSAGE, several(message_inputs(5, 70, 40, dtype), 3)),
        (RESIDUAL_WRITE, write_inputs(5, 1, 96, dtype)),
        (RESIDUAL_WRITE, several(write_inputs(5, 1, 96, dtype), 2)),
    ):
        forward, *others = [launch(kernel, *args, order=order) for order in range(3)]
        for other in others:
            for a, b in zip(forward, other, strict=True):
                assert mx.array_equal(a, b).item()


def test_the_plain_paths_are_the_definitions() -> None:
    args = message_inputs(6, 40, 24, mx.float32)
    for got, wanted in zip(gated_message(*args), exact_message(*map(wide, args)), strict=True):
        np.testing.assert_allclose(wide(got), wanted, atol=1e-5)
    written = write_inputs(6, 2, 48, mx.float32)
    exact = exact_write(written)
    for got, wanted in zip(residual_write(*written), exact, strict=True):
        np.testing.assert_allclose(wide(got), wanted, atol=1e-5)

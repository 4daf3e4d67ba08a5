"""Kernels under test: on Metal where it is, elsewhere on the CPU through tests/msl."""

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dspine_mlx.metal.inject import GATED_MESSAGE, RESIDUAL_WRITE
from dspine_mlx.metal.kernel import Arrays, Kernel
from dspine_mlx.metal.transition import CANDIDATE_MESSAGES, TRANSITION_SCORES
from dspine_mlx.metal.walk import WALK
from tests.msl import Emulator, unavailable

KERNELS = (
    GATED_MESSAGE,
    RESIDUAL_WRITE,
    CANDIDATE_MESSAGES,
    TRANSITION_SCORES,
    WALK,
)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
METAL = mx.metal.is_available()

needs_device = pytest.mark.skipif(
    not METAL and unavailable() is not None, reason=f"no Metal, and {unavailable()}"
)
needs_emulator = pytest.mark.skipif(
    METAL or unavailable() is not None, reason=unavailable() or "Metal runs the kernels here"
)

needs_metal = pytest.mark.skipif(not METAL, reason="no Metal")
without_metal = pytest.mark.skipif(METAL, reason="asks what happens without Metal")


@functools.cache
def emulator(kernel: Kernel) -> Emulator:
    return Emulator(kernel.definition)


def launch(kernel: Kernel, *args: Any, check: bool = True, order: int = 0) -> Arrays:
    """The kernel's outputs; with the emulator, checked and in one of three orders."""
    assert kernel.limits(*args) is None
    if METAL:
        return kernel.launch(*args)
    device = emulator(kernel)
    device.check, device.order = check, order
    return kernel.launcher(device, *args)


def normal(shape: tuple[int, ...], dtype: mx.Dtype = mx.float32, scale: float = 1.0) -> mx.array:
    return (mx.random.normal(shape) * scale).astype(dtype)


def wide(array: mx.array) -> np.ndarray:
    """As NumPy, floats in float64."""
    if mx.issubdtype(array.dtype, mx.floating):
        return np.array(array.astype(mx.float32)).astype(np.float64)
    return np.array(array)


def assert_close(
    kernel: Kernel, args: tuple[Any, ...], exact: list[np.ndarray], check: bool = True
) -> None:
    """float32: within 1e-5. Narrower: at most twice the plain path's error, or one rounding of the
    largest value where the plain path happens to hit it."""
    outputs, plain = launch(kernel, *args, check=check), kernel.reference(*args)
    narrow = args[0].dtype != mx.float32
    for output, other, wanted in zip(outputs, plain, exact, strict=True):
        assert output.shape == other.shape == wanted.shape
        largest = max(1.0, np.abs(wanted).max())
        error, allowed = np.abs(wide(output) - wanted).max(), 1e-5 * largest
        if narrow:
            rounding = mx.finfo(args[0].dtype).eps / 2 * largest
            allowed = max(2 * np.abs(wide(other) - wanted).max(), rounding)
        assert error <= allowed, f"{kernel.name}: error {error}, allowed {allowed}"

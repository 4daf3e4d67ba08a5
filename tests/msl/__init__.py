"""Run the kernels of mx.fast.metal_kernel on a CPU, from the very source MLX generates."""

from tests.msl.emulator import Emulator, KernelError, Traffic
from tests.msl.source import CompileError
from tests.msl.toolchain import unavailable

__all__ = ["CompileError", "Emulator", "KernelError", "Traffic", "unavailable"]

"""Launch a kernel on the CPU, with the call of mx.fast.metal_kernel's functions."""

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.msl.source import Program, recorded_source, translate
from tests.msl.toolchain import build, load, source_line

GAP = 1 << 20  # bytes around a buffer, so that a stray access meets nothing else
MAX_BUFFERS = 31
KINDS = (
    "",
    "out-of-range load",
    "out-of-range store",
    "write-write race",
    "write after unordered read",
    "read after unordered write",
    "read of memory never written",
    "store to an input",
    "wild access",
    "divergent simdgroup operation",
    "divergent barrier",
    "barrier after some threads returned",
    "threadgroup too large",
)
SHAPE, INPUT, OUTPUT = range(3)  # roles of a buffer


class KernelError(Exception):
    """What the checker found, one line each: the kind, the place, the thread, the source line."""


class CTraffic(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("loaded", "stored", "touched_loads", "touched_stores", "unwritten")
    ]


class CBuffer(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("item", ctypes.c_uint32),
        ("role", ctypes.c_uint32),
        ("traffic", CTraffic),
    ]


class CProblem(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("buffer", ctypes.c_int32),
        ("array", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("group", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("other", ctypes.c_uint32),
        ("where", ctypes.c_uint64),
    ]


class CLaunch(ctypes.Structure):
    _fields_ = [
        ("buffers", ctypes.POINTER(CBuffer)),
        ("n_buffers", ctypes.c_uint32),
        ("check", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("n_problems", ctypes.c_uint32),
        ("problems", CProblem * 64),
    ]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one buffer: moved by all accesses, and touched at least once."""

    loaded: int
    stored: int
    touched: int


class Memory:
    """A buffer for a kernel: a copy of an array's bytes between two gaps."""

    def __init__(self, name: str, dtype: np.dtype, size: int, role: int):
        self.name, self.dtype, self.role = name, dtype, role
        self.bytes = size * dtype.itemsize
        backing = np.empty(self.bytes + 2 * GAP + 64, np.uint8)
        start = GAP + -(backing.ctypes.data + GAP) % 64
        self.data = backing[start : start + self.bytes]
        self.address = backing.ctypes.data + start


def numpy_view(array: mx.array) -> np.ndarray:
    """The array's own memory with its strides; bfloat16 as uint16."""
    mx.eval(array)
    return np.asarray(memoryview(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array))


def buffer_dtype(dtype: mx.Dtype) -> np.dtype:
    return numpy_view(mx.zeros((1,), dtype)).dtype


class Emulator:
    """Stands in for `mx.fast.metal_kernel(**definition)`; runs when called, on copies.

    check: pass every access through the checker, and count bytes into `traffic`. order: in which
    threadgroups, simdgroups and lanes take turns: 0 forward, 1 reverse, 2 shuffled by seed.
    `copies` counts inputs that MLX would first make contiguous, by a launch of its own.
    """

    def __init__(
        self, definition: dict[str, Any], check: bool = False, order: int = 0, seed: int = 1
    ):
        self.function = mx.fast.metal_kernel(**definition)
        self.definition = definition
        self.check, self.order, self.seed = check, order, seed
        self.contiguous = definition.get("ensure_row_contiguous", True)
        self.traffic: dict[str, Traffic] = {}
        self.copies = 0
        self.programs: dict[Any, tuple[Program, Path, ctypes.CDLL]] = {}

    def __call__(
        self,
        *,
        inputs: list[Any],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: list[tuple[str, Any]] | None = None,
    ) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        options: dict[str, Any] = {
            "grid": grid,
            "threadgroup": threadgroup,
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
        } | ({"template": template} if template else {})
        forms = [(str(a.dtype), a.ndim == 0, a.size < 8) for a in arrays]
        key = (self.check, *forms, repr(template), *map(str, output_dtypes))
        if key not in self.programs:
            self.programs[key] = self.compile(inputs, options)
        program, built, library = self.programs[key]
        outputs = list(zip(output_shapes, output_dtypes, strict=True))
        memories = self.allocate(program, arrays, outputs)
        self.launch(library, built, memories, grid, threadgroup)
        return self.results(memories, outputs)

    def compile(self, inputs: list[Any], options: Any) -> tuple[Program, Path, ctypes.CDLL]:
        header, body = self.definition.get("header", ""), self.definition["source"]
        generated = recorded_source(self.function, inputs, options)
        program = translate(generated, header, body, self.definition["name"])
        if len(program.buffers) > MAX_BUFFERS:
            raise KernelError(f"{len(program.buffers)} buffers, Metal has {MAX_BUFFERS}")
        built = build(program, traced=self.check)
        return program, built, load(built)

    def allocate(
        self, program: Program, arrays: list[mx.array], outputs: list[tuple[Any, mx.Dtype]]
    ) -> list[Memory]:
        given = dict(zip(self.definition["input_names"], arrays, strict=True))
        made = dict(zip(self.definition["output_names"], outputs, strict=True))
        memories = []
        for name in program.buffers:
            if name in made:
                shape, dtype = made[name]
                memory = Memory(name, buffer_dtype(dtype), int(np.prod(shape)), OUTPUT)
                memory.data[:] = 0xFF  # NaN
            elif name in given:
                memory = self.copy(name, numpy_view(given[name]))
            else:
                memory = self.shape_buffer(name, given)
            memories.append(memory)
        return memories

    def copy(self, name: str, array: np.ndarray) -> Memory:
        if self.contiguous and not array.flags.c_contiguous:
            self.copies += 1
            array = np.ascontiguousarray(array)
        steps = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
        extent = sum(steps) // array.itemsize + 1 if array.size else 0
        memory = Memory(name, array.dtype, extent, INPUT)
        ctypes.memmove(memory.address, array.ctypes.data, memory.bytes)
        return memory

    def shape_buffer(self, name: str, given: dict[str, mx.array]) -> Memory:
        """What MLX passes as x_shape, x_strides or x_ndim."""
        match = re.fullmatch(r"(\w+)_(shape|strides|ndim)", name)
        assert match
        array = numpy_view(given[match[1]])
        if self.contiguous:
            array = np.ascontiguousarray(array).reshape(array.shape)
        if match[2] == "strides":
            values = np.array(array.strides, np.int64) // array.itemsize
        else:
            values = np.array(array.shape if match[2] == "shape" else [array.ndim], np.int32)
        memory = Memory(name, values.dtype, values.size, SHAPE)
        memory.data[:] = values.view(np.uint8)
        return memory

    def launch(
        self,
        library: ctypes.CDLL,
        built: Path,
        memories: list[Memory],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> None:
        buffers = (CBuffer * len(memories))(
            *(CBuffer(m.address, m.bytes, m.dtype.itemsize, m.role) for m in memories)
        )
        launch = CLaunch(buffers, len(memories), self.check, self.order, self.seed)
        launch.grid[:], launch.threads[:] = grid, threadgroup
        library.msl_launch(ctypes.byref(launch))
        found = [self.explain(p, memories, built) for p in launch.problems[: launch.n_problems]]
        for memory, buffer in zip(memories, buffers, strict=True):
            t = buffer.traffic
            self.traffic[memory.name] = Traffic(
                t.loaded, t.stored, t.touched_loads + t.touched_stores
            )
            if t.unwritten:
                found.append(f"output {memory.name}: {t.unwritten} elements never written")
        if found:
            raise KernelError("\n".join([self.definition["name"], *found]))

    def explain(self, problem: CProblem, memories: list[Memory], built: Path) -> str:
        kind = KINDS[problem.kind]
        if kind.startswith(("divergent", "barrier")):
            return f"{kind}, line {problem.where}, threadgroup {problem.group}"
        if kind == "threadgroup too large":
            return f"{kind}: {problem.where} threads, {problem.offset} bytes"
        if problem.buffer >= 0:
            memory = memories[problem.buffer]
            place = f"{memory.name}[{problem.offset // memory.dtype.itemsize}]"
        elif problem.array >= 0:
            names = (built.parent / "arrays").read_text().split("\n")
            place = f"byte {problem.offset} of threadgroup {names[problem.array]}"
        else:
            place = f"address {problem.offset:#x}"
        return (
            f"{kind}: {place}, thread {problem.thread} of threadgroup {problem.group}, "
            f"{source_line(built, problem.where)}"
        )

    def results(
        self, memories: list[Memory], outputs: list[tuple[Any, mx.Dtype]]
    ) -> list[mx.array]:
        by_name = {m.name: m for m in memories}
        arrays = []
        for name, (shape, dtype) in zip(self.definition["output_names"], outputs, strict=True):
            memory = by_name[name]
            array = mx.array(memory.data.view(memory.dtype).reshape(shape))
            arrays.append(array.view(dtype) if dtype == mx.bfloat16 else array)
        return arrays

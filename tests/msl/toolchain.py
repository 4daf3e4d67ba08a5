"""Find a clang, and build programs into shared objects, cached by content."""

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from tests.msl.source import CompileError, Program

HERE = Path(__file__).parent
CACHE = Path(tempfile.gettempdir()) / f"msl-{os.getuid()}"
MLX_HEADERS = Path(mx.__file__).parent / "include"
NEWEST, OLDEST = 24, 17  # clang versions; 17 is the first with arithmetic in bfloat16
MISSING = (
    "no clang 17 or newer: install one (Debian: apt-get install clang-19) or `pip install ziglang`"
)
CODE = [
    *("-fPIC", "-g", f"--target={platform.machine()}-linux-gnu"),
    *(["-march=x86-64-v3"] if platform.machine() == "x86_64" else []),
]
TRACE = [
    "-fsanitize-coverage=func,trace-pc-guard,trace-loads,trace-stores",
    "-fno-vectorize",  # keeps accesses to 16 bytes, which the trace has calls for
    "-fno-slp-vectorize",
    "-mllvm",
    "-disable-loop-idiom-all",  # a memset or memcpy would escape it
]
DIALECT = [
    *("-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc"),
    *CODE,
    *("-O1", "-ffp-contract=off"),
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    *("-I", str(HERE / "include"), "-I", str(MLX_HEADERS)),
    *("-Wno-unknown-attributes", "-Wno-unknown-pragmas", "-Wno-pass-failed"),
    *("-Wimplicit-float-conversion", "-fno-color-diagnostics"),
]
# Metal has neither doubles nor a generic address space. The metal_stdlib here needs the latter: of
# an extra pass without it only complaints about the kernel's own lines count.
APPLE = (
    "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64,-__opencl_c_generic_address_space,"
    "-__opencl_c_pipes,-__opencl_c_device_enqueue"  # which depend on the latter
)
FOREIGN = re.compile(
    r"requires cl_khr_fp64|(cannot initialize|assigning to|changes address space)"
    r".*__private[^']*\*.*(__global|__local|__constant)[^']*\*"
)
THREADGROUP_ARRAY = re.compile(
    r"^(@\S+) = internal (?:unnamed_addr )?global (.+) undef, align (\d+)(?:, !dbg !\d+)?$", re.M
)


@functools.cache
def toolchain() -> tuple[list[str], list[str]] | None:
    """The commands of a clang that is new enough and of a linker, or None."""
    names = [f"clang-{version}" for version in range(NEWEST, OLDEST - 1, -1)]
    for name in filter(shutil.which, [*names, "clang"]):
        text = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"clang version (\d+)", text)
        if version and int(version[1]) >= OLDEST and shutil.which("ld"):
            return [name], ["ld"]
    spec = importlib.util.find_spec("ziglang")
    if spec and spec.origin:
        zig = str(Path(spec.origin).parent / "zig")
        return [zig, "clang"], [zig, "ld.lld"]
    return None


def unavailable() -> str | None:
    """Why kernels can't be run here, or None."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"kernels run on Linux x86-64 or aarch64 only, this is {platform.platform()}"
    return None if toolchain() else MISSING


def run(arguments: list[str], link: bool = False) -> str:
    """Run the compiler or the linker; its warnings."""
    found = toolchain()
    assert found, MISSING
    command = [*found[1], "-shared"] if link else found[0]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if result.returncode:
        raise CompileError(result.stderr)
    return result.stderr


def build(program: Program, traced: bool) -> Path:
    """The shared object of a program and the run-time; traced: for the checker, several times
    slower."""
    flags = ["-O1", *TRACE] if traced else ["-O2"]

    def make(work: Path) -> None:
        (work / "kernel.cl").write_text(program.text)
        front_end(work, program.label)
        names = publish_threadgroup_arrays(work / "kernel.ll")
        (work / "arrays").write_text("\n".join(names))
        kernel, text = str(work / "kernel.o"), str(work / "kernel.ll")
        run(["-x", "ir", *CODE, *flags, "-Wno-override-module", "-c", text, "-o", kernel])
        run([kernel, str(runtime()), "-o", str(work / "kernel.so")], link=True)

    return cached("kernel.so", [program.text, repr(DIALECT), repr(flags), *sources()], make)


def runtime() -> Path:
    source = HERE / "runtime.c"

    def make(work: Path) -> None:
        out = str(work / "runtime.o")
        run(["-x", "c", "-std=c11", *CODE, "-O2", "-c", str(source), "-o", out])

    return cached("runtime.o", [source.read_text()], make)


def sources() -> list[str]:
    """What a built kernel depends on besides its own text."""
    files = [HERE / "runtime.c", Path(__file__), *sorted((HERE / "include").rglob("*"))]
    return [f.read_text() for f in files if f.is_file()]


def cached(name: str, content: list[str], make: Callable[[Path], None]) -> Path:
    """A file that `make` makes in a folder, kept under the hash of what it is made from."""
    content = [*content, repr(toolchain()), *CODE, mx.__version__]
    folder = CACHE / hashlib.sha256("\0".join(content).encode()).hexdigest()[:20]
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=CACHE))
        make(work)
        try:
            work.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(work)
    return folder / name


def front_end(work: Path, label: str) -> None:
    """kernel.cl to kernel.ll, refusing what Apple's compiler refuses."""
    text = str(work / "kernel.cl")
    own = re.compile(re.escape(label) + r"\.(header|metal):")
    warnings = run(
        [
            *DIALECT,
            "-Xclang",
            "-disable-llvm-passes",
            "-emit-llvm",
            "-S",
            text,
            "-o",
            str(work / "kernel.ll"),
        ]
    )
    # clang converts a float to bfloat by itself, with a warning; Metal does not
    refused = [
        line
        for line in warnings.splitlines()
        if own.match(line) and re.search(r"to '[^']*\bbfloat.*-Wimplicit-float", line)
    ]
    try:
        run([*DIALECT, "-Xclang", APPLE, "-ferror-limit=0", "-fsyntax-only", text])
    except CompileError as error:
        refused += [
            line
            for line in str(error).splitlines()
            if own.match(line) and " error: " in line and FOREIGN.search(line)
        ]
    if refused:
        raise CompileError("\n".join(refused))


def publish_threadgroup_arrays(path: Path) -> list[str]:
    """Pad the threadgroup arrays, and list them in symbols that are visible outside.

    The run-time fills and checks them; and the optimiser, which would otherwise see that no pointer
    to them escapes, can't keep their values over a barrier. Returns their names.
    """
    found: list[tuple[str, str]] = []

    def pad(match: re.Match[str]) -> str:
        found.append((match[1], match[2]))
        padded = f"{{ {match[2]}, [256 x i8] }} zeroinitializer, align {match[3]}"
        return f"{match[1]} = internal global {padded}"

    text = THREADGROUP_ARRAY.sub(pad, path.read_text())
    n = max(1, len(found))
    arrays = ", ".join(f"ptr {name}" for name, _ in found) or "ptr null"
    sizes = ", ".join(
        f"i64 ptrtoint (ptr getelementptr ({kind}, ptr null, i32 1) to i64)" for _, kind in found
    )
    path.write_text(
        f"{text}\n@msl_threadgroup_arrays = global [{n} x ptr] [{arrays}]\n"
        f"@msl_threadgroup_sizes = constant [{n} x i64] [{sizes or 'i64 0'}]\n"
        f"@msl_threadgroup_count = constant i64 {len(found)}\n"
    )
    return [re.sub(r".*E\d*", "", name) for name, _ in found]


def load(built: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(built), mode=os.RTLD_LOCAL | os.RTLD_NOW)


def source_line(built: Path, offset: int) -> str:
    """file:line of an instruction, if a symbolizer is installed."""
    names = ["llvm-symbolizer", *(f"llvm-symbolizer-{v}" for v in range(NEWEST, OLDEST - 1, -1))]
    for name in filter(shutil.which, names):
        command = [name, f"--obj={built}", "--functions=none", "--inlining=true", hex(offset)]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.split()
        places = [Path(line).name for line in lines]
        return next((p for p in places if ".metal:" in p), places[0] if places else hex(offset))
    return f"offset {offset:#x}"

"""From a call of mx.fast.metal_kernel to text that clang compiles for the CPU.

MLX itself is asked for the source it would hand to Metal: while a function is exported, calls of
custom kernels are recorded, Metal or not. The recorded text has the form

    header  template <typename T, int N>  [[kernel]] void name(parameters) {  body  }  instantiation

and becomes a "C++ for OpenCL" kernel: parameters turn into locals that read two argument blocks,
template parameters into aliases and constants. Header and body stay as they are.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

ATTRIBUTES = {  # name: (place in the attribute block, components), as runtime.c fills it
    "thread_position_in_grid": (0, 3),
    "thread_position_in_threadgroup": (3, 3),
    "threadgroup_position_in_grid": (6, 3),
    "threadgroups_per_grid": (9, 3),
    "threads_per_grid": (12, 3),
    "threads_per_threadgroup": (15, 3),
    "thread_index_in_threadgroup": (18, 1),
    "thread_index_in_simdgroup": (19, 1),
    "simdgroup_index_in_threadgroup": (20, 1),
    "simdgroups_per_threadgroup": (21, 1),
    "threads_per_simdgroup": (22, 1),
}
SIGNATURE = re.compile(
    r"(?:template <(?P<template>[^>]*)>\n)?"
    r"\[\[kernel\]\] void (?P<name>\S+)\(\n(?P<parameters>.*)\) \{\n",
    re.DOTALL,
)
BUFFER = re.compile(
    r"\s*(?P<type>(?:const )?(?:constant|device) \S+?)(?P<kind>[&*]) (?P<name>\w+) \[\[buffer.*"
)
ATTRIBUTE = re.compile(r"\s*(?P<type>uint3?) (?P<name>\w+) \[\[\w+\]\]")


class CompileError(Exception):
    """The source is not what Apple's compiler would take, or can't be read."""


@dataclass(frozen=True)
class Program:
    text: str
    label: str  # what the compiler calls the body: "{label}.metal"
    buffers: list[str]  # names of the buffer parameters, in order


def recorded_source(function: Callable[..., Any], inputs: list[Any], options: Any) -> str:
    """The text MLX generates for this call."""
    found: list[str] = []

    def call(*arrays: mx.array) -> Any:
        rest = iter(arrays)
        full = [next(rest) if isinstance(x, mx.array) else x for x in inputs]
        return function(inputs=full, stream=mx.gpu, **options)

    def record(event: dict[str, Any]) -> None:
        if event.get("name") == "CustomKernel":
            found.append(event["arguments"][1])

    mx.export_function(record, call, *(x for x in inputs if isinstance(x, mx.array)))
    return found[0]


def translate(generated: str, header: str, body: str, label: str) -> Program:
    if not generated.isascii():
        raise CompileError("the source has non-ASCII characters; MLX hands it to Metal as ASCII")
    signature, tail = generated.removeprefix(header).rsplit(body + "\n}\n", 1)
    match = SIGNATURE.fullmatch(signature)
    if not match:
        raise CompileError(f"MLX's signature has an unknown form:\n{signature}")
    buffers: list[str] = []
    lines = [
        "#include <metal_stdlib>",
        '#include "mlx/backend/metal/kernels/utils.h"',
        f'#line 1 "{label}.header"',
        header,
        '#line 1 "prologue"',
        "__kernel void msl_kernel(__global const ulong* msl_args, __global const uint* msl_at) {",
    ]
    for line in match["parameters"].split(",\n"):
        lines.append(local_variable(line, buffers))
    if match["template"]:
        given = re.search(re.escape(match["name"]) + r"<([^>]*)>\) ", tail)
        assert given
        for parameter, value in zip(
            match["template"].split(", "), given[1].split(", "), strict=True
        ):
            kind, name = parameter.split()
            alias = f"using {name} =" if kind == "typename" else f"constexpr {kind} {name} ="
            lines.append(f"  {alias} {value};")
    entry = "void msl_entry(__global const ulong* a, __global const uint* t) { msl_kernel(a, t); }"
    lines += [f'#line 1 "{label}.metal"', body, "}", f'extern "C" {entry}', ""]
    return Program("\n".join(lines), label, buffers)


def local_variable(parameter: str, buffers: list[str]) -> str:
    """The local that stands for a parameter; names of buffers are appended to `buffers`."""
    if match := BUFFER.fullmatch(parameter):
        kind, pointer = match["kind"], f"({match['type']}*)msl_args[{len(buffers)}]"
        buffers.append(match["name"])
        return f"  {match['type']}{kind} {match['name']} = {'*' if kind == '&' else ''}{pointer};"
    match = ATTRIBUTE.fullmatch(parameter)
    if not match or match["name"] not in ATTRIBUTES:
        raise CompileError(f"unknown parameter {parameter.strip()}")
    at, components = ATTRIBUTES[match["name"]]
    values = ", ".join(f"msl_at[{at + c}]" for c in range(components))
    return (
        f"  {match['type']} {match['name']} = {f'uint3({values})' if components == 3 else values};"
    )

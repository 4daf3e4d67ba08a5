"""Roofline of the draft round at Qwen3-8B sizes: launches, bytes, FLOPs, and predicted times.

    python -m tests.bench.roofline [--bits 4]

Plain operations: their launches and the bytes of their inputs and outputs, from the graph MLX
exports. Kernels: the bytes each touches at least once, counted by tests/msl on Linux. Times are
predictions from the chips' data sheets and not measurements: every operation takes the longer of
its bytes at 80 % of the bandwidth and its FLOPs at 80 % of the peak, and LAUNCH on top.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import qwen3

from dspine_mlx.batch.draft_rows import DraftLengths, DraftRows
from dspine_mlx.batch.select import select_texts
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspine import DSpine, DSpineConfig
from dspine_mlx.metal.kernel import OFF, Arrays, Kernel, Kernels, Lookup
from dspine_mlx.round.select import select
from dspine_mlx.target.model import Target
from tests.support.metal_device import KERNELS, emulator, launch

LAUNCH = 2.5e-6  # s, from one small dependent kernel to the next; reported for an M3 Ultra
CONTEXT = 4  # rows of features that enter the drafter's cache in a round
TEXTS = 8
CHIPS = {  # bytes/s, float32 FLOP/s
    "M1": (68e9, 2.6e12),
    "M2 Pro": (200e9, 6.8e12),
    "M4 Pro": (273e9, 8.1e12),
    "M4 Max": (546e9, 16.2e12),
    "M5": (153e9, 4.0e12),
}
SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "block_size": 16,
    "mask_token_id": 151669,
    "target_layer_ids": (0, 0, 0, 0, 0),
    "transfer_rank": 1024,
    "message_size": 512,
    "top_k": 16,
}
VIEWS = {
    *("Slice", "Reshape", "Transpose", "Broadcast", "Squeeze", "ExpandDims"),
    *("Flatten", "Unflatten", "Arange"),
}
FUSED = {  # one launch each with Metal
    "rms_norm": mx.fast,
    "rope": mx.fast,
    "scaled_dot_product_attention": mx.fast,
    "dequantize": mx,
}


@dataclass(frozen=True)
class Operation:
    name: str
    launches: int
    bytes: int
    flops: int

    def seconds(self, bandwidth: float, peak: float) -> float:
        work = max(self.bytes / bandwidth, self.flops / peak) / 0.8
        return self.launches * LAUNCH + work


class Trusting(Kernels):
    """Runs every kernel unchecked: while a graph is recorded nothing can be evaluated."""

    def run(self, kernel: Kernel, *args: Any) -> Arrays:
        return kernel.launch(*args)


def stand_in(name: str, x: mx.array, *_: Any, **options: Any) -> mx.array:
    """One recorded launch for an operation that the CPU backend would take apart."""
    kernel = mx.fast.metal_kernel(name=name, input_names=["x"], output_names=["y"], source="")
    launch = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "stream": mx.gpu}
    shape, dtype = x.shape, x.dtype
    if name == "dequantize":
        shape = (*shape[:-1], shape[-1] * 32 // options["bits"])
        dtype = options["scales"].dtype
    return kernel(inputs=[x], output_shapes=[shape], output_dtypes=[dtype], **launch)[0]


@contextmanager
def recordable() -> Iterator[None]:
    """Within it custom kernels and FUSED operations can be exported without Metal."""
    functions = {kernel: kernel.function for kernel in KERNELS}
    originals = {name: getattr(module, name) for name, module in FUSED.items()}
    try:
        for kernel in KERNELS:
            kernel.function = partial(kernel.function, stream=mx.gpu)
        for name, module in FUSED.items():
            setattr(module, name, partial(stand_in, name))
        yield
    finally:
        for kernel, function in functions.items():
            kernel.function = function
        for name, original in originals.items():
            setattr(FUSED[name], name, original)


def nbytes(tensor: tuple[str, tuple[int, ...], mx.Dtype]) -> int:
    return prod(tensor[1]) * tensor[2].size


def operation(event: dict[str, Any], kernels: dict[str, tuple[int, int]]) -> Operation:
    name, inputs, outputs = event["name"], event["inputs"], event["outputs"]
    size = prod(outputs[0][1])
    if name == "CustomKernel":
        label = next((k for k in kernels if k in event["arguments"][0]), "")
        if label:
            return Operation(label, 1, *kernels[label])
        name = next(n for n in FUSED if n in event["arguments"][0])
    touched = sum(map(nbytes, (*inputs, *outputs)))
    if name in ("Gather", "GatherAxis"):  # reads the rows it writes, and the indices
        touched = 2 * nbytes(outputs[0]) + sum(map(nbytes, inputs[1:]))
    flops = size
    if name in ("Matmul", "AddMM", "QuantizedMatmul"):
        flops = 2 * size * inputs[0][1][-1]
    return Operation(name, len(inputs) if name == "Concatenate" else 1, touched, flops)


def kernel_costs(bits: int) -> dict[str, tuple[int, int]]:
    """(bytes touched, FLOPs) of each kernel, run and counted at full size."""
    d, r, a, M, K, V = 4096, 1024, 512, 15, 16, 400
    dtype, zeros = mx.bfloat16, mx.zeros
    rows = mx.random.randint(0, V, (M - 1, K)).astype(mx.uint32)
    weight, matrix = mx.ones((d,), dtype), mx.random.normal((V, d)).astype(dtype)
    head = Lookup(rows, matrix)
    if bits:
        q, scales, biases = mx.quantize(matrix, group_size=64, bits=bits)
        head = Lookup(rows, q, scales, biases, 64, bits)
    message, write, candidates, scores, walk = KERNELS
    calls: list[tuple[Kernel, tuple[Any, ...], int]] = [
        (message, (zeros((M, r), dtype), zeros((M, 3 * a), dtype), zeros((2 * a,), dtype),
                   zeros((a,), dtype)), M * (4 * r + 10 * a)),
        (write, (zeros((M + 1, d), dtype), zeros((M, d), dtype), weight, 1e-6), M * d * 8),
        (candidates, (zeros((M - 1, a), dtype), Lookup(rows, zeros((V, 2 * a), dtype))),
         (M - 1) * K * a * 5),
        (scores, (zeros((M - 1, d), dtype), zeros((M - 1, K, d), dtype), weight, 1e-6, head),
         (M - 1) * K * d * (2 * K + 5)),
        (walk, (zeros((K,)), zeros((M - 1, K, K)), zeros((M, K)), 1.0), M * K * (2 * K + 5)),
    ]  # fmt: skip
    costs = {}
    for kernel, args, flops in calls:
        launch(kernel, *args, check=True)
        touched = sum(t.touched for t in emulator(kernel).traffic.values())
        costs[f"dspine_{kernel.name}"] = (touched, flops)
    return costs


def drafter_of(kernels: Kernels, bits: int) -> Drafter:
    """Of full size, with weights that are never evaluated."""
    config = DSpineConfig.from_dict(SIZES)
    args = qwen3.ModelArgs(
        **{k: v for k, v in SIZES.items() if k in qwen3.ModelArgs.__annotations__}
        | {"num_hidden_layers": 1, "model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6},
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )
    model, network = qwen3.Model(args), DSpine(config)
    for module in (model, network):
        module.set_dtype(mx.bfloat16)
        if bits:
            nn.quantize(module, group_size=64, bits=bits, class_predicate=quantised)
    drafter = network.bind(Target(model))
    if kernels.active:  # as bind folds them, without the product
        shape = (config.vocab_size, 2 * config.message_size)
        drafter.kernels, network.folded_codes = kernels, mx.zeros(shape, mx.bfloat16)
        del network.transfer_codes
    return drafter


def quantised(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and "transfer_codes" not in path


def graph(
    drafter: Drafter,
    costs: dict[str, tuple[int, int]],
    function: Callable[..., list[mx.array]],
    *arrays: mx.array,
) -> list[Operation]:
    """The operations of a call; the drafter's and target's weights are inputs of the graph."""
    modules = {"drafter": drafter.network, "model": drafter.target.model}
    flat = tree_flatten({name: m.parameters() for name, m in modules.items()})
    names, found = [name for name, _ in flat], []

    def call(*inputs: mx.array) -> list[mx.array]:
        given = tree_unflatten(list(zip(names, inputs[len(arrays) :], strict=True)))
        for name, module in modules.items():
            module.update(given[name])
        return function(*inputs[: len(arrays)])

    def record(event: dict[str, Any]) -> None:
        if event["type"] == "primitive" and event["name"] not in VIEWS:
            found.append(operation(event, costs))

    with recordable():
        mx.export_function(record, call, *arrays, *(value for _, value in flat))
    for name, module in modules.items():
        module.update(tree_unflatten(flat)[name])
    return found


def texts_together(drafter: Drafter, anchors: mx.array, features: mx.array) -> list[mx.array]:
    """The draft round of several texts, all greedy."""
    lengths = DraftLengths()
    rows = [DraftRows(lengths) for _ in drafter.layers]
    lengths.replace([0] * anchors.size)
    lengths.take_in([CONTEXT] * anchors.size)
    proposals = drafter.propose_texts(anchors, features, rows)
    greedy: Any = SimpleNamespace(draft_temperature=0.0, text=SimpleNamespace(stops=frozenset()))
    drafts = select_texts([greedy] * anchors.size, proposals, drafter.kernels, with_evidence=True)
    known = [draft.evidence.chances for draft in drafts if draft.evidence is not None]
    return [*(draft.tokens for draft in drafts), *known]


def sections(drafter: Drafter, costs: dict[str, tuple[int, int]]) -> dict[str, list[Operation]]:
    d, a, K, dtype = 4096, 512, 16, mx.bfloat16
    network, kernels, record = drafter.network, drafter.kernels, partial(graph, drafter, costs)

    def injection(block: mx.array, anchor: mx.array) -> list[mx.array]:
        return list(network.inject(0, block, anchor, kernels))

    def table(u: mx.array, receiver: mx.array, candidates: mx.array) -> list[mx.array]:
        pairs = candidates[:-1], candidates[1:]
        return [network.transition_table(u, receiver, *pairs, drafter.target, kernels)]

    def whole(anchor: mx.array, features: mx.array) -> list[mx.array]:
        proposal = drafter.propose(anchor, features, drafter.make_cache())
        return [select(proposal, None, drafter.kernels).tokens]

    return {
        "injection, one layer": record(
            injection, mx.zeros((16, d), dtype), mx.zeros((2 * a,), dtype)
        ),
        "transition table": record(
            table, mx.zeros((14, d), dtype), mx.zeros((14, a), dtype), mx.zeros((15, K), mx.uint32)
        ),
        "whole draft round": record(
            whole, mx.array(7, mx.uint32), mx.zeros((1, CONTEXT, 5 * d), dtype)
        ),
        f"whole draft round, {TEXTS} texts": record(
            partial(texts_together, drafter),
            mx.arange(TEXTS, dtype=mx.uint32),
            mx.zeros((TEXTS, CONTEXT, 5 * d), dtype),
        ),
    }


def row(label: str, operations: list[Operation]) -> str:
    launches, moved, flops = (
        sum(getattr(o, field) for o in operations) for field in ("launches", "bytes", "flops")
    )
    times = [1e6 * sum(o.seconds(*chip) for o in operations) for chip in CHIPS.values()]
    cells = [label, str(launches), f"{moved / 1e6:.2f}", f"{flops / 1e6:.0f}"]
    return "| " + " | ".join([*cells, *(f"{t:.0f}" for t in times)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bits", type=int, default=0, help="of the drafter and head; 0: bfloat16")
    bits = parser.parse_args().bits
    mx.random.seed(0)
    costs = kernel_costs(bits)
    active = Trusting("auto")
    active.active = True
    plain = sections(drafter_of(OFF, bits), costs)
    fused = sections(drafter_of(active, bits), costs)
    print("| | launches | MB | MFLOP | " + " | ".join(f"{c}, us" for c in CHIPS) + " |")
    print("|---" * (4 + len(CHIPS)) + "|")
    for name in plain:
        print(row(f"{name}: plain", plain[name]))
        print(row(f"{name}: fused", fused[name]))
    for name, (moved, flops) in costs.items():
        print(row(f"kernel {name.removeprefix('dspine_')}", [Operation(name, 1, moved, flops)]))


if __name__ == "__main__":
    main()

"""Unpacking quantised weights once per verify forward, on a CPU with an optimised BLAS.

    LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3 \\
        python -m tests.bench.unpacked_rows [--bits 4 8] [--repeat 5]

MLX's CPU backend unpacks a quantised weight for every row; `kernels="auto"` races a product that
unpacks it once per forward where 1 and k rows differ anyway. Two targets in float32, packed to each
number of bits: the one that ships with its drafter, and a random one of 8 layers of 1024, whose
drafter knows the text and is wrong now and then. Whole calls with a fixed verify length, with the
race's products and with MLX's in turn (A B A B), then verify forwards by their rows. Measures this
machine, so leave it alone meanwhile.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.models import qwen3
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO, load_drafter
from dspine_mlx.measure.verify_steps import time_verify_steps
from dspine_mlx.target.equal_rows import blas_differs, differing_widths
from dspine_mlx.target.products import name
from dspine_mlx.target.race import Machine, Race
from dspine_mlx.target.row_kernels import RowKernels
from tests.support.families import scripted_drafter

PROMPT = "Maria has 9 toys. Her sister has 3 fewer toys. How many toys do they have together?"
LENGTHS, TOKENS, GROUP = (3, 7), 64, 64
Pair = tuple[str, nn.Module, Drafter]


def packed(model: nn.Module, bits: int) -> nn.Module:
    model.set_dtype(mx.float32)
    nn.quantize(model, GROUP, bits)
    mx.eval(model.parameters())
    return model


def pairs(bits: int, tokenizer: TokenizerWrapper, prompt: list[int]) -> Iterator[Pair]:
    shipped = packed(mlx_lm.load(str(DEMO / "target"))[0], bits)
    yield "shipped pair", shipped, load_drafter(DEMO / "drafter", shipped, kernels="off")
    args = qwen3.ModelArgs(
        model_type="qwen3", hidden_size=1024, num_hidden_layers=8, intermediate_size=3072,
        num_attention_heads=16, num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-6,
        vocab_size=2048, max_position_embeddings=4096, rope_theta=1e4, tie_word_embeddings=True,
    )  # fmt: skip
    mx.random.seed(0)
    large = packed(qwen3.Model(args), bits)
    plain = mlx_lm.stream_generate(large, tokenizer, prompt, max_tokens=TOKENS)
    text = prompt + [response.token for response in plain]
    yield "random, 8 layers of 1024", large, scripted_drafter(large, text, "now and then")


def raced(drafter: Drafter, widths: range) -> RowKernels:
    """What `load` would choose, however long the race takes; nothing is read from a file."""
    differing = differing_widths(drafter.target, widths)
    machine = replace(Machine.here(), differing=differing)
    kernels = RowKernels(drafter.target, Race("auto", machine))
    kernels.settle(widths, seconds=600.0)
    return kernels


def call(
    model: nn.Module, tokenizer: TokenizerWrapper, drafter: Drafter, prompt: list[int], length: int
) -> tuple[int, float]:
    """Tokens and seconds of a whole call."""
    begun, tokens = time.perf_counter(), 0
    for _ in dspine_mlx.stream_generate(
        model, tokenizer, prompt, drafter, max_tokens=TOKENS, verify_length=length, lookup=False
    ):
        tokens += 1
    return tokens, time.perf_counter() - begun


def measure(pair: Pair, tokenizer: TokenizerWrapper, prompt: list[int], repeat: int) -> None:
    title, model, drafter = pair
    kernels = raced(drafter, range(2, max(LENGTHS) + 2))
    off = RowKernels(drafter.target)
    for shape in kernels.shapes:
        won = [f"{w}: {name(v.product)}" for (of, w), v in kernels.verdicts.items() if of == shape]
        print(f"  {shape}: {', '.join(sorted(won, key=lambda part: int(part.split(':')[0])))}")
    for length in LENGTHS:
        times: dict[str, list[float]] = {"off": [], "auto": []}
        for turn in range(repeat + 1):  # the first is a warm-up
            for mode, chosen in (("off", off), ("auto", kernels)):
                drafter.target.verify_kernels = chosen
                tokens, took = call(model, tokenizer, drafter, prompt, length)
                times[mode] += [took] * (turn > 0)
        ratios = sorted(a / b for a, b in zip(times["off"], times["auto"], strict=True))
        off_seconds, seconds = median(times["off"]), median(times["auto"])
        print(
            f"  {title}, {length} offered: {tokens} tokens by MLX's products {off_seconds:.3f} s, "
            f"by the race's {seconds:.3f} s: {median(ratios):.2f} times as fast "
            f"({ratios[0]:.2f}-{ratios[-1]:.2f})"
        )
    drafter.target.verify_kernels = kernels
    steps = time_verify_steps(drafter)
    for label, seconds_by_rows in (("MLX's", steps.stock), ("race's", steps.kernels)):
        cells = [f"{w}: {1e3 * s:.1f}" for w, s in seconds_by_rows.items()]
        print(f"  {title}, ms of a verify forward by its rows, {label}: {', '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    if not blas_differs():
        raise InputError("1 and k rows have the same bits here; preload an optimised BLAS")
    _, tokenizer = mlx_lm.load(str(DEMO / "target"))
    messages = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    for bits in args.bits:
        print(f"{bits} bits, groups of {GROUP}, float32")
        for pair in pairs(bits, tokenizer, prompt):
            measure(pair, tokenizer, prompt, args.repeat)


if __name__ == "__main__":
    main()

"""Unpacking quantised weights once per verify forward, on a CPU with an optimised BLAS.

    LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3 \\
        python -m tests.bench.unpacked_rows [--bits 4 8] [--repeat 5] [--calls]

MLX's CPU backend unpacks a quantised weight for every row; `kernels="auto"` races a product that
unpacks it once per forward where 1 and k rows differ anyway. Two targets in float32, packed to each
number of bits: the one that ships with its drafter, and a random one of 4 layers of 1024. Verify
forwards of 2 to 16 rows, by MLX's products and by the race's in turn (A B, B A): the median of the
ratios, its range, and both medians. --calls: whole calls with a fixed verify length, too; the
random target's drafter knows the text and is wrong now and then. Measures this machine, so leave it
alone meanwhile.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO, load_drafter
from dspine_mlx.target.equal_rows import blas_differs, differing_widths
from dspine_mlx.target.products import name
from dspine_mlx.target.race import Machine, Race
from dspine_mlx.target.row_kernels import RowKernels
from tests.support.families import scripted_drafter

PROMPT = "Maria has 9 toys. Her sister has 3 fewer toys. How many toys do they have together?"
WIDTHS = (2, 3, 4, 6, 8, 12, 16)  # rows
CONTEXT = 64  # positions
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
        model_type="qwen3", hidden_size=1024, num_hidden_layers=4, intermediate_size=3072,
        num_attention_heads=16, num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-6,
        vocab_size=2048, max_position_embeddings=4096, rope_theta=1e4, tie_word_embeddings=True,
    )  # fmt: skip
    mx.random.seed(0)
    large = packed(qwen3.Model(args), bits)
    plain = mlx_lm.stream_generate(large, tokenizer, prompt, max_tokens=TOKENS)
    text = prompt + [response.token for response in plain]
    yield "random, 4 layers of 1024", large, scripted_drafter(large, text, "now and then")


def raced(drafter: Drafter, widths: Sequence[int]) -> RowKernels:
    """What `load` would choose, however long the race takes; nothing is read from a file."""
    differing = differing_widths(drafter.target, widths)
    machine = replace(Machine.here(), differing=differing)
    kernels = RowKernels(drafter.target, Race("auto", machine))
    kernels.settle(widths, seconds=600.0)
    return kernels


def chosen(kernels: RowKernels) -> Iterator[str]:
    for shape in kernels.shapes:
        won = sorted((w, name(v.product)) for (of, w), v in kernels.verdicts.items() if of == shape)
        yield f"  {shape}: {', '.join(f'{width}: {product}' for width, product in won)}"


def in_turn(
    run: Callable[[RowKernels], float], modes: tuple[RowKernels, RowKernels], repeat: int
) -> str:
    """The median of a / b over pairs of runs, after a warm-up, in words."""
    pairs = []
    for turn in range(repeat + 1):
        seconds = {kernels: run(kernels) for kernels in (modes if turn % 2 else modes[::-1])}
        pairs += [tuple(map(seconds.__getitem__, modes))] * (turn > 0)
    ratios = sorted(a / b for a, b in pairs)
    medians = (1e3 * median(times) for times in zip(*pairs, strict=True))
    stock, ours = medians
    return (
        f"{median(ratios):.2f} times as fast ({ratios[0]:.2f}-{ratios[-1]:.2f}), "
        f"{ours:.1f} ms for {stock:.1f}"
    )


def measure_forwards(pair: Pair, modes: tuple[RowKernels, RowKernels], repeat: int) -> None:
    title, model, drafter = pair
    tokens = mx.random.randint(0, drafter.target.vocab_size, (1, CONTEXT + max(WIDTHS)))
    cache = make_prompt_cache(model)
    mx.eval(model(tokens[:, :CONTEXT], cache=cache))

    def forward(kernels: RowKernels, rows: int) -> float:
        begun = time.perf_counter()
        with kernels.verifying(rows):
            mx.eval(model(tokens[:, CONTEXT : CONTEXT + rows], cache=cache))
        seconds = time.perf_counter() - begun
        trim_prompt_cache(cache, rows)
        return seconds

    for rows in WIDTHS:
        print(f"  {title}, {rows} rows: {in_turn(partial(forward, rows=rows), modes, repeat)}")


def measure_calls(
    pair: Pair,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    modes: tuple[RowKernels, RowKernels],
    repeat: int,
) -> None:
    title, model, drafter = pair

    def call(kernels: RowKernels, length: int) -> float:
        drafter.target.verify_kernels = kernels
        begun = time.perf_counter()
        for _ in dspine_mlx.stream_generate(
            model, tokenizer, prompt, drafter, max_tokens=TOKENS, verify_length=length, lookup=False
        ):
            pass
        return time.perf_counter() - begun

    for length in LENGTHS:
        words = in_turn(partial(call, length=length), modes, repeat)
        print(f"  {title}, {TOKENS} tokens, {length} offered: {words}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--calls", action="store_true")
    args = parser.parse_args()
    if not blas_differs():
        raise InputError("1 and k rows have the same bits here; preload an optimised BLAS")
    _, tokenizer = mlx_lm.load(str(DEMO / "target"))
    messages = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    for bits in args.bits:
        print(f"{bits} bits, groups of {GROUP}, float32")
        for pair in pairs(bits, tokenizer, prompt):
            drafter = pair[2]
            modes = RowKernels(drafter.target), raced(drafter, WIDTHS)
            print("\n".join(chosen(modes[1])), flush=True)
            measure_forwards(pair, modes, args.repeat)
            if args.calls:
                measure_calls(pair, tokenizer, prompt, modes, args.repeat)


if __name__ == "__main__":
    main()

"""Time to the first token of a long prompt, with and without a drafter that takes it in.

    python -m tests.bench.prefill_time [--model TARGET --draft-model DRAFTER] [--tokens 1024]

The two take turns; prints the medians, and the median and range of their ratios.
"""

import time
from collections.abc import Iterator
from statistics import median
from typing import Annotated, Any

import mlx.core as mx
import typer
from mlx_lm.generate import generate_step

from dspine_mlx.generate import stream_generate
from dspine_mlx.load import load


def seconds(run: Iterator[Any]) -> float:
    started = time.perf_counter()
    next(run)
    return time.perf_counter() - started


def main(
    model: Annotated[str | None, typer.Option(help="Target; none: the pair that ships.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Its drafter.")] = None,
    tokens: Annotated[int, typer.Option(help="Of the prompt.")] = 1024,
    repeat: Annotated[int, typer.Option(help="Turns.")] = 7,
) -> None:
    target, tokenizer, drafter = load(model, draft_model)
    assert drafter is not None
    prompt = mx.random.randint(4, min(1000, len(tokenizer.vocab)), (tokens,))
    options: dict[str, Any] = {"max_tokens": 1}
    times = []
    for _ in range(1 + repeat):
        plain = seconds(generate_step(prompt, target, **options))
        ours = seconds(
            stream_generate(target, tokenizer, prompt, drafter, verify_length=1, **options)
        )
        times.append((plain, ours))
    times = times[1:]  # the first turn warms up
    ratios = [ours / plain for plain, ours in times]
    plain, ours = (1e3 * median(column) for column in zip(*times, strict=True))
    print(f"{tokens} tokens: plain {plain:.1f} ms, with the drafter {ours:.1f} ms")
    print(f"ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    typer.run(main)

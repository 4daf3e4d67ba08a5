"""What the swap of layers costs the host: building a verify forward with it, in CPU time.

    MLX_DISABLE_COMPILE=1 python -m tests.bench.swap_time [--pairs 400]

36 quantised layers, every linear layer and every attention swapped, and stock chosen by each. Pairs
of runs, with the swap and without, in turn.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.metal.attention import Parts
from dspine_mlx.metal.rows import Tile
from dspine_mlx.target.model import Target
from dspine_mlx.target.products import STOCK
from dspine_mlx.target.race import Race, Verdict
from dspine_mlx.target.row_kernels import RowKernels
from dspine_mlx.target.verdicts import AttentionShape
from tests.support.families import build
from tests.support.racing import M2

LAYERS, CONTEXT, ROWS, WARM = 36, 1100, 8, 5


def all_swapped(target: Target) -> RowKernels:
    """Kernels for 7 rows, and for 8 the same layers swapped with stock chosen."""
    kernels = RowKernels(target, Race("auto", M2))
    for shape in kernels.all_shapes:
        kernel = Parts(4) if isinstance(shape, AttentionShape) else Tile(2, 8)
        kernels.verdicts[shape, ROWS - 1] = Verdict(kernel, "")
        kernels.verdicts[shape, ROWS] = Verdict(STOCK, "")
    kernels.arrange()
    kernels.swaps[ROWS] = kernels.swaps[ROWS - 1]
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=400)
    pairs_asked = parser.parse_args().pairs
    target = Target(build("qwen3", 4, num_hidden_layers=LAYERS))
    kernels, cache = all_swapped(target), make_prompt_cache(target.model)
    mx.eval(target.model(mx.random.randint(0, 2048, (1, CONTEXT)), cache=cache))
    ids = mx.random.randint(0, 2048, (1, ROWS))

    def seconds(context: Callable[[], AbstractContextManager[None]]) -> float:
        begun = time.process_time()
        with context():
            target.model(ids, cache=cache)
        taken = time.process_time() - begun
        for c in cache:
            c.trim(ROWS)
        mx.eval([c.state for c in cache])
        return taken

    contexts = nullcontext, partial(kernels.verifying, ROWS)
    pairs = []
    for i in range(WARM + pairs_asked):
        first, second = (seconds(contexts[(i + j) % 2]) for j in (0, 1))
        pairs.append((second, first) if i % 2 else (first, second))
    stock, swapped = (1e3 * median(times) for times in zip(*pairs[WARM:], strict=True))
    ratio = median(b / a for a, b in pairs[WARM:])
    print(f"{len(kernels.swaps[ROWS])} layers swapped; stock {stock:.2f} ms, swap {swapped:.2f} ms")
    print(f"median of the pairs' ratios: {ratio:.3f}")


if __name__ == "__main__":
    main()

"""What a pair's verify forwards cost by their number of rows: with MLX's products, and with the
kernels that it was loaded with, in turn."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.target.model import StockKernels
from dspine_mlx.verify_length.profile import DEPTHS, StepTimer

WIDTHS = (1, 2, 4, 8, 16, 32)
REPEATS, SECONDS = 3, 4.0  # at least so many, and further ones for about so long
MOST = 15


@dataclass(frozen=True)
class VerifySteps:
    """Seconds of a verify forward by its number of rows, after so many positions. kernels: empty
    where only MLX's products run; without the widths that may not be verified."""

    positions: int
    stock: dict[int, float]
    kernels: dict[int, float]


def time_verify_steps(
    drafter: Drafter, clock: Callable[[], float] = time.perf_counter
) -> VerifySteps:
    """Take medians of interleaved repeats after a warm-up, on separate caches."""
    timers = [StepTimer(drafter, StockKernels())]
    if drafter.target.verify_kernels.digest:
        timers.append(StepTimer(drafter))
    times: list[dict[int, list[float]]] = []
    for timer in timers:
        timer.deepen(DEPTHS[0])
        limit = min(drafter.most_offered + 1, timer.kernels.width_limit)
        times.append({width: [] for width in WIDTHS if width <= limit})
    for timer, widths in zip(timers, times, strict=True):
        for width in widths:  # the first run of a width may compile kernels
            timer.verify(width)
    begun, repeats = clock(), 0
    while repeats < REPEATS or (repeats < MOST and clock() - begun < SECONDS):
        repeats += 1
        for width in WIDTHS:
            for timer, widths in zip(timers, times, strict=True):
                if width in widths:
                    started = clock()
                    timer.verify(width)
                    widths[width].append(clock() - started)
    medians = [{w: median(seconds) for w, seconds in widths.items()} for widths in times]
    return VerifySteps(DEPTHS[0], medians[0], medians[1] if len(medians) > 1 else {})

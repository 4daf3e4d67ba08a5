"""Measuring a curve on this machine: a pair's steps, timed on separate caches."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.round.select import select
from dspine_mlx.target.kv_quantization import KVQuantization
from dspine_mlx.target.model import VerifyKernels
from dspine_mlx.target.rollback import deepen
from dspine_mlx.verify_length.costs import Curve

DEPTHS = (64, 2048)  # context positions at which a curve is measured
PLAIN = 12  # tokens of plain decoding timed together: the CPU's caches are cold for the first
SECONDS = 3.0  # a measurement stops repeating after about this long
NOTHING = 1e-9  # seconds of a draft where nothing is drafted; costs must be above 0
ROW = 0.1  # a guess: cost of a further row, as a share of the first


def guess(drafter: Drafter) -> Curve:
    """Assume weights read at 100 GB/s, and nearly free rows. Real steps correct scale and shape."""
    target, own = (
        sum(value.nbytes for _, value in tree_flatten(m.parameters()))
        for m in (drafter.target.model, drafter.network)
    )
    plain, draft = 1e-11 * target, 1e-11 * max(0.05 * target, own)
    if not drafter.config.num_proposals:
        draft = NOTHING
    rows = tuple(plain * (1 + ROW * n) for n in range(drafter.most_offered + 1))
    deep = tuple(1.1 * row for row in rows)
    return Curve(DEPTHS, (plain, 1.1 * plain), (draft, draft), (rows, deep), measured=False)


def measure(drafter: Drafter, seconds: float = SECONDS) -> Curve:
    """Take median times of interleaved repetitions after a warm-up, on separate caches."""
    timer = StepTimer(drafter)
    all_widths = list(range(1, drafter.most_offered + 2))
    some = sorted({1, 2, (1 + len(all_widths)) // 2, len(all_widths)})
    low = timer.medians(DEPTHS[0], all_widths, 0.7 * seconds)
    high = timer.medians(DEPTHS[1], some, 0.3 * seconds)
    timer.rollback.end()
    slopes = np.interp(all_widths, some, [max(0.0, high[w] - low[w]) for w in some])
    return Curve(
        DEPTHS,
        (low["plain"], max(high["plain"], low["plain"])),
        (low["draft"], max(high["draft"], low["draft"])),
        (
            tuple(low[w] for w in all_widths),
            tuple(low[w] + float(s) for w, s in zip(all_widths, slopes, strict=True)),
        ),
    )


def step_seconds(
    drafter: Drafter, widths: list[int], seconds: float = 1.0
) -> dict[int | str, float]:
    """Median seconds of a "draft", of a "plain" token, and of verify forwards of these widths."""
    timer = StepTimer(drafter)
    found = timer.medians(DEPTHS[0], widths, seconds)
    timer.rollback.end()
    return found


class StepTimer:
    """Steps of a pair on scratch caches. kernels: of its verify forwards, if not the target's."""

    def __init__(self, drafter: Drafter, kernels: VerifyKernels | None = None):
        self.drafter, self.target = drafter, drafter.target
        self.kernels = kernels or self.target.verify_kernels
        self.cache = make_prompt_cache(self.target.model)
        self.draft_cache = drafter.make_cache()
        self.rollback = drafter.verifier.rollback(self.cache, KVQuantization(), drafter.taps)
        self.forward(8)
        drafter.extend(self.features, self.draft_cache)

    def forward(self, width: int, eager_taps: bool = False, more: bool = False) -> mx.array:
        tokens = mx.zeros((width,), mx.uint32)
        self.rollback.feeding(width, more)
        logits, self.features = self.target.forward(
            tokens, self.cache, self.drafter.taps, eager_taps
        )
        return mx.argmax(logits, axis=-1)

    def verify(self, width: int) -> None:
        """Run a verify forward and roll back to half of it, which recurrent layers replay."""
        self.rollback.checkpoint()
        drafted = mx.zeros((width,), mx.uint32)
        with self.rollback.verifying(drafted), self.kernels.verifying(width):
            predicted = self.forward(width, eager_taps=True)
        mx.eval(predicted, self.features)
        self.rollback.accept((width + 1) // 2)
        mx.eval([c.state for c in self.cache])
        self.rollback.accept(0)

    def draft(self) -> None:
        proposal = self.drafter.propose(0, self.features[:, :2], self.draft_cache)
        draft = select(proposal, kernels=self.drafter.kernels)
        mx.eval(draft.tokens, draft.evidence)
        for c in self.draft_cache:
            c.trim(min(2, self.features.shape[1]))

    def plain(self, tokens: int = PLAIN) -> None:
        """Decode tokens plainly, pipelined: the next forward runs while a token is read."""
        self.rollback.checkpoint()
        following = self.forward(1, more=tokens > 1)
        mx.async_eval(following)
        for left in range(tokens - 2, -1, -1):
            token, following = following, self.forward(1, more=left > 0)
            mx.async_eval(following)
            mx.eval(token)
        mx.eval(following)
        self.rollback.accept(0)

    def deepen(self, depth: int) -> None:
        """Fill the attention caches up to depth positions."""
        self.rollback.deepen(depth)
        deepen(self.draft_cache, depth)
        mx.eval([c.state for c in self.draft_cache])

    def medians(self, depth: int, widths: list[int], seconds: float) -> dict[int | str, float]:
        self.deepen(depth)
        steps: dict[int | str, Callable[[], None]] = {"plain": self.plain, "draft": self.draft}
        if not self.drafter.config.num_proposals:
            del steps["draft"]
        steps |= {width: partial(self.verify, width) for width in widths}
        times: dict[int | str, list[float]] = {name: [] for name in steps}
        for step in steps.values():  # the first run of a width may compile kernels
            step()
        started = time.perf_counter()
        while len(times["plain"]) < 7 and (
            len(times["plain"]) < 3 or time.perf_counter() - started < seconds
        ):
            for name, step in steps.items():
                begun = time.perf_counter()
                step()
                times[name].append(max(time.perf_counter() - begun, 1e-9))
        medians = {name: statistics.median(values) for name, values in times.items()}
        return {"draft": NOTHING} | medians | {"plain": medians["plain"] / PLAIN}

"""Measuring what steps of several texts cost on this machine, and the file that keeps it."""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.batch.batch import Batch
from dspine_mlx.batch.costs import BatchCosts, BatchCurve
from dspine_mlx.batch.plain import step
from dspine_mlx.batch.text import BatchText
from dspine_mlx.cache_folder import reading
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.round.select import Draft
from dspine_mlx.round.text import Text
from dspine_mlx.verify_length import store
from dspine_mlx.verify_length.costs import Curve
from dspine_mlx.verify_length.schedule import MINUTE, Schedule
from dspine_mlx.verify_length.store import describe, digest, keep, pair_key

log = logging.getLogger(__name__)
SIZES = {1: (1, 2, 4, 8, 16), 4: (1, 2, 4, 8, 16), 16: (1, 2, 3, 4, 6, 8)}  # texts: rows of each
PROMPT, DEEP = 8, 512  # positions of each text at the two depths
APART = 4.0  # what depth adds differs from so many single texts' by this factor, at most
RISES = {"plain": 0, "draft": -1}  # where a curve's lines have them; verify widths: by the rows
PLAIN = 4  # steps of plain decoding timed together
SECONDS = 4.0  # a measurement stops repeating, and leaves out more texts, after about this long
Seconds = dict[tuple[str, int], float]  # of a step: "plain", "draft", "verify", and its width


def measure(drafter: Drafter, one: Curve, seconds: float = SECONDS) -> list[BatchCurve]:
    """Curves of some numbers of texts, at two depths."""
    started, curves = time.perf_counter(), list[BatchCurve]()
    for texts, widths in SIZES.items():
        if curves and time.perf_counter() - started > seconds:
            break
        most = drafter.config.num_proposals + 1
        widths = tuple(sorted({min(w, most) for w in widths}))
        steps = Steps(drafter, texts)
        times = medians(steps, widths, 0.75 * seconds / len(SIZES))
        steps.deepen()
        deep = medians(steps, widths[:: len(widths) - 1], 0.25 * seconds / len(SIZES))
        curves.append(as_curve(texts, times, deep, one, most))
    return curves


def as_curve(texts: int, times: Seconds, deep: Seconds, one: Curve, most: int) -> BatchCurve:
    """A curve over all widths up to the most, from the times of some, and of fewer at DEEP."""
    widths = np.arange(1, most + 1)

    def over(step: str, times: Seconds) -> np.ndarray:
        known = sorted(width for name, width in times if name == step)
        found = [times[step, width] for width in known]
        inside = np.interp(widths, known, found)
        rise = max(0.0, (found[-1] - found[0]) / max(1, known[-1] - known[0]))
        return inside + rise * np.maximum(0, widths - known[-1])

    def rise(at: int, before: float, after: float) -> float:
        """What depth adds: as measured, near to what it adds to so many single texts."""
        (first, second), (low, high) = one.depths, one.steps[at]
        expected = texts * max(0.0, high - low) * (DEEP - PROMPT) / (second - first)
        return min(max(after - before, expected / APART), APART * expected + before / 10)

    added = dict[tuple[str, int], float]()
    for (name, width), seconds in deep.items():
        added[name, width] = rise(RISES.get(name, width), times[name, width], seconds)
    verify, draft, plain = over("verify", times), over("draft", times)[1:], times["plain", 1]
    lower, last = verify + over("verify", added), float(draft[-1])
    return BatchCurve(
        texts,
        Curve(
            (PROMPT, DEEP),
            (plain, plain + added["plain", 1]),
            (last, last + max(s for (name, _), s in added.items() if name == "draft")),
            (tuple(verify.tolist()), tuple(lower.tolist())),
        ),
        tuple((draft / last).tolist()),
    )


class Steps:
    """Steps of several texts on scratch caches."""

    def __init__(self, drafter: Drafter, texts: int):
        self.drafter, self.batch = drafter, Batch(drafter)
        prompt = mx.zeros((PROMPT,), mx.uint32)
        for _ in range(texts):
            caches = [*make_prompt_cache(drafter.target.model), *drafter.make_cache()]
            text = Text(drafter, caches)
            for _ in text.prefill(prompt, PROMPT):
                pass
            self.batch.join(BatchText(text, float("inf")))
        self.drafts = self.drafted(None)

    def verify(self, width: int) -> None:
        _, logits = self.batch.verify(self.drafts, width - 1)
        mx.eval(mx.argmax(logits, axis=-1), self.batch.features)
        self.take_back()

    def plain(self) -> None:
        """Some steps, each started before the one before is read."""
        lengths = [group.lengths for group in self.batch.groups]
        ahead = step(self.batch, self.batch.anchors)
        for _ in range(PLAIN - 1):
            for group in self.batch.groups:
                group.target.accept([1] * len(group.lengths))
            this, ahead = ahead, step(self.batch, ahead.tokens)
            mx.eval(this.tokens)
        mx.eval(ahead.tokens, ahead.logprobs)
        self.take_back()
        for group, before in zip(self.batch.groups, lengths, strict=True):
            group.target.lengths.replace(before)

    def draft(self, width: int) -> None:
        mx.eval([[draft.tokens, draft.evidence] for draft in self.drafted(width - 1)])

    def drafted(self, slots: int | None) -> list[Draft]:
        return self.batch.draft(slots, with_evidence=True)

    def deepen(self) -> None:
        """Go on as if the texts were DEEP positions long; what is in their caches does not matter
        here, and room for it is made by the next forward."""
        for group in self.batch.groups:
            group.target.lengths.replace([DEEP] * len(group.lengths))
            group.context.lengths.replace([DEEP] * len(group.drafted))

    def take_back(self) -> None:
        for group in self.batch.groups:
            group.target.cancel()


def medians(steps: Steps, widths: Sequence[int], seconds: float) -> Seconds:
    """Median times of interleaved repetitions after a warm-up."""
    runs: dict[tuple[str, int], Callable[[], None]] = {("plain", 1): steps.plain}
    runs |= {("verify", width): partial(steps.verify, width) for width in widths}
    runs |= {("draft", width): partial(steps.draft, width) for width in widths if width > 1}
    times: dict[tuple[str, int], list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    started = time.perf_counter()
    while len(times["plain", 1]) < 5 and (
        not times["plain", 1] or time.perf_counter() - started < seconds
    ):
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            times[name].append(max(time.perf_counter() - begun, 1e-9))
    found = {name: statistics.median(values) for name, values in times.items()}
    return found | {("plain", 1): found["plain", 1] / PLAIN}


def batch_curves(
    drafter: Drafter, schedule: Schedule
) -> tuple[list[BatchCurve], Callable[[BatchCosts], None]]:
    """A pair's curves of several texts, from their file or measured now, and what keeps them up to
    date there. Where one text's costs are a guess or not kept, so are these."""
    if not schedule.costs.curve.measured:
        return [], lambda costs: None
    curves = read(drafter)
    if not curves:
        curves = measure(drafter, schedule.costs.learnt())
        if contradiction(curves):
            curves = measure(drafter, schedule.costs.learnt())
        if contradiction(curves):
            log.warning("the measured costs are not kept: %s", contradiction(curves))
        elif schedule.keep:
            write(drafter, curves)
    return curves, Keeper(drafter) if schedule.keep else lambda costs: None


def contradiction(curves: list[BatchCurve]) -> str:
    """A sign, in words, of other programs running while they were measured; else ""."""
    said = (one.curve.contradiction() for one in curves)
    return next((words for words in said if words), "")


class Keeper:
    """Writes what a process has learnt, seldom, and not while something else disturbs it."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.kept_at = drafter, time.monotonic()

    def __call__(self, costs: BatchCosts) -> None:
        now = time.monotonic()
        if now - self.kept_at >= MINUTE and not costs.disturbed:
            self.kept_at = now
            write(self.drafter, costs.learnt())


def path_of(drafter: Drafter) -> Path:
    return store.cache_folder() / f"batch-{digest(pair_key(drafter))}.json"


def read(drafter: Drafter) -> list[BatchCurve]:
    """The curves on file; none without a usable file."""
    path = path_of(drafter)
    if not path.is_file():
        return []
    try:
        with reading(path) as data:
            curves = [BatchCurve.from_dict(one) for one in data["curves"]]
            if data["key"] != pair_key(drafter) or [c.texts for c in curves[:1]] != [1]:
                raise InputError("it belongs to another pair")
            for one in curves:
                if len(one.shares) != drafter.config.num_proposals:
                    raise InputError("it has another number of drafted tokens")
            if contradiction(curves):
                raise InputError(contradiction(curves))
    except InputError as error:
        log.warning("%s can't be used (%s); these costs are measured again", path, error)
        return []
    return curves


def write(drafter: Drafter, curves: list[BatchCurve]) -> None:
    data = {"key": pair_key(drafter), "pair": describe(drafter)}
    keep(path_of(drafter), data | {"curves": [asdict(one) for one in curves]})

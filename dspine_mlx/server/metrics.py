"""The server's counters, in Prometheus' text format (version 0.0.4)."""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any

import mlx.core as mx

from dspine_mlx.server.call import Call

LAST = 20  # requests that the page lists
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
ACCEPTED = tuple(float(n) for n in (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15))


class Histogram:
    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{name}_bucket{{le="{le}"}} {total}'
        yield f"{name}_sum {self.sum:.9g}"
        yield f"{name}_count {total}"


class Metrics:
    """Counters that only grow; `finish` counts a call when its HTTP thread is done."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.requests: Counter[tuple[str, int]] = Counter()
        self.tokens: Counter[str] = Counter()
        self.drafts: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.accepted = Histogram(ACCEPTED)
        self.rounds, self.first_token = Histogram(SECONDS), Histogram(SECONDS)
        self.recent: deque[dict[str, Any]] = deque(maxlen=LAST)  # figures, the newest first

    def refuse(self, status: int) -> None:
        """Count a request that never reached the generator."""
        with self.lock:
            self.requests["refused", status] += 1

    def finish(self, call: Call) -> None:
        with self.lock:
            self.recent.appendleft({"ended": time.time()} | call.figures())
            self.requests[call.path, call.failure.status if call.failure else 200] += 1
            if call.context is not None:
                cached = max(0, call.context.prompt_cache_count)
                self.tokens["prompt"] += len(call.prompt)
                self.tokens["cached"] += cached
            self.tokens["generated"] += len(call.tokens)
            if call.drafted:
                self.tokens["speculative"] += len(call.tokens)
                self.tokens["parked"] += call.statistics.plain
            self.steps["shared"] += call.shared_steps
            self.steps["alone"] += call.steps_alone
            self.steps["texts"] += call.steps_alone + call.shared_texts
            self.drafts["drafted"] += call.statistics.drafted
            self.drafts["accepted"] += call.statistics.accepted
            histogram = dict(call.statistics.accepted_histogram)  # it may still change
            for accepted, rounds in histogram.items():
                self.accepted.observe(accepted, rounds)
            for seconds in call.times(sum(histogram.values())):
                self.rounds.observe(seconds)
            if call.first_token is not None:
                self.first_token.observe(call.first_token)

    def text(self, gauges: Mapping[str, float]) -> str:
        with self.lock:
            share = self.tokens["parked"] / max(1, self.tokens["speculative"])
            steps = self.steps["shared"] + self.steps["alone"]
            texts = self.steps["texts"] / steps if steps else 0.0
            own = {"parked_share": share, "texts_per_step": texts}
            lines = [*self.lines(), *self.gauges({**gauges, **own})]
        return "\n".join(lines) + "\n"

    def lines(self) -> Iterator[str]:
        yield from head("requests_total", "counter", "Requests by decoding path and HTTP status.")
        for (path, status), n in sorted(self.requests.items()):
            yield f'dspine_requests_total{{path="{path}",status="{status}"}} {n}'
        yield from head(
            "tokens_total",
            "counter",
            "Tokens of prompts; found in the cache; generated, thereof in requests with a drafter, "
            "thereof without a draft.",
        )
        for kind in ("prompt", "cached", "generated", "speculative", "parked"):
            yield f'dspine_tokens_total{{kind="{kind}"}} {self.tokens[kind]}'
        yield from head(
            "steps_total", "counter", "Steps of requests: by themselves, and shared with others."
        )
        for kind in ("alone", "shared"):
            yield f'dspine_steps_total{{kind="{kind}"}} {self.steps[kind]}'
        yield from head("draft_tokens_total", "counter", "Tokens offered to the target, and kept.")
        for kind in ("drafted", "accepted"):
            yield f'dspine_draft_tokens_total{{kind="{kind}"}} {self.drafts[kind]}'
        for name, histogram, text in (
            ("accepted_tokens", self.accepted, "Drafted tokens accepted per round."),
            ("round_seconds", self.rounds, "Time from one block's last token to the next block."),
            ("first_token_seconds", self.first_token, "Time from request to first token."),
        ):
            yield from head(name, "histogram", text)
            yield from histogram.lines(f"dspine_{name}")

    @staticmethod
    def gauges(gauges: Mapping[str, float]) -> Iterator[str]:
        memory = {
            "memory_active_bytes": mx.get_active_memory(),
            "memory_cache_bytes": mx.get_cache_memory(),
            "memory_peak_bytes": mx.get_peak_memory(),
        }
        for name, value in {**gauges, **memory}.items():
            yield from head(name, "gauge", name.replace("_", " ").capitalize() + ".")
            yield f"dspine_{name} {value:.9g}"


def head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP dspine_{name} {text}"
    yield f"# TYPE dspine_{name} {kind}"

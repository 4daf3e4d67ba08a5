"""Predicts what drafting gains in a group, for docs/distributed.md: nothing here is measured.

    python -m tests.bench.group_gain

A plain token costs C / N + A (a + m): C one row on one machine, A collectives (two per layer) of
latency a, each moving a row of m seconds. A round of l drafted tokens costs r(1 + l) C / N +
A (a + (1 + l) m) + D + a, with r(w) the bytes that w rows read over those of one, and makes
(1 - p^(l + 1)) / (1 - p) tokens if each drafted token is accepted with chance p. The best l is
taken. Rooflines, so speeds are upper bounds; experts are chosen independently, which is too many.
"""

from collections.abc import Callable
from dataclasses import dataclass

BANDWIDTH, WIRE, DRAFT = 600e9, 5e9, 4e-3  # bytes per second of memory and network; seconds
LATENCIES = (10e-6, 30e-6, 100e-6, 300e-6)
LONGEST = 16


@dataclass(frozen=True)
class Target:
    name: str
    layers: int
    hidden_size: int
    one_row: float  # bytes read
    growth: Callable[[int], float]  # r(w)


def experts(shared: float, routed: float, share: float) -> Callable[[int], float]:
    """r(w) of a mixture: parameters that all rows read, those of all experts, and the share of
    them that a row picks."""

    def growth(rows: int) -> float:
        return (shared + routed * (1 - (1 - share) ** rows)) / (shared + routed * share)

    return growth


TARGETS = (
    Target("Qwen3-235B-A22B, 4 bits", 94, 4096, 22e9 * 0.5625, experts(7.8, 227.0, 8 / 128)),
    Target("a dense 70B, 8 bits", 80, 8192, 70e9 * 1.0625, lambda rows: 1.0),
)


def gain(target: Target, ranks: int, latency: float, chance: float) -> tuple[float, int]:
    """The speed-up over plain decoding in the same group, and the best length; 0 is parked."""
    one = target.one_row / BANDWIDTH / ranks
    collectives = 2 * target.layers if ranks > 1 else 0
    row = target.hidden_size * 2 / WIRE
    plain = one + collectives * (latency + row)
    best = (1.0, 0)
    for length in range(1, LONGEST + 1):
        message = latency if ranks > 1 else 0.0
        wire = collectives * (latency + (1 + length) * row) + message
        seconds = target.growth(1 + length) * one + wire + DRAFT
        tokens = (1 - chance ** (length + 1)) / (1 - chance)
        best = max(best, (tokens * plain / seconds, length))
    return best


def main() -> None:
    for target in TARGETS:
        for chance in (0.7, 0.85):
            for ranks in (1, 2, 4):
                cells = [gain(target, ranks, latency, chance) for latency in LATENCIES]
                shown = " | ".join(f"{speed:.2f} ({length})" for speed, length in cells)
                print(f"| {target.name}, p {chance} | {ranks} | {shown} |")


if __name__ == "__main__":
    main()

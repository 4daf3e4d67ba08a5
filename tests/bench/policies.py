"""A policy against plain decoding and the best fixed length, over made-up texts and cost curves.

    python -m tests.bench.policies [--seeds SEED ...] [--believed NAME] [--scale FACTOR]

Families of texts (easy, hard, turning, with evidence that says nothing or lies, sampled ...) are
replayed on all curves of curves.json and two more. Every number is a simulation. The seeds of an
evaluation are FRESH: nothing was tuned on them; rules and constants were chosen on others.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from dspine_mlx.round.policy import Policy
from dspine_mlx.verify_length.auto import Auto
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.costs import Costs, Curve
from tests.bench.simulate import (
    CURVES,
    HERE,
    Machine,
    Trace,
    curve_of,
    fixed_seconds,
    load_trace,
    made_up,
    made_up_sampled,
    replay,
)

FRESH = (62_000, 63_000, 64_000)  # of texts, chosen before the first run on them
SMALL: dict[str, Any] = {
    "name": "small target, 2 ms per step", "step_ms": 2.0, "draft": 0.35, "kv_ms_per_1k": 0.05,
    "rows": {"1": 1, "4": 1.05, "8": 1.15, "16": 1.5},
}  # fmt: skip
DEAR: dict[str, Any] = {
    "name": "dear drafts (shipped pair, float16, 2-core CPU)", "step_ms": 6.7, "draft": 3.91,
    "kv_ms_per_1k": 0.5, "rows": {"1": 1.28, "16": 4.61},
}  # fmt: skip
ENTRIES = [*CURVES, SMALL, DEAR]
Make = Callable[[Curve, int, Callable[[], float]], Policy]  # costs on file, slots, clock


def families(seed: int) -> dict[str, list[Trace]]:
    def texts(ease: float, informed: float = 1.0, n: int = 3, tokens: int = 400) -> list[Trace]:
        return [made_up(tokens, 7, ease, seed + s, informed) for s in range(n)]

    def sampled(ease: float) -> list[Trace]:
        return [made_up_sampled(400, 7, ease, seed + s) for s in range(3)]

    def shifted(traces: list[Trace], odds: float) -> list[Trace]:
        return [trace.shifted(odds) for trace in traces]

    noise = np.random.default_rng(seed).normal(0.5, 1.5, (4, 300, 7))
    turns = [made_up(400, 7, ease, seed + n) for n, ease in enumerate((2.5, -5.0, 2.5))]
    mixed = (2.0, -4.0, 1.5, -4.0, 2.0, 0.0, -4.0, 1.0)
    return {
        "recorded": load_trace(HERE / "demo_trace.npz"),
        "easy": texts(2.5),
        "good": texts(1.5),
        "middling": texts(0.5),
        "poor": texts(-0.5),
        "hard": texts(-3.0),
        "uninformed": texts(1.2, 0.0),
        "overconfident": shifted(texts(-4.0), 4.0),
        "underconfident": shifted(texts(1.5), -4.0),
        "turning": [turns[0] + turns[1] + turns[2]],
        "mixed": [made_up(150, 7, ease, seed + n) for n, ease in enumerate(mixed)],
        "useless": [Trace(block.tolist(), [0] * 300) for block in noise],
        "short and hard": shifted(texts(-3.0, n=16, tokens=60), 3.0),
        "sampled, good": sampled(1.5),
        "sampled, middling": sampled(0.7),
        "sampled, hard": sampled(-2.5),
        "sampled, overconfident": shifted(sampled(0.0), 1.5),
    }


def auto(curve: Curve, slots: int, clock: Callable[[], float]) -> Policy:
    return Auto(Costs(curve), uncalibrated(slots), clock=clock)


def speeds(
    make: Make, name: str, traces: list[Trace], curve: Curve, believed: Curve, seed: int
) -> tuple[float, float]:
    """Over plain decoding, and over the best fixed length."""
    machine = Machine(curve, seed=seed)
    policy = make(believed, traces[0].slots, machine.clock)
    temp = 1.0 if name.startswith("sampled") else 0.0
    seconds = sum(replay(trace, policy, machine, temp=temp) for trace in traces)
    fixed = [fixed_seconds(traces, curve, n) for n in range(traces[0].slots + 1)]
    return fixed[0] / seconds, min(fixed) / seconds


def evaluate(
    make: Make, seeds: tuple[int, ...], believed: str = "", scale: float = 1.0
) -> dict[tuple[str, str, int], tuple[float, float]]:
    """By family, curve and seed. believed: the curve on file, else the true one times `scale`."""
    found = {}
    for seed in seeds:
        for name, traces in families(seed).items():
            for entry in ENTRIES:
                M = traces[0].slots
                curve = curve_of(entry, M)
                other = next((e for e in ENTRIES if e["name"] == believed), entry)
                factors = [scale] + [1.0] * (M + 2)  # plain decoding's alone
                on_file = curve_of(other, M).scaled(factors)
                key = (name, entry["name"], seed)
                found[key] = speeds(make, name, traces, curve, on_file, seed)
    return found


def summary(found: dict[tuple[str, str, int], tuple[float, float]]) -> str:
    plain, fixed = np.array(list(found.values())).T
    worst = min(found, key=lambda key: found[key][0])
    least = min(found, key=lambda key: found[key][1])
    return (
        f"{len(plain)} pairs: over the best fixed length mean {fixed.mean():.4f}, worst "
        f"{fixed.min():.3f} ({', '.join(map(str, least))}); over plain decoding worst "
        f"{plain.min():.3f} ({', '.join(map(str, worst))}), below .98 in {(plain < 0.98).sum()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=FRESH)
    parser.add_argument("--believed", default="", help="a curve's name: the costs on file")
    parser.add_argument("--scale", type=float, default=1.0, help="of plain decoding's on file")
    args = parser.parse_args()
    found = evaluate(auto, tuple(args.seeds), args.believed, args.scale)
    print(summary(found))
    for name in dict.fromkeys(key[0] for key in found):
        plain, fixed = np.array([v for key, v in found.items() if key[0] == name]).T
        print(f"  {name:24} over fixed {fixed.mean():.3f}, over plain at least {plain.min():.3f}")


if __name__ == "__main__":
    main()

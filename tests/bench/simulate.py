"""What the policy would do on machines one does not have: recorded rounds against any cost curve.

    python -m tests.bench.simulate [--curve NAME] [--trace FILE.npz] [--depth 512] [--explain]
    python -m tests.bench.simulate --record FILE.npz [--model M --draft-model D] PROMPTS.txt

A trace holds, for every position of greedy texts, the evidence of the block drafted there and how
many of its tokens the text has: greedy text does not depend on the lengths, so replaying is exact.
The policy is the real one, on a clock of its own that each step moves by the curve. curves.json has
published costs of Apple chips (relative costs of rows, scaled to a step; attention's share of each
row grows with the context). Nothing in it was measured here but the last entry.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dspine_mlx.round.select import Draft, Evidence
from dspine_mlx.round.statistics import Statistics
from dspine_mlx.verify_length.calibration import Calibration, fit, sigmoid, uncalibrated
from dspine_mlx.verify_length.costs import Costs, Curve
from dspine_mlx.verify_length.schedule import Auto, Fixed, Policy

HERE = Path(__file__).parent
DEPTHS = (512, 16384)


@dataclass
class Trace:
    """One text: at each position the evidence [n, M] of a block and the tokens [n] that stand."""

    evidence: np.ndarray
    stands: np.ndarray

    def draft(self, position: int, with_evidence: bool = True) -> Draft:
        """Token 1 stands for agreement: the watched text is all ones."""
        M = self.evidence.shape[1]
        tokens = np.where(np.arange(M) < self.stands[position], 1, 0)
        draft = Draft(mx.array(tokens), mx.array(tokens[:, None]), None)
        if not with_evidence:
            return draft
        chances = mx.array(sigmoid(self.evidence[position]))
        return draft._replace(evidence=Evidence(draft.tokens, chances))


def curve_of(entry: dict[str, Any], slots: int) -> Curve:
    """Seconds of a published entry, for blocks of some slots."""
    widths = np.arange(1, slots + 2)
    known = np.array([int(w) for w in entry["rows"]])
    step, attention = entry["step_ms"] / 1e3, entry["kv_ms_per_1k"] / 1e3 * DEPTHS[1] / 1e3
    low = step * np.interp(widths, known, list(entry["rows"].values()))
    high = low + attention * widths
    draft = entry["draft"] * step
    return Curve(
        DEPTHS,
        (step, step + attention),
        (draft, draft * 1.2),
        (tuple(low.tolist()), tuple(high.tolist())),
    )


@dataclass
class Machine:
    """A clock that steps move by their cost, times a noise that they can't foresee; and the sum of
    the costs, which tells policies apart without that noise."""

    curve: Curve
    noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        self.now = self.spent = 0.0
        self.rng = np.random.default_rng(self.seed)

    def take(self, seconds: float) -> float:
        self.spent += seconds
        seconds *= float(np.exp(self.noise * self.rng.standard_normal()))
        self.now += seconds
        return seconds


def replay(trace: Trace, policy: Policy, machine: Machine, start: int) -> float:
    """Expected seconds of the whole text under a policy, from a context of `start` positions on."""
    begun, i, n = machine.spent, 0, len(trace.stands)
    statistics = Statistics()
    policy.start_text(statistics, lambda x: x, start)
    while i < n:
        depth = start + i
        plain, *rows, draft = machine.curve.at(depth)
        if policy.parked:
            if policy.probe_due(depth):
                policy.start_probe(trace.draft(i))
                machine.take(draft)
            waiting = machine.now
            machine.take(plain)
            policy.plain_token(1, mx.array(0), waiting, depth)
            i += 1
            continue
        limit = min(trace.evidence.shape[1], n - i - 1)
        length = policy.length(
            trace.draft(i, policy.needs_evidence), limit, depth, machine.take(draft)
        )
        machine.take(rows[length])
        stood = int(min(length, trace.stands[i]))
        policy.learn(stood, length)
        row = mx.array(0)
        statistics.record(length, [*[(1, row, True)] * stood, (1, row, False)])
        i += stood + 1
    return machine.spent - begun


def compare(
    traces: list[Trace], curve: Curve, calibrated: bool = False, start: int = 512
) -> dict[str, float]:
    """Speed over plain decoding of the policy, over the texts in turn, and of fixed lengths.

    calibrated: fitted on every other text for the rest, both ways round, in place of nothing.
    """
    M = traces[0].evidence.shape[1]
    machine = Machine(curve)

    def seconds(policy: Policy, traces: list[Trace]) -> float:
        return sum(replay(trace, policy, machine, start) for trace in traces)

    def auto(calibration: Calibration) -> Policy:
        return Auto(Costs(curve), calibration, clock=lambda: machine.now)

    times = {str(n): seconds(Fixed(n), traces) for n in range(M + 1)}
    if calibrated:
        halves = traces[::2], traces[1::2]
        times["auto"] = sum(
            seconds(auto(fitted(other)), half)
            for half, other in zip(halves, reversed(halves), strict=True)
        )
    else:
        times["auto"] = seconds(auto(uncalibrated(M)), traces)
    return {name: times["0"] / s for name, s in times.items()}


def fitted(traces: list[Trace]) -> Calibration:
    evidence = np.concatenate([trace.evidence for trace in traces])
    return fit(evidence, np.concatenate([trace.stands for trace in traces]))


def made_up(tokens: int, slots: int, ease: float, seed: int, informed: float = 1.0) -> Trace:
    """Evidence that is true (times `informed`, 0: says nothing), in a text whose ease wanders."""
    rng = np.random.default_rng(seed)
    wander = np.convolve(rng.standard_normal(tokens + 40), np.ones(40) / 40**0.5, "valid")[:tokens]
    slot = -0.15 * np.arange(slots)
    log_odds = ease + 1.2 * wander[:, None] + slot + 1.5 * rng.standard_normal((tokens, slots))
    stood = rng.uniform(size=log_odds.shape) < 1 / (1 + np.exp(-log_odds))
    mean = np.log(stood.mean() / (1 - stood.mean()))
    evidence = informed * log_odds + (1 - informed) * mean
    return Trace(evidence, np.cumprod(stood, axis=1).sum(axis=1))


def load_trace(path: Path) -> list[Trace]:
    data = np.load(path)
    ends = np.cumsum(data["lengths"])[:-1]
    parts = zip(np.split(data["evidence"], ends), np.split(data["stands"], ends), strict=True)
    return [Trace(evidence.astype(float), stands) for evidence, stands in parts]


def record(model: Any, tokenizer: Any, drafter: Any, prompt: str, tokens: int) -> Trace:
    """Draft at every position of the target's greedy text."""
    from mlx_lm import stream_generate
    from mlx_lm.models.cache import make_prompt_cache

    from dspine_mlx.round.select import select

    given = tokenizer.encode(prompt)
    text = [*given, *(r.token for r in stream_generate(model, tokenizer, given, max_tokens=tokens))]
    taps = drafter.config.target_layer_ids
    _, features = drafter.target.forward(mx.array(text), make_prompt_cache(model), taps)
    cache, evidence, stands = drafter.make_cache(), [], []
    drafter.extend(features[:, : len(given) - 1], cache)
    M = drafter.config.num_proposals
    for i in range(len(given), len(text) - M):
        draft = select(drafter.propose(text[i - 1], features[:, cache[0].offset : i - 1], cache))
        agree = draft.tokens == mx.array(text[i : i + M])
        assert draft.evidence is not None
        evidence.append(draft.evidence.log_odds())
        stands.append(mx.cumprod(agree.astype(mx.int32)).sum().item())
    return Trace(np.array(evidence), np.array(stands))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="?", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--draft-model")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--curve", default="")
    parser.add_argument("--depth", type=int, default=512)
    args = parser.parse_args()
    if args.record:
        from dspine_mlx.load import load

        model, tokenizer, drafter = load(args.model, args.draft_model)
        lines = args.prompts.read_text(encoding="utf-8").splitlines()
        traces = [record(model, tokenizer, drafter, line, args.tokens) for line in lines if line]
        np.savez_compressed(
            args.record,
            evidence=np.concatenate([t.evidence for t in traces]).astype(np.float16),
            stands=np.concatenate([t.stands for t in traces]).astype(np.uint8),
            lengths=[len(t.stands) for t in traces],
        )
        return
    traces = (
        load_trace(args.trace) if args.trace else [made_up(400, 7, 1.2, seed) for seed in range(5)]
    )
    print(f"{'':36} auto: calibrated, cold; best fixed length; fixed 1, 2, ...")
    for entry in json.loads((HERE / "curves.json").read_text(encoding="utf-8")):
        if args.curve in entry["name"]:
            curve = curve_of(entry, traces[0].evidence.shape[1])
            cold = compare(traces, curve, start=args.depth)["auto"]
            speed = compare(traces, curve, calibrated=True, start=args.depth)
            auto = speed.pop("auto")
            best = max(speed, key=speed.__getitem__)
            others = " ".join(f"{s:.2f}" for s in list(speed.values())[1:])
            print(
                f"{entry['name']:36} {auto:.2f} {cold:.2f} {speed[best]:.2f} ({best:>2}) "
                f"| {auto / speed[best]:.3f} {cold / speed[best]:.3f} | {others}"
            )


if __name__ == "__main__":
    main()

"""The policy on machines that are not at hand: recorded rounds against any cost curve.

    python -m tests.bench.simulate [--curve NAME] [--trace FILE.npz] [--depth 512]
    python -m tests.bench.simulate --predicted [--draft 0.12] [--trace FILE.npz]
    python -m tests.bench.simulate --record FILE.npz [--model M --draft-model D] PROMPTS.txt

A trace holds, for every position of a text, the evidence of the block drafted there and how many of
its tokens the text has. Greedy text does not depend on the lengths, so replaying it is exact;
made-up sampled traces have evidence of the drawn tokens and of the greedy path. The policy is the
real one, on a clock of its own that each step moves by the curve. curves.json has published costs
of Apple chips (relative costs of rows, scaled to a step; attention's share of each row grows with
the context). Nothing in it was measured here but the last entry. --predicted takes the curves of
tests.bench.verify_rows in its place, without and with kernels for verify rows; --draft sets what a
draft takes there, as a share of a step, in place of the roofline's prediction.
"""

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from dspine_mlx.round.policy import Policy
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft
from dspine_mlx.round.statistics import Statistics
from dspine_mlx.verify_length.auto import Auto
from dspine_mlx.verify_length.calibration import Calibration, uncalibrated
from dspine_mlx.verify_length.costs import Costs, Curve
from dspine_mlx.verify_length.fit import fit

HERE = Path(__file__).parent
CURVES = json.loads((HERE / "curves.json").read_text(encoding="utf-8"))
DEPTHS = (512, 16384)
ANY = mx.array(0)  # logprobs of a plain token, which only probes of real sampled drafts look at
READING = 4e-4  # seconds that reading evidence takes from a round


class Numbers(list[int]):
    """Tokens of a draft, as the policy reads them from an array."""

    def tolist(self) -> list[int]:
        return self


class Known(NamedTuple):
    """Evidence of a path, already on the host."""

    odds: list[float]

    def log_odds(self) -> list[float]:
        return self.odds


@dataclass
class Trace:
    """One text: at each position the evidence [n][M] of a block and how many of its tokens are
    accepted; of a sampled block also the evidence along the greedy path."""

    evidence: list[list[float]]
    accepted: list[int]
    greedy: list[list[float]] | None = None

    @property
    def slots(self) -> int:
        return len(self.evidence[0])

    def draft(self, position: int, read: bool = True) -> Draft:
        """Token 1 means agreement: the watched text is all ones. Lists in place of arrays."""
        agree = self.accepted[position]
        tokens: Any = Numbers([1] * agree + [0] * (self.slots - agree))
        evidence: Any = Known(self.evidence[position]) if read else None
        path: Any = Known(self.greedy[position]) if read and self.greedy else None
        return Draft(tokens, tokens, None, evidence, path)

    def shifted(self, odds: float) -> "Trace":
        """With evidence that is off by some log-odds."""
        moved = [[x + odds for x in block] for block in self.evidence]
        path = self.greedy and [[x + odds for x in block] for block in self.greedy]
        return Trace(moved, self.accepted, path)

    def __add__(self, other: "Trace") -> "Trace":
        return Trace(self.evidence + other.evidence, self.accepted + other.accepted)


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
    reading: float = READING
    slow_reader: float = 0.0  # seconds that the caller takes per token
    now: float = 0.0
    spent: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.costs: dict[int, list[float]] = {}

    def at(self, depth: int) -> list[float]:
        """The curve's [plain, verify 1 row .. M + 1 rows, draft]."""
        if depth not in self.costs:
            self.costs[depth] = self.curve.at(depth)
        return self.costs[depth]

    def clock(self) -> float:
        return self.now

    def take(self, seconds: float) -> float:
        self.spent += seconds
        seconds *= math.exp(self.noise * self.random.gauss(0, 1))
        self.now += seconds
        return seconds


def replay(
    trace: Trace,
    policy: Policy,
    machine: Machine,
    start: int = 512,
    temp: float = 0.0,
    lengths: list[int] | None = None,
) -> float:
    """Expected seconds of the whole text under a policy, from a context of `start` positions on.

    lengths: gets the length of every round.
    """
    begun, i, n = machine.spent, 0, len(trace.accepted)
    statistics = Statistics()
    policy.start_text(statistics, Sampler(temp=temp), start)
    while i < n:
        depth = start + i
        plain, *rows, draft = machine.at(depth)
        limit = min(trace.slots, n - i - 1)
        if policy.parked or limit < 1:
            machine.now += machine.slow_reader
            if policy.parked and policy.probe_due(depth):
                policy.start_probe(trace.draft(i))
                machine.take(draft)
            waiting = machine.now
            machine.take(plain if machine.slow_reader < plain else 0.0)  # else it was done by then
            machine.spent += plain if machine.slow_reader >= plain else 0.0
            was = policy.parked
            statistics.plain += 1
            i += 1
            if was:
                policy.plain_token(1, ANY, waiting, depth)
            if was and not policy.parked and i < n:  # the token after it is already on its way
                machine.take(plain)
                statistics.plain += 1
                i += 1
            continue
        read = policy.needs_evidence
        seconds = machine.take(draft)
        _, length = policy.choose(trace.draft(i, read), None, limit, depth, seconds)
        machine.take(rows[length] + machine.reading * read)
        accepted = min(length, trace.accepted[i])
        policy.learn(accepted, length)
        statistics.record(length, [*[(1, None, True)] * accepted, (1, None, False)])
        machine.now += machine.slow_reader * (1 + accepted)
        if lengths is not None:
            lengths.append(length)
        i += accepted + 1
    policy.verdict(start + n)
    return machine.spent - begun


def fixed_seconds(traces: list[Trace], curve: Curve, length: int, start: int = 512) -> float:
    """Seconds of the texts with a fixed length; 0 is plain decoding."""
    machine, total = Machine(curve), 0.0
    for trace in traces:
        i, n = 0, len(trace.accepted)
        while i < n:
            plain, *rows, draft = machine.at(start + i)
            drafted = min(length, trace.slots, n - i - 1)
            total += draft + rows[drafted] if drafted else plain
            i += 1 + min(drafted, trace.accepted[i])
    return total


def compare(
    traces: list[Trace],
    curve: Curve,
    *,
    calibrated: bool = False,
    start: int = 512,
    temp: float = 0.0,
    believed: Curve | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Speed over plain decoding of the policy, over the texts in turn, and of fixed lengths.

    calibrated: fitted on every other text for the rest, both ways round, in place of nothing;
    believed: the costs on file, if they are not the machine's.
    """
    M, machine = traces[0].slots, Machine(curve, seed=seed)

    def auto_seconds(calibration: Calibration, texts: list[Trace]) -> float:
        auto = Auto(Costs(believed or curve), calibration, clock=machine.clock)
        return sum(replay(trace, auto, machine, start, temp) for trace in texts)

    times = {str(n): fixed_seconds(traces, curve, n, start) for n in range(M + 1)}
    if calibrated:
        halves = traces[::2], traces[1::2]
        times["auto"] = sum(
            auto_seconds(fitted(other), half)
            for half, other in zip(halves, reversed(halves), strict=True)
        )
    else:
        times["auto"] = auto_seconds(uncalibrated(M), traces)
    return {name: times["0"] / s for name, s in times.items()}


def over_best_fixed(speed: dict[str, float]) -> float:
    return speed["auto"] / max(s for name, s in speed.items() if name != "auto")


def fitted(traces: list[Trace]) -> Calibration:
    evidence = np.array([block for trace in traces for block in trace.evidence])
    return fit(evidence, np.array([n for trace in traces for n in trace.accepted]))


def made_up(tokens: int, slots: int, ease: float, seed: int, informed: float = 1.0) -> Trace:
    """Evidence that is true (times `informed`, 0: says nothing), in a text whose ease wanders."""
    rng = np.random.default_rng(seed)
    wander = np.convolve(rng.standard_normal(tokens + 40), np.ones(40) / 40**0.5, "valid")[:tokens]
    slot = -0.15 * np.arange(slots)
    log_odds = ease + 1.2 * wander[:, None] + slot + 1.5 * rng.standard_normal((tokens, slots))
    agree = rng.uniform(size=log_odds.shape) < 1 / (1 + np.exp(-log_odds))
    mean = np.log(agree.mean() / (1 - agree.mean()))
    evidence = informed * log_odds + (1 - informed) * mean
    return Trace(evidence.tolist(), np.cumprod(agree, axis=1).sum(axis=1).tolist())


def made_up_sampled(tokens: int, slots: int, ease: float, seed: int) -> Trace:
    """The same for drawn tokens, which are somewhat less likely than those of the greedy path."""
    rng = np.random.default_rng(seed)
    wander = np.convolve(rng.standard_normal(tokens + 40), np.ones(40) / 40**0.5, "valid")[:tokens]
    shape = (tokens, slots)
    ease_here = ease + 1.2 * wander[:, None] - 0.15 * np.arange(slots)
    greedy = ease_here + 1.5 * rng.standard_normal(shape)
    drawn = greedy - np.abs(rng.standard_normal(shape))
    agree = rng.uniform(size=shape) < 1 / (1 + np.exp(-drawn))
    return Trace(drawn.tolist(), np.cumprod(agree, axis=1).sum(axis=1).tolist(), greedy.tolist())


def load_trace(path: Path) -> list[Trace]:
    data = np.load(path)
    ends = np.cumsum(data["lengths"])[:-1]
    parts = zip(np.split(data["evidence"], ends), np.split(data["stands"], ends), strict=True)
    return [Trace(evidence.astype(float).tolist(), n.tolist()) for evidence, n in parts]


def record(model: Any, tokenizer: Any, drafter: Any, prompt: str, tokens: int) -> Trace:
    """Draft at every position of the target's greedy text."""
    from mlx_lm import stream_generate
    from mlx_lm.models.cache import make_prompt_cache

    from dspine_mlx.round.select import select

    given = tokenizer.encode(prompt)
    text = [*given, *(r.token for r in stream_generate(model, tokenizer, given, max_tokens=tokens))]
    taps = drafter.config.target_layer_ids
    _, features = drafter.target.forward(mx.array(text), make_prompt_cache(model), taps)
    cache, evidence, accepted = drafter.make_cache(), [], []
    drafter.extend(features[:, : len(given) - 1], cache)
    M = drafter.config.num_proposals
    for i in range(len(given), len(text) - M):
        draft = select(drafter.propose(text[i - 1], features[:, cache[0].offset : i - 1], cache))
        agree = draft.tokens == mx.array(text[i : i + M])
        assert draft.evidence is not None
        evidence.append(draft.evidence.log_odds())
        accepted.append(int(mx.cumprod(agree.astype(mx.int32)).sum().item()))
    return Trace(evidence, accepted)


def save_trace(path: Path, traces: list[Trace]) -> None:
    np.savez_compressed(
        path,
        evidence=np.concatenate([np.array(t.evidence) for t in traces]).astype(np.float16),
        stands=np.concatenate([np.array(t.accepted) for t in traces]).astype(np.uint8),
        lengths=[len(t.accepted) for t in traces],
    )


def predicted_curves(draft: float | None) -> list[dict[str, Any]]:
    from tests.bench.verify_rows import predicted

    return [entry | ({} if draft is None else {"draft": draft}) for entry in predicted()]


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
    parser.add_argument("--predicted", action="store_true")
    parser.add_argument("--draft", type=float)
    args = parser.parse_args()
    if args.record:
        from dspine_mlx.load import load

        model, tokenizer, drafter = load(args.model, args.draft_model)
        lines = args.prompts.read_text(encoding="utf-8").splitlines()
        save_trace(
            args.record,
            [record(model, tokenizer, drafter, line, args.tokens) for line in lines if line],
        )
        return
    traces = (
        load_trace(args.trace) if args.trace else [made_up(400, 7, 1.2, seed) for seed in range(5)]
    )
    print(f"{'':36} auto: calibrated, cold; best fixed length; fixed 1, 2, ...")
    for entry in predicted_curves(args.draft) if args.predicted else CURVES:
        if args.curve in entry["name"]:
            curve = curve_of(entry, traces[0].slots)
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

"""The policy's behaviour by simulation, on a clock that the steps move."""

from typing import Any

import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler

from dspine_mlx.round.lookup import Lookup
from dspine_mlx.round.select import Draft
from dspine_mlx.round.statistics import Statistics
from dspine_mlx.verify_length.auto import Auto
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.costs import Costs, Curve
from tests.bench.policies import DEAR, ENTRIES, families
from tests.bench.simulate import (
    CURVES,
    HERE,
    Known,
    Machine,
    Numbers,
    Trace,
    compare,
    curve_of,
    fixed_seconds,
    load_trace,
    made_up,
    made_up_sampled,
    over_best_fixed,
    replay,
)

BY_NAME = {entry["name"]: entry for entry in ENTRIES}
FLAT = tuple(1.1 + 0.04 * n for n in range(8))  # rows that cost next to nothing


def simulated(ease: float, informed: float = 1.0, texts: int = 3, slots: int = 7) -> list[Trace]:
    return [made_up(400, slots, ease, seed, informed) for seed in range(texts)]


def flat(draft: float, rows: tuple[float, ...] = FLAT, plain: float = 1.0) -> Curve:
    return Curve((64, 2048), (plain, plain), (draft, draft), (rows, rows))


def slots_of(machine: Machine) -> int:
    return len(machine.curve.verify[0]) - 1


def policy(curve: Curve, machine: Machine, lines: list[str] | None = None) -> Auto:
    explain = None if lines is None else lines.append
    return Auto(Costs(curve), uncalibrated(slots_of(machine)), explain, machine.clock)


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("entry", CURVES, ids=lambda entry: entry["name"])
def test_never_slower_and_about_as_fast_as_the_best_fixed_length(
    entry: dict[str, object], temp: float
) -> None:
    over_fixed = []
    for ease in (-3.0, 0.5, 2.5):
        make = made_up_sampled if temp else made_up
        traces = [make(400, 7, ease, seed) for seed in range(3)]
        speed = compare(traces, curve_of(entry, 7), temp=temp)
        assert speed["auto"] > 0.97
        over_fixed.append(over_best_fixed(speed))
    assert np.mean(over_fixed) > 0.98


def test_drafts_of_the_demo_pair_on_published_costs() -> None:
    """Nothing is fitted or known before the first text."""
    traces = load_trace(HERE / "demo_trace.npz")
    speeds = [compare(traces, curve_of(entry, 15)) for entry in CURVES]
    assert min(speed["auto"] for speed in speeds) > 0.97
    assert np.mean([over_best_fixed(speed) for speed in speeds]) > 1.03


def test_the_best_fixed_length_is_matched_over_families_of_texts() -> None:
    entries = [BY_NAME[n] for n in ("M3 Max, 4-bit tile", "M4 Pro, 8-bit", DEAR["name"])]
    speeds = []
    for name, traces in families(7).items():
        for entry in entries:
            temp = 1.0 if name.startswith("sampled") else 0.0
            speeds.append(compare(traces, curve_of(entry, traces[0].slots), temp=temp))
    assert min(speed["auto"] for speed in speeds) > 0.97
    assert np.mean([over_best_fixed(speed) for speed in speeds]) > 0.99


def test_confidence_gains() -> None:
    """Over machines where drafting pays, chances that differ from block to block give more than the
    best fixed length; without any information, about the same."""
    gains: dict[float, list[float]] = {0.0: [], 1.0: []}
    for informed in gains:
        for name in ("M4 Pro, Qwen3.8-27B 4-bit", "M4 Max, Qwen3-8B 4-bit", "M5, Qwen3-8B 4-bit"):
            speed = compare(simulated(1.5, informed), curve_of(BY_NAME[name], 7))
            gains[informed].append(over_best_fixed(speed))
    assert np.mean(gains[1.0]) > 1.03
    assert 0.95 < np.mean(gains[0.0]) < 1.03


@pytest.mark.parametrize("lie", [4.0, -4.0])
def test_evidence_that_lies_is_seen_through(lie: float) -> None:
    """Confidence far above or below the truth: corrected by what happens."""
    curve = curve_of(BY_NAME["M4 Pro, Qwen3.8-27B 4-bit"], 7)
    for ease in (-4.0, 1.5):
        speed = compare([trace.shifted(lie) for trace in simulated(ease)], curve)
        assert over_best_fixed(speed) > 0.97


def test_blocks_shorten_as_the_context_grows() -> None:
    """Rows whose cost grows with the depth; evidence and truth stay the same."""
    width = np.arange(1, 9)
    low, high = (1 + 0.02 * width).tolist(), (1 + 0.3 * width).tolist()
    curve = Curve((0, 8000), (1.0, 1.0), (0.05, 0.05), (tuple(low), tuple(high)))
    trace = made_up(600, 7, 1.5, 0)
    means = []
    for start in (0, 2000, 6000):
        machine, lengths = Machine(curve), list[int]()
        replay(trace, policy(curve, machine), machine, start, lengths=lengths)
        means.append(np.mean(lengths))
    assert means[0] > means[1] > means[2]
    machine, lengths = Machine(curve), list[int]()
    replay(trace, policy(curve, machine), machine, 30000, lengths=lengths)
    assert len(lengths) <= 1  # one more row costs more than a token: one round shows it


def test_parks_when_the_text_turns_hard_and_resumes_when_it_turns_easy() -> None:
    curve = curve_of(BY_NAME["M4 Max, Qwen3-8B 4-bit"], 7)
    easy, hard = made_up(600, 7, 2.5, 1), made_up(600, 7, -5.0, 2)
    machine, lines = Machine(curve), list[str]()
    auto = policy(curve, machine, lines)
    replay(easy + hard + easy, auto, machine)
    assert 500 < auto.statistics.plain < 900
    parked = [line for line in lines if line.startswith("parked at")]
    assert parked
    assert not auto.parked
    assert all(line.endswith(" and the balance is spent") for line in parked)
    assert all("times the speed" not in line for line in lines)  # expected: outcomes decide
    probes = [line for line in lines if line.startswith("probe at")]
    assert probes[-1].endswith("so drafting goes on")
    for line in probes:
        balance = float(line.partition("the balance is ")[2].split()[0])
        assert (balance < 1) == line.endswith("below 1: drafting stays parked")


def test_a_hopeless_machine_gets_one_round() -> None:
    curve = flat(0.2, tuple(float(n) for n in range(1, 17)))
    machine = Machine(curve)
    auto = policy(curve, machine)
    replay(made_up(300, 15, 4.0, 0), auto, machine, 64)
    assert (auto.statistics.rounds, auto.statistics.probes) == (1, 0)
    assert "even if all 15 drafted tokens were accepted" in auto.verdict(364)


@pytest.mark.parametrize("ease", [-3.0, 2.0])
def test_a_slow_reader_changes_nothing(ease: float) -> None:
    """Plain decoding must not look slow because the caller takes its time over every token."""
    curve = curve_of(BY_NAME["M4 Max, Qwen3-8B 4-bit"], 7)
    trace, spent = made_up(400, 7, ease, 5), []
    for slow in (0.0, 3.0):
        machine = Machine(curve, slow_reader=slow)
        auto = policy(curve, machine)
        spent.append(replay(trace, auto, machine))
        assert auto.costs.plain(512) == pytest.approx(curve.at(512)[0], rel=0.2)
    assert spent[1] == pytest.approx(spent[0], rel=0.03)


@pytest.mark.parametrize("draft", [0.1, 4.0])
def test_what_drafting_may_lose_is_bounded(draft: float) -> None:
    """No drafted token is ever accepted, whatever the evidence says: one credit, one round that it
    does not cover, and little more than 2 % of the time for probes and for rounds that they led
    to."""
    curve = flat(draft)
    for odds in (-3.0, 0.0, 3.0):
        machine = Machine(curve)
        trace = Trace([[odds] * 7] * 2000, [0] * 2000)
        lost = replay(trace, policy(curve, machine), machine, 64) - 2000
        assert lost < 4 + draft + FLAT[-1] + 0.025 * 2000


@pytest.mark.parametrize(("draft", "kept"), [(0.6, True), (0.7, False)])
def test_a_dear_drafter_does_not_keep_up_while_parked(draft: float, kept: bool) -> None:
    """64 rows are taken in if a draft takes at most 1 % of the time of 64 plain tokens."""
    curve = flat(draft)
    assert policy(curve, Machine(curve)).keeps_context(64) == kept


class Late(Known):
    """Evidence that the host waits for: three plain tokens' time."""

    tokens, machine = Numbers([1] * 7), Machine(flat(0.5))

    def log_odds(self) -> list[float]:
        self.machine.now += 3.0
        return self.odds


@pytest.mark.parametrize("lookup", [None, Lookup()], ids=["no copies", "copies"])
def test_rounds_tell_what_a_draft_costs(lookup: Lookup | None) -> None:
    """The wait for a draft is part of it, also where it is first compared with copies."""
    tokens: Any = Late.tokens
    evidence: Any = Late([1.0] * 7)
    machine, draft = Late.machine, Draft(tokens, tokens, None, evidence)
    auto = policy(machine.curve, machine)
    auto.start_text(Statistics(), make_sampler(0), 64)
    for _ in range(5):
        _, length = auto.choose(draft, lookup, 7, 64, 0.0)
        machine.take(FLAT[length])
        auto.learn(0, length)
    auto.digest()
    assert auto.costs.draft(64) == pytest.approx(3.0, rel=0.2)


def test_probes_tell_what_a_draft_costs() -> None:
    """On file a draft takes the time of half a plain token, really of three; all drafts are made
    while parked, beside plain decoding."""
    machine = Machine(flat(3.0))
    auto = policy(flat(0.5), machine)
    auto.budget.balance = auto.budget.credit = 0.0
    replay(Trace([[1.0] * 7] * 400, [0] * 400), auto, machine, 64)
    assert auto.statistics.rounds == 0
    assert auto.costs.draft(64) == pytest.approx(3.0, rel=0.4)


def test_hard_texts_one_after_another_do_not_spend_a_credit_each() -> None:
    curve = flat(0.3)
    machine = Machine(curve)
    auto = policy(curve, machine)
    hard = Trace([[0.5] * 7] * 60, [0] * 60)
    lost = [replay(hard, auto, machine, 64) - 60 for _ in range(10)]
    assert lost[0] > 2
    assert sum(lost[1:]) < 0.015 * 9 * 60 + 3


@pytest.mark.parametrize("draft", [0.1, 0.5])
def test_an_easy_text_after_a_hard_one_is_drafted(draft: float) -> None:
    curve = flat(draft)
    machine = Machine(curve)
    auto = policy(curve, machine)
    replay(Trace([[0.5] * 7] * 150, [0] * 150), auto, machine, 64)
    assert auto.parked
    easy = made_up(200, 7, 2.5, 3)
    best = 200 / fixed_seconds([easy], curve, 7, 64)
    assert 200 / replay(easy, auto, machine, 64) > 1 + 0.45 * (best - 1)


def test_hard_sentences_do_not_park_a_drafter_that_pays() -> None:
    """Drafting pays 1.2 to 1.5 times, and its evidence says too little, as that of drafters without
    calibration may, on machines whose steps vary by a third."""
    curve = flat(0.7)
    seconds = fixed = 0.0
    for seed in range(6):
        machine = Machine(curve, noise=0.3, seed=seed, reading=0.0)
        auto = policy(curve, machine)
        for trace in [made_up(150, 7, 1.3, 8 * seed + text) for text in range(8)]:
            seconds += replay(trace.shifted(-0.7), auto, machine, 64)
            fixed += fixed_seconds([trace], curve, 7, 64)
    assert 6 * 8 * 150 / fixed > 1.2
    assert fixed / seconds > 0.97


def test_evidence_goes_unread_where_reading_loses() -> None:
    """Rounds are short and rows cost nothing: the whole block is offered without looking, and the
    time that reading takes is mostly saved. Where evidence tells something it is read."""
    short = flat(1e-3, (4e-3,) * 8, plain=4e-3)
    steep = flat(1e-3, tuple(4e-3 + 1e-3 * n for n in range(8)), plain=4e-3)
    for curve, unread in ((short, True), (steep, False)):
        machine, lines = Machine(curve), list[str]()
        auto = policy(curve, machine, lines)
        for seed in range(4):
            replay(made_up(400, 7, 1.5, seed), auto, machine, 64)
        rounds = [("unread" in line) for line in lines if "offered" in line]
        assert (np.mean(rounds) > 0.5) == unread


def test_plain_decoding_is_timed_while_drafting_pays() -> None:
    """A machine whose plain tokens get three times as fast while a text is drafted: drafting, which
    paid, now loses, and ends."""
    rows = tuple(0.9 + 0.05 * n for n in range(8))
    before, after = flat(0.1, rows), flat(0.1, rows, plain=0.25)
    trace = made_up(600, 7, 0.5, 3)
    machine = Machine(before)
    auto = policy(before, machine)
    replay(trace, auto, machine, 64)
    assert not auto.parked
    machine.curve, machine.costs = after, {}
    seconds = [replay(trace, auto, machine, 64) for _ in range(3)]
    assert auto.parked
    assert 600 * 0.25 / seconds[-1] > 0.97


def test_a_text_that_ends_within_a_check_leaves_the_next_one_drafted() -> None:
    curve = flat(0.3)
    machine = Machine(curve)
    auto = policy(curve, machine)
    auto.start_text(Statistics(), make_sampler(0), 64)
    assert auto.parked  # the first tokens are timed
    assert not auto.probe_due(64)  # and no draft runs along
    assert auto.verdict(64).startswith("not drafted: the text was too short")
    replay(made_up(100, 7, 2.0, 0), auto, machine, 64)
    assert auto.statistics.rounds > 5


@pytest.mark.parametrize("seed", range(4))
def test_verdicts_do_not_contradict_themselves(seed: int) -> None:
    """Whoever reads that drafting was parked reads that rounds had lost time, and how much."""
    curve, seen = flat(0.5), set()
    for ease in (-4.0, -1.0, 0.0, 0.5, 2.5):
        machine = Machine(curve, seed=seed)
        auto = policy(curve, machine)
        replay(made_up(200, 7, ease, seed), auto, machine, 64)
        words = auto.verdict(264)
        kind = words.split(":")[0].split(" for ")[0]
        seen.add(kind)
        if kind == "drafted throughout":
            assert auto.account.parked == 0
        else:
            assert kind == "drafting was parked"
            assert "rounds lost the time of" in words or "the last ones had lost" in words
            assert auto.account.saved < 0 or auto.account.falling > 0
    assert seen == {"drafted throughout", "drafting was parked"}

"""The policy's behaviour on a clock that tests move; `test_lengths` has its rules."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft, Evidence
from dspine_mlx.round.statistics import Statistics
from dspine_mlx.verify_length.auto import Watch
from dspine_mlx.verify_length.budget import Ledger
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.costs import Costs, Curve
from dspine_mlx.verify_length.schedule import Auto, Fixed, Schedule
from tests.bench.simulate import (
    HERE,
    Machine,
    Trace,
    compare,
    curve_of,
    load_trace,
    made_up,
    replay,
)
from tests.support.tiny import plain_steps, random_prompt, same_steps, scripted, tiny_dflash

CURVES = {c["name"]: c for c in json.loads((HERE / "curves.json").read_text(encoding="utf-8"))}


def simulated(ease: float, informed: float = 1.0, texts: int = 3, slots: int = 7) -> list[Trace]:
    return [made_up(400, slots, ease, seed, informed) for seed in range(texts)]


@pytest.mark.parametrize("ease", [-3.0, 0.5, 2.5])
@pytest.mark.parametrize("name", CURVES)
def test_never_slower_and_as_good_as_the_best_fixed_length(name: str, ease: float) -> None:
    speed = compare(simulated(ease), curve_of(CURVES[name], 7))
    fixed = max(s for length, s in speed.items() if length != "auto")
    assert speed["auto"] > 0.98
    assert speed["auto"] > 0.99 * fixed


@pytest.mark.parametrize("name", [n for n in CURVES if "M2" not in n])  # rows as M1's
def test_drafts_of_the_demo_pair_on_published_costs(name: str) -> None:
    """Nothing is fitted or known before the first text."""
    traces = load_trace(HERE / "demo_trace.npz")
    speed = compare(traces, curve_of(CURVES[name], 15))
    assert speed["auto"] > 0.98
    assert speed["auto"] > 0.99 * max(speed.values())


def test_confidence_is_worth_something() -> None:
    """Over the machines where drafting pays, chances that differ from block to block give more than
    the best fixed length; without any information, about the same."""
    gains: dict[float, list[float]] = {0.0: [], 1.0: []}
    for informed in gains:
        for name in ("M4 Pro, Qwen3.8-27B 4-bit", "M4 Max, Qwen3-8B 4-bit", "M5, Qwen3-8B 4-bit"):
            speed = compare(simulated(1.5, informed), curve_of(CURVES[name], 7))
            gains[informed].append(speed["auto"] / max(s for n, s in speed.items() if n != "auto"))
    assert np.mean(gains[1.0]) > 1.04
    assert 0.96 < np.mean(gains[0.0]) < 1.03


@pytest.mark.parametrize("lie", [4.0, -4.0])
def test_evidence_that_lies_is_seen_through(lie: float) -> None:
    """Confidence far above or below the truth: corrected by what happens."""
    curve = curve_of(CURVES["M4 Pro, Qwen3.8-27B 4-bit"], 7)
    for ease in (-4.0, 1.5):
        traces = [Trace(t.evidence + lie, t.stands) for t in simulated(ease)]
        speed = compare(traces, curve)
        assert speed["auto"] > 0.97 * max(speed.values())


def offered(policy: Auto, trace: Trace, machine: Machine, start: int) -> list[int]:
    """The lengths of a text's rounds."""
    lengths: list[int] = []
    learn = policy.learn

    def note(accepted: int, offered: int) -> None:
        lengths.append(offered)
        learn(accepted, offered)

    policy.learn = note  # type: ignore[method-assign]
    replay(trace, policy, machine, start)
    return lengths


def test_blocks_shorten_as_the_context_grows() -> None:
    """Rows whose cost grows with the depth; evidence and truth stay the same."""
    width = np.arange(1, 9)
    low, high = 1 + 0.02 * width, 1 + 0.3 * width
    curve = Curve((0, 8000), (1.0, 1.0), (0.05, 0.05), (tuple(low), tuple(high)))
    trace = made_up(600, 7, 1.5, 0)
    means = []
    for start in (0, 2000, 6000, 30000):
        machine = Machine(curve)
        auto = Auto(Costs(curve), uncalibrated(7), clock=lambda m=machine: m.now)  # type: ignore[misc]
        lengths = offered(auto, trace, machine, start)
        means.append(np.mean(lengths) if lengths else 0.0)
    assert means[0] > means[1] > means[2] > means[3]
    assert means[3] == 0  # one more row costs more than a token: plain decoding


def test_costs_that_rise_are_followed_within_a_text() -> None:
    """The machine becomes one where wide rows cost much more than measured."""
    measured = curve_of(CURVES["M4 Pro, Qwen3.8-27B 4-bit"], 7)
    real = curve_of(CURVES["M1, Qwen3-8B 4-bit"], 7)
    machine = Machine(real)
    auto = Auto(Costs(measured), uncalibrated(7), clock=lambda: machine.now)
    seconds = [replay(made_up(500, 7, 1.0, s), auto, machine, 512) for s in range(4)]
    plain = [replay(made_up(500, 7, 1.0, s), Fixed(0), machine, 512) for s in range(4)]
    assert sum(plain) / sum(seconds) > 0.93
    assert plain[-1] / seconds[-1] > 0.98


def test_parks_when_the_text_turns_hard_and_resumes_when_it_turns_easy() -> None:
    curve = curve_of(CURVES["M4 Max, Qwen3-8B 4-bit"], 7)
    easy, hard = made_up(600, 7, 2.5, 1), made_up(600, 7, -5.0, 2)
    evidence = np.concatenate([easy.evidence, hard.evidence, easy.evidence])
    trace = Trace(evidence, np.concatenate([easy.stands, hard.stands, easy.stands]))
    machine = Machine(curve)
    lines: list[str] = []
    auto = Auto(Costs(curve), uncalibrated(7), lines.append, lambda: machine.now)
    replay(trace, auto, machine, 512)
    done = auto.statistics
    assert 500 < done.plain < 900
    assert 1 <= done.probes <= 12
    assert any(line.startswith("parked at") for line in lines)
    assert not auto.parked
    assert "parked for" in auto.verdict(2000)


def test_a_hopeless_machine_is_never_probed() -> None:
    rows = tuple(range(1, 17))
    curve = Curve((64, 2048), (1.0, 1.0), (0.2, 0.2), (rows, rows))
    machine = Machine(curve)
    auto = Auto(Costs(curve), uncalibrated(15), clock=lambda: machine.now)
    replay(made_up(300, 15, 4.0, 0), auto, machine, 64)
    assert (auto.statistics.plain, auto.statistics.probes) == (300, 0)
    assert "even if all 15 drafted tokens stood" in auto.verdict(364)


def test_a_slow_reader_does_not_make_plain_decoding_look_slow() -> None:
    curve = curve_of(CURVES["M4 Max, Qwen3-8B 4-bit"], 7)
    now = 0.0
    auto = Auto(Costs(curve), uncalibrated(7), clock=lambda: now)
    auto.start_text(Statistics(), make_sampler(0), 512)
    before = auto.costs.plain(512)
    for _ in range(50):
        now += 3.0
        auto.plain_token(1, mx.array(0), now, 512)  # the token was there when it was asked for
    assert auto.costs.plain(512) == before


class Restless(Auto):
    """Parks after two rounds, probes at once, and resumes whatever the probe says."""

    def learn(self, accepted: int, offered: int) -> None:
        assert self.newest is not None
        depth = self.newest.depth
        super().learn(accepted, offered)
        if self.rounds % 2:
            self.park(depth)
            self.digest()

    def park(self, depth: int) -> None:
        super().park(depth)
        self.countdown = 2

    def hopeless(self, depth: int) -> bool:
        return False

    def judge(self, watch: Watch, depth: int) -> None:
        super().judge(watch, depth)
        self.parked = False


@pytest.mark.parametrize("sampler", [None, {"temp": 0.8}, {"temp": 1.0, "top_p": 0.8}])
@pytest.mark.parametrize("kind", ["right", "now and then", "wrong", "random"])
def test_text_is_the_targets_while_parking_and_resuming(
    model: nn.Module, tokenizer: TokenizerWrapper, kind: str, sampler: dict[str, float] | None
) -> None:
    """Seeded text, token for token and logprob for logprob, with and without parking."""
    prompt = random_prompt(17)

    def options() -> dict[str, object]:
        mx.random.seed(5)
        return {"max_tokens": 60, "sampler": make_sampler(**sampler) if sampler else None}

    plain = plain_steps(model, tokenizer, prompt, **options())
    text = prompt + [token for token, _ in plain]
    drafter = tiny_dflash(model) if kind == "random" else scripted(model, text, kind)
    curve = Curve((64, 2048), (1e-3, 1e-3), (1e-4, 1e-4), ((1e-3,) * 8, (1e-3,) * 8))
    restless = Restless(Costs(curve), uncalibrated(7))
    schedule = Schedule(Costs(curve), {}, policies={"greedy": restless})
    drafter.schedule = schedule
    responses = list(
        dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, **options())  # type: ignore[arg-type]
    )
    assert same_steps([(r.token, r.logprobs) for r in responses], plain)
    done = responses[-1].statistics
    assert done.plain > 3  # it was parked
    assert done.rounds > 3  # and resumed
    assert done.probes > 3


@pytest.mark.parametrize("stop_at", [1, 2, 3, 9, 20, 33])
def test_caches_hold_the_text_wherever_it_ends(
    model: nn.Module, tokenizer: TokenizerWrapper, stop_at: int
) -> None:
    prompt = random_prompt(17)
    plain = plain_steps(model, tokenizer, prompt, max_tokens=40)
    drafter = scripted(model, prompt + [t for t, _ in plain], "now and then")
    curve = Curve((64, 2048), (1e-3, 1e-3), (1e-4, 1e-4), ((1e-3,) * 8, (1e-3,) * 8))
    restless = Restless(Costs(curve), uncalibrated(7))
    drafter.schedule = Schedule(Costs(curve), {}, policies={"greedy": restless})
    cache = make_prompt_cache(model)
    generator = dspine_mlx.stream_generate(
        model, tokenizer, prompt, drafter, max_tokens=40, prompt_cache=cache
    )
    for _ in range(stop_at):
        next(generator)
    generator.close()
    assert {c.offset for c in cache} == {len(prompt) + stop_at}


def test_probes_leave_the_drafters_context_whole(
    model: nn.Module, tokenizer: TokenizerWrapper
) -> None:
    """After parking, probes and rounds its cache holds the features of the text, row by row."""
    prompt, drafter = random_prompt(17), tiny_dflash(model)
    curve = Curve((64, 2048), (1e-3, 1e-3), (1e-4, 1e-4), ((1e-3,) * 8, (1e-3,) * 8))
    restless = Restless(Costs(curve), uncalibrated(7))
    drafter.schedule = Schedule(Costs(curve), {}, policies={"greedy": restless})
    cache = make_prompt_cache(model)
    responses = list(
        dspine_mlx.stream_generate(
            model, tokenizer, prompt, drafter, max_tokens=40, prompt_cache=cache
        )
    )
    assert responses[-1].statistics.probes > 3
    text = mx.array([*prompt, *(r.token for r in responses)])
    taps = drafter.config.target_layer_ids
    _, features = drafter.target.forward(text, make_prompt_cache(model), taps)
    fresh = drafter.make_cache()
    drafter.extend(features, fresh)
    for ours, wanted in zip(cache[-len(fresh) :], fresh, strict=True):
        assert ours.offset == wanted.offset == text.size
        for a, b in ((ours.keys, wanted.keys), (ours.values, wanted.values)):
            rows = np.array(a)[:, :, : text.size], np.array(b)[:, :, : text.size]
            np.testing.assert_allclose(*rows, atol=1e-4)


@settings(deadline=None, max_examples=4)
@given(st.integers(0, 99))
def test_sampled_drafts_are_watched_by_the_ratio(seed: int) -> None:
    """A probe of a sampled draft counts min(1, p/q), whatever the plain token was."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(3))
    curve = Curve((64, 2048), (1.0, 1.0), (0.1, 0.1), ((1.0,) * 8, (1.0,) * 8))
    auto = Auto(Costs(curve), uncalibrated(7))
    auto.start_text(Statistics(), Sampler(temp=1.0), 64)
    draft = Draft(
        mx.array([2] * 7),
        mx.array([[1, 2, 3]] * 7),
        mx.array(np.tile(q.astype(np.float32), (7, 1))),
        Evidence(mx.array([2] * 7), mx.full((7,), 0.5)),
    )
    auto.start_probe(draft)
    auto.plain_token(0, mx.log(mx.array(p.astype(np.float32))), 0.0, 64)
    stood = min(1.0, p[2] / q[1])
    assert auto.belief.common == pytest.approx((stood - 0.5) / 1.25, abs=1e-4)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0.2, 9)), max_size=60))
def test_the_ledger_owes_the_worst_run_of_rounds(rounds: list[tuple[int, float]]) -> None:
    """What is owed is the largest loss of any run of rounds that ends now, and what is saved is
    what all rounds won, from the last time on when it was nothing."""
    ledger, gains = Ledger(), [tokens - seconds / 0.5 for tokens, seconds in rounds]
    for tokens, seconds in rounds:
        ledger.round_over(tokens, seconds, 0.5)
    assert ledger.owed == pytest.approx(max([0.0, *(-sum(gains[i:]) for i in range(len(gains)))]))
    assert ledger.saved == pytest.approx(max([0.0, *(sum(gains[i:]) for i in range(len(gains)))]))


def test_what_a_drafter_may_owe_grows_with_what_it_saved_and_shrinks_when_it_fails() -> None:
    """Rounds that lose a plain token each, until the drafter is stopped."""

    def rounds(ledger: Ledger) -> int:
        lost = 0
        while not ledger.overdrawn:
            ledger.round_over(1, 2.0, 1.0)
            lost += 1
        ledger.close()
        return lost

    new = Ledger()
    assert [rounds(new) for _ in range(4)] == [8, 2, 2, 2]
    new.round_over(4, 1.0, 1.0)
    assert rounds(new) == 2  # the three tokens are lost again: it has saved nothing
    assert rounds(Ledger(saved=30.0)) == 11  # 7 + 0.2 (30 - 11) = 10.8
    proven = Ledger(saved=200.0)
    assert [rounds(proven), rounds(proven)] == [17, 8]


@pytest.mark.parametrize("after", ["another draft", "the text's end", "another text", "parking"])
def test_a_round_is_learnt_from_once_and_soon(after: str) -> None:
    """Its time and outcome: at the latest when the next draft is looked at, or none will be."""
    curve = Curve((64, 2048), (1.0, 1.0), (0.5, 0.5), ((1.0,) * 8, (1.0,) * 8))
    now = 0.0
    auto = Auto(Costs(curve), uncalibrated(7), clock=lambda: now)
    trace = made_up(50, 7, 2.0, 0)

    def state() -> tuple[float, int]:
        return auto.costs.draft(64), auto.belief.rounds

    auto.start_text(Statistics(), make_sampler(0), 64)
    before = state()
    length = auto.length(trace.draft(0), 7, 64, 3.0)
    assert state() == before  # a round that does not come to its end teaches nothing
    length = auto.length(trace.draft(1), 7, 64, 3.0)
    assert state() == before
    now += 1.0
    if after == "parking":
        auto.ledger.owed = 1e9
    auto.learn(0, length)
    learnt = []
    for _ in range(2):
        if after == "another draft":
            auto.length(trace.draft(2), 7, 65, 3.0)
        elif after == "the text's end":
            auto.verdict(65)
        elif after == "another text":
            auto.start_text(Statistics(), make_sampler(0), 64)
        learnt.append(state())
    assert learnt[0] == learnt[1]
    assert learnt[0][0] > 1.2 * before[0]
    assert learnt[0][1] == 1


@pytest.mark.parametrize(
    ("row", "texts", "parked"), [(1.1, 0, False), (1.1, 1, False), (1.1, 2, True), (1.6, 1, True)]
)
def test_a_hard_text_does_not_leave_the_next_one_undrafted(
    row: float, texts: int, parked: bool
) -> None:
    """Unless drafts failed in the one before, too, or rounds lost very much."""
    rows = tuple(row + 0.02 * n for n in range(8))
    curve = Curve((64, 2048), (1.0, 1.0), (0.2, 0.2), (rows, rows))
    machine = Machine(curve, noise=0.0)
    auto = Auto(Costs(curve), uncalibrated(7), clock=lambda: machine.now)
    for _ in range(texts):
        replay(Trace(np.full((80, 7), -1.0), np.zeros(80, int)), auto, machine, 64)
        assert auto.parked
    auto.start_text(Statistics(), make_sampler(0), 64)
    assert auto.parked == parked


def test_hard_sentences_do_not_park_a_drafter_that_pays() -> None:
    """Drafting pays 1.2 to 1.5 times, and its evidence says too little, as that of drafters
    without calibration may, on machines whose steps vary by a third."""
    rows = tuple(1.1 + 0.04 * n for n in range(8))
    curve = Curve((64, 2048), (1.0, 1.0), (0.7, 0.7), (rows, rows))
    plain, seconds, fixed, tokens = 0, 0.0, 0.0, 150
    for seed in range(6):
        machine = Machine(curve, noise=0.3, seed=seed)
        auto = Auto(Costs(curve), uncalibrated(7), clock=lambda m=machine: m.now)  # type: ignore[misc]
        for trace in [made_up(tokens, 7, 1.3, 8 * seed + text) for text in range(8)]:
            seconds += replay(Trace(trace.evidence - 0.7, trace.stands), auto, machine, 64)
            fixed += replay(trace, Fixed(7), machine, 64)
            plain += auto.statistics.plain
    assert 6 * 8 * tokens / fixed > 1.2
    assert fixed / seconds > 0.99
    assert plain < 0.1 * 6 * 8 * tokens


def test_plain_decoding_is_timed_often_where_drafting_pays_little() -> None:
    """A machine whose plain tokens turn out faster than measured: drafting at a small loss ends."""
    rows = tuple(1.0 + 0.5 * n for n in range(8))
    curve = Curve((64, 2048), (1.0, 1.0), (0.02, 0.02), (rows, rows))
    believed = Curve((64, 2048), (1.3, 1.3), (0.02, 0.02), (rows, rows))
    machine = Machine(curve)
    auto = Auto(Costs(believed), uncalibrated(7), clock=lambda: machine.now)
    traces = [made_up(500, 7, -1.0, seed) for seed in range(3)]
    seconds = [replay(trace, auto, machine, 64) for trace in traces]
    assert 500 / seconds[0] > 0.97
    assert 500 / seconds[-1] > 0.985


def test_no_probe_starts_while_plain_decoding_is_timed() -> None:
    """A draft watched there would be compared with tokens of a later check. And a text that ends
    within a check leaves the next one drafted."""
    curve = Curve((64, 2048), (1.0, 1.0), (0.3, 0.3), ((1.0,) * 8, (1.0,) * 8))
    machine = Machine(curve)
    auto = Auto(Costs(curve), uncalibrated(7), clock=lambda: machine.now)
    replay(made_up(100, 7, 2.0, 0), auto, machine, 64)
    auto.countdown = -5
    auto.check_plain(64)
    assert auto.parked
    assert not auto.probe_due(64)
    auto.start_text(Statistics(), make_sampler(0), 64)
    assert not auto.parked
    assert not auto.stretch

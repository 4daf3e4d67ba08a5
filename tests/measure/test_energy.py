"""Power from powermetrics' text: sample output in its format, no Mac and no root needed."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine_mlx.measure.energy import joules_per_token, mean_power, metered

SAMPLE = """Machine model: Mac16,8
OS version: 25B78
Boot arguments:
Boot time: Mon Nov  2 08:11:09 2026



*** Sampled system activity (Sat Nov  7 10:20:30 2026 +0100) (200.00ms elapsed) ***


**** Processor usage ****

E-Cluster HW active frequency: 1100 MHz
E-Cluster HW active residency:  31.20% (744 MHz: 12% 1044 MHz: 19%)
CPU 0 frequency: 1250 MHz
CPU 0 active residency:  20.00%

CPU Power: 4000 mW
GPU Power: 15900 mW
ANE Power: 100 mW
Combined Power (CPU + GPU + ANE): 20000 mW

**** GPU usage ****

GPU HW active frequency: 1300 MHz
GPU idle residency:   2.00%
GPU Power: 15900 mW


*** Sampled system activity (Sat Nov  7 10:20:31 2026 +0100) (600.00ms elapsed) ***


**** Processor usage ****

CPU Power: 1000 mW
GPU Power: 9000 mW
ANE Power: 0 mW
Combined Power (CPU + GPU + ANE): 10000 mW
"""
CUT = """

*** Sampled system activity (Sat Nov  7 10:20:32 2026 +0100) (190.00ms elapsed) ***


**** Processor usage ****

CPU Power: 99"""


def test_power_is_weighted_by_time() -> None:
    assert mean_power(SAMPLE) == pytest.approx((20 * 200 + 10 * 600) / 800)
    assert mean_power(SAMPLE + CUT) == mean_power(SAMPLE)


@pytest.mark.parametrize("text", ["", "powermetrics must be invoked as the superuser\n", CUT])
def test_without_samples_there_is_no_power(text: str) -> None:
    assert mean_power(text) is None


@given(
    st.lists(
        st.tuples(st.floats(0.1, 1e4).map(lambda x: round(x, 2)), st.integers(0, 200_000)),
        min_size=1,
        max_size=6,
    )
)
def test_any_number_of_samples(samples: list[tuple[float, int]]) -> None:
    text = "Machine model: Mac16,8\n" + "".join(
        f"*** Sampled system activity (now) ({elapsed:.2f}ms elapsed) ***\n\nGPU Power: 1 mW\n"
        f"Combined Power (CPU + GPU + ANE): {power} mW\n"
        for elapsed, power in samples
    )
    joules = sum(elapsed / 1e3 * power / 1e3 for elapsed, power in samples)
    seconds = sum(elapsed for elapsed, _ in samples) / 1e3
    assert mean_power(text) == pytest.approx(joules / seconds)


def stand_in(tmp_path: Path, text: str) -> list[str]:
    """A program that prints the text and goes on until it is ended."""
    file = tmp_path / "samples.txt"
    file.write_text(text)
    loop = f"import signal; print(open({str(file)!r}).read(), flush=True); signal.pause()"
    return [sys.executable, "-c", loop]


def test_a_meter_runs_beside_the_block_and_ends_with_it(tmp_path: Path) -> None:
    with metered(stand_in(tmp_path, SAMPLE)) as reading:
        assert reading.watts is None
    assert reading.watts == pytest.approx(12.5)
    with pytest.raises(KeyError), metered(stand_in(tmp_path, SAMPLE)) as reading:
        raise KeyError
    assert reading.watts == pytest.approx(12.5)
    with metered(["true"]) as reading:
        pass
    assert reading.watts is None


def test_joules_are_watts_times_time_by_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("dspine_mlx.measure.energy.time.perf_counter", lambda: clock[0])
    seen = []

    def run(prompt: list[int]) -> int:
        seen.append(prompt)
        clock[0] += 2.0  # seconds per text
        return 50

    command = stand_in(tmp_path, SAMPLE)
    joules = joules_per_token(run, [[1], [2]], command, seconds=5.0)
    assert seen == [[1], [2], [1]]  # until 5 seconds have passed
    assert joules == pytest.approx(12.5 * 6 / 150)
    assert joules_per_token(run, [[1]], ["true"], seconds=1.0) is None

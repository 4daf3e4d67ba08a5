"""What plots show, read back from their axes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from dspine_mlx.cli import plots
from dspine_mlx.cli.plots import About
from dspine_mlx.errors import InputError
from dspine_mlx.verify_length.calibration import uncalibrated
from dspine_mlx.verify_length.fit import Fit, Rounds

ABOUT = About("qwen3, 6 layers, with DSpine", "a machine")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def note(figure: Figure, *args: Any, **options: Any) -> None:
        saved.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", note)
    return saved


def fit_of(accepted: list[int], chance: float, slots: int = 2) -> Fit:
    """Rounds whose evidence says `chance` for every slot."""
    odds = np.full((len(accepted), slots), np.log(chance / (1 - chance)))
    plain, rounds = uncalibrated(slots), Rounds(odds, np.array(accepted))
    return Fit(plain, plain, rounds, np.zeros(slots), np.zeros(slots), np.zeros(slots))


def test_reliability_is_accepted_against_predicted(tmp_path: Path, drawn: list[Figure]) -> None:
    """Two slots at .6: prefixes are predicted at .6 and .36; 3 and 1 of 4 rounds have them."""
    path = tmp_path / "a.png"
    plots.reliability({"greedy": fit_of([0, 1, 1, 2], 0.6)}, path, ABOUT)
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    (axes,) = figure.axes
    assert axes.get_title() == "greedy, 4 held-out rounds"
    before, after = axes.collections
    offsets = [np.asarray(points.get_offsets()) for points in (before, after)]
    points = np.sort(offsets[0], axis=0)
    np.testing.assert_allclose(points, [[0.36, 0.25], [0.6, 0.75]], atol=1e-6)
    np.testing.assert_allclose(offsets[0], offsets[1])
    names = axes.get_legend_handles_labels()[1]
    assert names[1] == "as the drafter says, error 13.0%"  # the mean of .11 and .15
    assert "predicted" in axes.get_xlabel()
    assert axes.get_ylabel() == "share accepted"
    assert figure.get_supxlabel() == "qwen3, 6 layers, with DSpine\na machine"


def row(label: str, speedup: float | None, low: float = 0, high: float = 0) -> Mapping[str, Any]:
    return {"label": label, "speedup": speedup, "speedup_range": [low, high] if speedup else None}


def test_speedups_have_their_range(tmp_path: Path, drawn: list[Figure]) -> None:
    results = [
        {"depth": 0, "rows": [row("plain", 1.0, 1, 1), row("auto", 2.0, 1.5, 2.25)]},
        {"depth": 512, "rows": [row("plain", 1.0, 1, 1), row("auto", None)]},
    ]
    plots.speedups(results, tmp_path / "a.png", ABOUT)
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["plain", "auto"]
    assert axes.get_ylabel() == "times plain decoding's speed"
    ranges, bars, *_ = axes.containers
    assert isinstance(ranges, ErrorbarContainer)
    assert [bar.get_height() for bar in bars] == [1.0, 2.0]
    ends = [segment[:, 1].tolist() for segment in ranges.lines[2][0].get_segments()]
    assert ends == [[1, 1], [1.5, 2.25]]
    names = axes.get_legend_handles_labels()[1]
    assert names == ["0 tokens before the prompt", "512 tokens before the prompt"]


def test_training_curves_have_units(tmp_path: Path, drawn: list[Figure]) -> None:
    records = [{"step": n, "loss": 4.0 - n, "held_out_greedy": 2.0 + n} for n in range(1, 4)]
    plots.training(records, tmp_path / "a.png")
    loss, acceptance, rate = drawn[0].axes
    assert [axes.get_ylabel() for axes in (loss, acceptance, rate)] == [
        "loss",
        "tokens per round",
        "learning rate",
    ]
    assert np.asarray(acceptance.lines[0].get_ydata()).tolist() == [3, 4, 5]
    assert acceptance.get_legend_handles_labels()[1] == ["held out greedy"]
    assert np.asarray(loss.lines[0].get_ydata())[0] == 3.0
    assert not rate.lines


def test_a_plot_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_text("mine")
    with pytest.raises(InputError, match="exists"):
        plots.training([], path)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]

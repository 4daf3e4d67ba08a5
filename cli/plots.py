"""Every plot that commands draw: what it shows, of which pair, measured on which machine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dspine_mlx.cli.output import new_file
from dspine_mlx.verify_length.calibration import Calibration, sigmoid, uncalibrated
from dspine_mlx.verify_length.fit import BINS, Fit, Rounds, survival_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINING = (  # a panel's title, its y axis, and records of the log
    ("Loss", "loss", ("loss", "ce")),
    (
        "Acceptance length, teacher-forced",
        "tokens per round",
        ("greedy", "sampled", "held_out_greedy", "held_out_sampled"),
    ),
    ("Learning rate", "learning rate", ("learning_rate",)),
)
PANEL = (4.6, 4.4)  # inches
TRUTH: dict[str, Any] = {
    "color": "0.6",
    "linestyle": "--",
    "linewidth": 1,
    "zorder": 0,
}  # lines to compare with


class About(NamedTuple):
    """What was measured, and where."""

    pair: str
    machine: str

    def __str__(self) -> str:
        return f"{self.pair}\n{self.machine}"


@contextmanager
def panels(
    path: Path, count: int, about: About | None = None, dpi: int = 120
) -> "Iterator[list[Axes]]":
    """Axes side by side, written to a new PNG with a line about what was measured below them."""
    from matplotlib.figure import Figure

    width, height = PANEL
    figure = Figure(figsize=(width * count, height), dpi=dpi, layout="constrained")
    yield list(figure.subplots(1, count, squeeze=False)[0])
    if about is not None:
        figure.supxlabel(str(about), fontsize="x-small", color="0.4")
    with new_file(path) as part:
        figure.savefig(part, format="png")


def reliability(fits: Mapping[str, Fit], path: Path, about: About) -> None:
    """Each mode's calibration on the texts it was not fitted on."""
    with panels(path, len(fits), about) as axes:
        for ax, (mode, one) in zip(axes, fits.items(), strict=True):
            draw_reliability(ax, mode, one.held_out, one.trial)


def draw_reliability(ax: "Axes", mode: str, rounds: Rounds, calibration: Calibration) -> None:
    """How often prefixes were accepted against how often that was predicted, without and with a
    calibration, in 15 bins; the size of a point is that of its bin."""
    slots = rounds.evidence.shape[1]
    accepted = (rounds.accepted[:, None] > np.arange(slots)).ravel()
    ax.plot([0, 1], [0, 1], **TRUTH, label="exact")
    for label, one in (("as the drafter says", uncalibrated(slots)), ("calibrated", calibration)):
        survival = np.cumprod(sigmoid(one.log_odds(rounds.evidence)), axis=1).ravel()
        bins = np.minimum((survival * BINS).astype(int), BINS - 1)
        used, counts = np.unique(bins, return_counts=True)
        said, true = ([x[bins == b].mean() for b in used] for x in (survival, accepted))
        error = survival_errors(one, rounds.evidence, rounds.accepted).mean()
        sizes = 300 * counts / counts.sum() + 8
        ax.scatter(said, true, s=sizes, alpha=0.8, label=f"{label}, error {error:.1%}")
    ax.set(
        title=f"{mode}, {len(rounds.accepted)} held-out rounds",
        xlabel="predicted chance that a prefix is accepted",
        ylabel="share accepted",
        xlim=(-0.04, 1.04),
        ylim=(-0.04, 1.04),
        aspect="equal",
    )
    below: dict[str, Any] = {
        "loc": "upper center",
        "bbox_to_anchor": (0.5, -0.15),
        "frameon": False,
    }
    ax.legend(fontsize="small", markerscale=0.6, **below)


def speedups(results: Sequence[Mapping[str, Any]], path: Path, about: About) -> None:
    """Medians of speed-ups by mode with their range over texts, a bar per depth; a mode that was
    dropped, or whose texts were too short, has none."""
    names = list(dict.fromkeys(row["label"] for result in results for row in result["rows"]))
    width = 0.8 / len(results)
    with panels(path, 1, about) as (ax,):
        for i, result in enumerate(results):
            rows = [row for row in result["rows"] if row["speedup"] is not None]
            places = [
                names.index(row["label"]) + width * (i - (len(results) - 1) / 2) for row in rows
            ]
            middle = np.array([row["speedup"] for row in rows])
            ends = np.array([row["speedup_range"] for row in rows]).reshape(-1, 2)
            ax.bar(
                places,
                middle,
                width,
                yerr=np.abs(ends - middle[:, None]).T,
                capsize=3,
                label=f"{result['depth']} tokens before the prompt",
            )
        ax.axhline(1, **TRUTH)
        ax.set_xticks(range(len(names)), names)
        ax.set(
            title="Speed-up: median and range over texts",
            ylabel="times plain decoding's speed",
            ylim=(0, None),
        )
        ax.margins(y=0.25)
        ax.legend(fontsize="small")


def loads(results: Sequence[Mapping[str, Any]], path: Path, about: About) -> None:
    """Tokens per second of all requests together, and the slowest request's seconds, by the number
    of requests at once: a line per mode."""
    names = dict.fromkeys(row["label"] for result in results for row in result["rows"])
    counts = [result["requests"] for result in results]
    measures = (
        ("tokens_per_second", "All requests together", "tokens per second"),
        ("slowest_seconds", "The slowest request", "seconds"),
    )
    with panels(path, len(measures), about) as axes:
        for ax, (measure, title, unit) in zip(axes, measures, strict=True):
            for name in names:
                points = [
                    (result["requests"], row[measure])
                    for result in results
                    for row in result["rows"]
                    if row["label"] == name
                ]
                ax.plot(*zip(*points, strict=True), marker="o", label=name)
            ax.set_xscale("log", base=2)
            ax.set_xticks(counts, [str(n) for n in counts])
            ax.minorticks_off()
            ax.set(title=title, xlabel="requests at once", ylabel=unit, ylim=(0, None))
            ax.legend(fontsize="small")


def training(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The curves of a training log; what is logged at every step is smoothed."""
    with panels(path, len(TRAINING)) as axes:
        for ax, (title, unit, names) in zip(axes, TRAINING, strict=True):
            for name in names:
                points = [(r["step"], r[name]) for r in records if name in r]
                if points:
                    steps, values = zip(*points, strict=True)
                    held_out = name.startswith("held_out")
                    label = name.replace("_", " ")
                    ax.plot(steps, values if held_out else smooth(values), label=label)
            ax.set(title=title, xlabel="step", ylabel=unit)
            if ax.lines:
                ax.legend(fontsize="small")


def smooth(values: Sequence[float], decay: float = 0.95) -> list[float]:
    """Exponential average, corrected for its start."""
    mean, out = 0.0, []
    for i, value in enumerate(values, 1):
        mean = decay * mean + (1 - decay) * value
        out.append(mean / (1 - decay**i))
    return out

"""The pictures of dspine-mlx bench."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspine_mlx.cli.bench_tables import Row, label
from dspine_mlx.cli.output import new_file
from dspine_mlx.errors import InputError


def check_plot() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError("--plot needs matplotlib; install it with pip") from error


def draw(results: Sequence[Row], plot: Path) -> None:
    """Draw what was measured: of texts one by one, or of requests at once."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    (draw_load if "requests" in results[0] else draw_speedups)(axes, results)
    with new_file(plot) as part:
        figure.savefig(part, dpi=150, bbox_inches="tight", format="png")
    pyplot.close(figure)


def draw_load(axes: Any, results: Sequence[Row]) -> None:
    """Tokens per second of all requests together, by their number: a line per mode."""
    for name in dict.fromkeys(label(row["way"]) for result in results for row in result["ways"]):
        points = [
            (result["requests"], row["tokens_per_second"])
            for result in results
            for row in result["ways"]
            if label(row["way"]) == name
        ]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    counts = [result["requests"] for result in results]
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="requests at once", ylabel="tokens per second in all")
    axes.legend()


def draw_speedups(axes: Any, results: Sequence[Row]) -> None:
    """Speed-ups by mode, a bar per depth; a mode that was dropped has none."""
    names = list(dict.fromkeys(label(row["way"]) for result in results for row in result["ways"]))
    for i, result in enumerate(results):
        places = [names.index(label(row["way"])) + 0.8 * i / len(results) for row in result["ways"]]
        speeds = [row["speedup"] or 0 for row in result["ways"]]
        axes.bar(places, speeds, 0.8 / len(results), label=f"{result['depth']} tokens before")
    axes.set_xticks(range(len(names)), names)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("speed-up over plain decoding")
    axes.legend()

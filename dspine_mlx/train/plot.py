"""The curves of a training log as a PNG."""

from pathlib import Path

from dspine_mlx.errors import InputError
from dspine_mlx.train.loop import read_log

PANELS = (
    ("loss", ("loss", "ce")),
    (
        "acceptance length, teacher-forced",
        ("greedy", "sampled", "held_out_greedy", "held_out_sampled"),
    ),
    ("learning rate", ("learning_rate",)),
)


def plot(log: Path, output: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "--plot needs matplotlib; install it with pip install 'dspine-mlx[train]'"
        ) from error
    records = list(read_log(log))
    figure = Figure(figsize=(15, 4), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for name in names:
            points = [(r["step"], r[name]) for r in records if name in r]
            if points:
                steps, values = zip(*points, strict=True)
                held_out = name.startswith("held_out")
                axes.plot(steps, values if held_out else smooth(values), label=name)
        axes.set(title=title, xlabel="step")
        axes.legend()
    temporary = output.with_name(f".{output.name}.part")
    figure.savefig(temporary, format="png")
    temporary.replace(output)


def smooth(values: tuple[float, ...], decay: float = 0.95) -> list[float]:
    """Exponential average, corrected for its start."""
    mean, out = 0.0, []
    for i, value in enumerate(values, 1):
        mean = decay * mean + (1 - decay) * value
        out.append(mean / (1 - decay**i))
    return out

"""The pictures of docs/verify-length.md, of the pair that ships.

    python -m tests.bench.pictures reliability docs/images/reliability.png
    python -m tests.bench.pictures costs docs/images/costs.png

reliability: survivals as the shipped calibration predicts them against what was accepted, in
full-width rounds on questions that neither drafter nor calibration has seen (pip install --no-deps
reasoning-gym). costs: what steps cost here in float32, measured now, and what every fixed length
would gain with them over plain decoding on the texts of demo_trace.npz. On Linux preload a fast
BLAS: LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3 OPENBLAS_NUM_THREADS=2
"""

from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dspine_mlx import load, load_drafter
from dspine_mlx.cli.output import check_new
from dspine_mlx.cli.plots import About, draw_reliability, panels
from dspine_mlx.load import DEMO
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.verify_length.calibration import Calibration, mode_of, uncalibrated
from dspine_mlx.verify_length.costs import Curve
from dspine_mlx.verify_length.fit import Rounds, record, sum_of, survival_errors
from dspine_mlx.verify_length.profile import measure
from dspine_mlx.verify_length.store import SHIPPED, describe, device_name, load_calibrations
from recipes.demo import HELD_OUT_SEED
from recipes.word_problems import questions

DPI = 80  # the pages' pictures are small
TRACE = Path(__file__).parent / "demo_trace.npz"
app = typer.Typer(help=__doc__)
Picture = Annotated[Path, typer.Argument(help="PNG to write.")]


@app.command()
def reliability(
    path: Picture, texts: Annotated[int, typer.Option(help="Questions per mode.")] = 85
) -> None:
    check_new(path)
    model, tokenizer, drafter = load()
    assert drafter is not None
    with panels(path, 2, About(describe(drafter), device_name()), DPI) as axes:
        for ax, temperature in zip(axes, (0.0, 1.0), strict=True):
            sampler = Sampler(temp=temperature)
            rounds, calibration = recorded((model, tokenizer, drafter), sampler, texts)
            name = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            draw_reliability(ax, name, rounds, calibration)
            for label, one in (
                ("as the drafter says", uncalibrated(rounds.evidence.shape[1])),
                ("calibrated", calibration),
            ):
                error = survival_errors(one, rounds.evidence, rounds.accepted).mean()
                print(f"{name}, {label}: mean error {error:.1%}, {len(rounds.accepted)} rounds")


def recorded(pair: Any, sampler: Sampler, texts: int) -> tuple[Rounds, Calibration]:
    """Full-width rounds on held-out questions, and the shipped calibration for them."""
    model, tokenizer, drafter = pair
    shipped = load_calibrations(drafter, DEMO / "drafter" / SHIPPED)
    mx.random.seed(0)
    chats = ([{"role": "user", "content": q}] for q in questions(texts, HELD_OUT_SEED))
    prompts = (tokenizer.apply_chat_template(c, add_generation_prompt=True) for c in chats)
    rounds = sum_of(record(model, tokenizer, drafter, p, sampler, 128) for p in prompts)
    return rounds, shipped[mode_of(sampler)]


@app.command()
def costs(path: Picture) -> None:
    check_new(path)
    model, _, _ = load()
    model.set_dtype(mx.float32)  # CPUs have no fast half precision
    drafter = load_drafter(DEMO / "drafter", model)
    curve = measure(drafter)
    with panels(path, 2, About(describe(drafter), device_name()), DPI) as (left, right):
        draw_steps(left, curve)
        draw_gains(right, curve)
        for axes in (left, right):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_steps(axes: Axes, curve: Curve) -> None:
    rows = np.arange(1, len(curve.verify[0]) + 1)
    for depth, verify in zip(curve.depths, curve.verify, strict=True):
        axes.plot(rows, 1e3 * np.array(verify), marker=".", label=f"verify, {depth} tokens deep")
    plain, draft = 1e3 * curve.plain[0], 1e3 * curve.draft[0]
    axes.plot(rows, plain * rows, color="0.6", linestyle="--", label="plain decoding of as many")
    axes.axhline(draft, color="0.3", linestyle=":", label="one draft")
    axes.set(xlabel="rows of the forward", ylabel="ms")
    axes.set_ylim(0, 1.3 * max(draft, 1e3 * curve.verify[1][-1]))
    axes.legend(fontsize="small")
    print(f"plain {plain:.2f} ms, draft {draft:.2f} ms")
    print("verify, ms:", " ".join(f"{1e3 * s:.2f}" for s in curve.verify[0]))


def draw_gains(axes: Axes, curve: Curve) -> None:
    """(1 + a_1 + ... + a_l) plain / (draft + T(1 + l)), a_j the share of blocks with j accepted."""
    accepted = np.load(TRACE)["stands"]
    lengths = np.arange(len(curve.verify[0]))
    tokens = 1 + np.cumsum([0.0, *((accepted >= j).mean() for j in lengths[1:])])
    for depth in curve.depths:
        plain, *verify, draft = curve.at(depth)
        gains = tokens * plain / (draft + np.array(verify))
        axes.plot(lengths, gains, marker=".", label=f"{depth} tokens deep")
        best = int(gains.argmax())
        print(f"at {depth}: best length {best}, {gains[best]:.2f} times plain decoding")
    axes.axhline(1, color="0.6", linestyle="--", label="plain decoding")
    axes.set(xlabel="drafted tokens verified", ylabel="speed over plain decoding", ylim=(0, None))
    axes.legend(fontsize="small")


if __name__ == "__main__":
    app()

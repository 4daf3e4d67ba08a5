"""dspine-mlx calibrate: measure and correct a drafter's confidence."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspine_mlx.cli.options import PAIR, PATIENCE, PatienceOption, PipelineOption, TargetOption
from dspine_mlx.cli.output import check_new, new_file
from dspine_mlx.errors import InputError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from dspine_mlx.measure.prompts import Messages
    from dspine_mlx.verify_length.fit import Fit


def calibrate(
    model: TargetOption = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Drafter: a folder or Hub id.", rich_help_panel=PAIR)
    ] = None,
    prompts: Annotated[
        str,
        typer.Option(
            help="A file (.jsonl, or a prompt per line) or one of humaneval, gsm-templates, gsm8k, "
            "mt-bench. Your own traffic is best."
        ),
    ] = "gsm-templates",
    held_out: Annotated[
        str | None,
        typer.Option(
            help="Prompts of the same kind to measure on; default: half of the others at first."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Prompts to use, of each file.")] = 40,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", help="Tokens per text.")] = 128,
    temps: Annotated[
        str,
        typer.Option(
            help="Temperatures to calibrate at, separated by commas: 0 is greedy; each other one "
            "serves its band. Bands begin above 0, at 0.5 and at 0.9."
        ),
    ] = "0,0.7,1",
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write here; else beside the measured costs, where it is found automatically."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Reliability plot, as PNG (needs matplotlib).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
    pipeline: PipelineOption = False,
    patience: PatienceOption = PATIENCE,
) -> None:
    """Fit the drafter's confidence to what the target accepts."""
    import mlx.core as mx

    from dspine_mlx.arguments import check_whole
    from dspine_mlx.group.meet import leading, meet
    from dspine_mlx.group.no_drafter import NoDrafter
    from dspine_mlx.load import DEMO, load
    from dspine_mlx.measure.prompts import load_suite
    from dspine_mlx.round.sampler import Sampler
    from dspine_mlx.verify_length import fit
    from dspine_mlx.verify_length.calibration import mode_of
    from dspine_mlx.verify_length.store import calibration_path, save_calibrations

    trusting = {"trust_remote_code": False}
    group = meet(pipeline, patience)
    if group is not None and group.follows:
        group.follow(model or str(DEMO / "target"), trusting)
    with leading(group):
        check_whole("--limit", limit, 1)
        check_whole("--max-tokens", max_tokens, 1)
        check_new(output)
        check_new(plot)
        if plot is not None and not find_spec("matplotlib"):
            raise InputError("--plot needs matplotlib; install it with pip")
        temperatures = numbers(temps)
        suites = [
            load_suite(name, limit, lambda line: typer.echo(line, err=True))
            for name in filter(None, (prompts, held_out))
        ]
        pair: tuple[Any, Any, Any]
        if group is None:
            pair = load(model, draft_model)
        else:
            pair = group.load(*names(model, draft_model), trusting)
        target, tokenizer, drafter = pair
        if drafter is None or isinstance(drafter, NoDrafter):
            raise InputError("there is no drafter to calibrate; give --draft-model")
        fits: dict[str, Fit] = {}
        for temperature in temperatures:
            sampler = Sampler(temp=temperature)
            mx.random.seed(0)
            recorded = [
                [
                    fit.record(target, tokenizer, drafter, tokens, sampler, max_tokens)
                    for tokens in (encode(tokenizer, m) for m in suite)
                ]
                for suite in suites
            ]
            fits[mode_of(sampler)] = fit.calibrate(*recorded)
        path = output or calibration_path(drafter)
        save_calibrations(path, drafter, {mode: f.calibration for mode, f in fits.items()})
        if as_json:
            typer.echo(
                json.dumps({"file": str(path), "modes": {m: report(f) for m, f in fits.items()}})
            )
        else:
            for mode, one in fits.items():
                show(mode, one)
            typer.echo(f"Written to {path}")
        if plot is not None:
            draw(fits, plot)


def names(model: str | None, draft_model: str | None) -> tuple[str, str | None]:
    """The pair that ships if nothing is named."""
    from dspine_mlx.load import DEMO

    if model is None and draft_model is None:
        return str(DEMO / "target"), str(DEMO / "drafter")
    if model is None:
        raise InputError(f"the drafter {draft_model} needs its target; give --model")
    return model, draft_model


def encode(tokenizer: "TokenizerWrapper", messages: "Messages") -> list[int]:
    tokens: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tokens


def numbers(value: str) -> list[float]:
    try:
        temperatures = [float(part) for part in value.split(",")]
    except ValueError:
        temperatures = [-1.0]
    if min(temperatures) < 0:
        raise InputError(f"--temps is {value!r}; it must be numbers from 0 on, separated by commas")
    return temperatures


def report(one: "Fit") -> dict[str, Any]:
    return {
        "rounds": one.calibration.rounds,
        "temperatures": list(one.calibration.temperatures),
        "biases": list(one.calibration.biases),
        "slopes": list(one.calibration.slopes),
        "ece_before": one.before.tolist(),
        "ece_after": one.after.tolist(),
        "ece_by_chance": one.by_chance.tolist(),
    }


def show(mode: str, one: "Fit") -> None:
    """Print each slot's T, b, s, and the survival's calibration error on held-out text."""
    from dspine_mlx.cli.screen import console, print_table

    fitted, errors = one.calibration, (one.before, one.after, one.by_chance)
    rows = [
        [
            str(slot + 1),
            f"{(one.held_out.accepted > slot).mean():.0%}",
            f"{fitted.temperatures[slot]:.2f}",
            f"{fitted.biases[slot]:+.2f}",
            f"{fitted.slopes[slot]:+.2f}" if fitted.slopes else "",
            *(f"{error[slot]:.1%}" for error in errors),
        ]
        for slot in range(len(fitted.biases))
    ]
    rows.append(["mean", "", "", "", "", *(f"{error.mean():.1%}" for error in errors)])
    screen = console()
    screen.print(f"{mode}, {len(one.held_out.accepted)} held-out rounds")
    names = ["slot", "accepted", "T", "b", "s", "error before", "after", "by chance"]
    print_table(screen, names, rows)


def draw(fits: "dict[str, Fit]", path: Path) -> None:
    """Plot actual against predicted survival, before and after calibration, in 15 bins."""
    import matplotlib
    import numpy as np

    from dspine_mlx.verify_length.calibration import sigmoid, uncalibrated
    from dspine_mlx.verify_length.fit import BINS

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(fits), figsize=(4 * len(fits), 4), squeeze=False)
    for ax, (mode, one) in zip(axes[0], fits.items(), strict=True):
        slots = len(one.calibration.biases)
        accepted = (one.held_out.accepted[:, None] > np.arange(slots)).ravel()
        ax.plot([0, 1], [0, 1], color="0.7")
        for name, calibration in (("before", uncalibrated(slots)), ("after", one.trial)):
            chances = sigmoid(calibration.log_odds(one.held_out.evidence))
            survival = np.cumprod(chances, axis=1).ravel()
            bins = np.minimum((survival * BINS).astype(int), BINS - 1)
            used = np.unique(bins)
            means = [[x[bins == b].mean() for b in used] for x in (survival, accepted)]
            ax.plot(*means, marker="o", label=name)
        ax.set(title=mode, xlabel="predicted to be accepted", ylabel="accepted")
        ax.legend()
    figure.tight_layout()
    with new_file(path) as part:
        figure.savefig(part, format="png")

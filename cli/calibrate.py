"""dspine-mlx calibrate: measure and correct a drafter's confidence."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspine_mlx.cli.groups import Commands
from dspine_mlx.cli.options import DraftOption, JsonOption, TargetOption
from dspine_mlx.cli.output import check_new, check_plot
from dspine_mlx.cli.ranks import on_every_rank
from dspine_mlx.errors import InputError

if TYPE_CHECKING:
    import mlx.nn as nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from dspine_mlx.drafters.drafter import Drafter
    from dspine_mlx.measure.prompts import Messages
    from dspine_mlx.verify_length.fit import Fit, Rounds
    from dspine_mlx.verify_length.readings import Reading

COMPARED = 8  # prompts that readings are compared on

app = Commands()


@app.command()
@on_every_rank
def calibrate(
    model: TargetOption = None,
    draft_model: DraftOption = None,
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
    as_json: JsonOption = False,
) -> None:
    """Fit the drafter's confidence to what the target accepts. Of a DSpark drafter also choose the
    pool of candidates that is fastest here; it is used from the next load on."""
    from dspine_mlx.measure.prompts import load_suite
    from dspine_mlx.models.needs import check_pair

    check_new(output)
    check_plot(plot)
    temperatures = numbers(temps)
    check_pair(model, draft_model)  # before large imports, so that it is said at once
    for flag, number in (("--limit", limit), ("--max-tokens", max_tokens)):
        if number < 1:
            raise InputError(f"{flag} is {number}; it must be at least 1")
    suites = [
        load_suite(name, limit, lambda line: typer.echo(line, err=True))
        for name in (prompts, held_out)
        if name is not None
    ]

    from dspine_mlx.cli.pair import chosen, load_here, loading
    from dspine_mlx.cli.plots import About, reliability
    from dspine_mlx.verify_length.store import (
        calibration_path,
        describe,
        device_name,
        save_calibrations,
    )

    draft_model = chosen(model, draft_model)
    with loading(model, draft_model) as say:
        target, tokenizer, drafter = load_here(model, draft_model, told=say)
    if drafter is None or not drafter.config.num_proposals:
        raise InputError("there is no drafter to calibrate; give --draft-model")
    pair = target, tokenizer, drafter
    readings, chosen_reading = settle(pair, suites[0], temperatures, max_tokens)
    fits = fit_all(pair, suites, temperatures, max_tokens)
    path = output or calibration_path(drafter)
    modes = {mode: f.calibration for mode, f in fits.items()}
    save_calibrations(path, drafter, modes, chosen_reading and chosen_reading.changes)
    if as_json:
        fitted = {m: report(f) for m, f in fits.items()}
        data: dict[str, Any] = {"file": str(path), "modes": fitted}
        if chosen_reading is not None:
            data |= {"readings": [r._asdict() for r in readings], "reading": chosen_reading.name}
        typer.echo(json.dumps(data))
    else:
        for mode, one in fits.items():
            show(mode, one)
        if chosen_reading is not None:
            show_readings(readings, chosen_reading)
        typer.echo(f"Written to {path}")
    if plot is not None:
        reliability(fits, plot, About(describe(drafter), device_name()))


def settle(
    pair: "tuple[nn.Module, TokenizerWrapper, Drafter]",
    suite: "list[Messages]",
    temperatures: list[float],
    max_tokens: int,
) -> "tuple[list[Reading], Reading | None]":
    """Compare the drafter's readings on some of the prompts, and let it draft with the fastest.
    None where its method has one reading only."""
    import mlx.core as mx
    import numpy as np

    from dspine_mlx.checkpoints.open import open_checkpoint
    from dspine_mlx.verify_length import readings

    target, tokenizer, drafter = pair
    if drafter.folder is not None:  # not as an earlier calibration left it
        drafter.network.config = open_checkpoint(drafter.folder).config

    def accepted() -> np.ndarray:
        mx.random.seed(0)
        texts = [recorded(pair, suite[:COMPARED], t, max_tokens) for t in temperatures]
        return np.concatenate([text.accepted for each in texts for text in each])

    found = readings.compare_readings(drafter, accepted)
    if not found:
        return [], None
    chosen = readings.fastest(found)
    readings.use_reading(drafter, chosen.changes)
    return found, chosen


def recorded(
    pair: "tuple[nn.Module, TokenizerWrapper, Drafter]",
    suite: "list[Messages]",
    temperature: float,
    max_tokens: int,
) -> "list[Rounds]":
    """The rounds of every prompt's text."""
    from dspine_mlx.cli.screen import tracked
    from dspine_mlx.measure.prompts import encode
    from dspine_mlx.round.sampler import Sampler
    from dspine_mlx.verify_length.fit import record

    target, tokenizer, drafter = pair
    sampler = Sampler(temp=temperature)
    prompts = (encode(tokenizer, messages) for messages in suite)
    each = tracked(prompts, f"temperature {temperature:g}", len(suite))
    return [record(target, tokenizer, drafter, p, sampler, max_tokens) for p in each]


def fit_all(
    pair: "tuple[nn.Module, TokenizerWrapper, Drafter]",
    suites: "list[list[Messages]]",
    temperatures: list[float],
    max_tokens: int,
) -> "dict[str, Fit]":
    """A fit per serving mode, from the rounds of all prompts at its temperature."""
    import mlx.core as mx

    from dspine_mlx.round.sampler import Sampler
    from dspine_mlx.verify_length import fit
    from dspine_mlx.verify_length.calibration import mode_of

    fits: dict[str, Fit] = {}
    for temperature in temperatures:
        mx.random.seed(0)
        texts = [recorded(pair, suite, temperature, max_tokens) for suite in suites]
        fits[mode_of(Sampler(temp=temperature))] = fit.calibrate(*texts)
    return fits


def numbers(value: str) -> list[float]:
    try:
        temperatures = [float(part) for part in value.split(",")]
    except ValueError:
        temperatures = [-1.0]
    if min(temperatures) < 0:
        raise InputError(f"--temps is {value!r}; it must be numbers from 0 on, separated by commas")
    return temperatures


def show_readings(found: "list[Reading]", chosen: "Reading") -> None:
    for reading in found:
        typer.echo(
            f"{reading.name}: {reading.acceptance_length:.2f} tokens per round of whole blocks, "
            f"{reading.speed:.1f} tokens/s with {reading.length} drafted tokens per round"
        )
    typer.echo(f"Chosen: {chosen.name}")


def report(one: "Fit") -> dict[str, Any]:
    return {
        "rounds": one.calibration.rounds,
        "temperatures": list(one.calibration.temperatures),
        "biases": list(one.calibration.biases),
        "slopes": list(one.calibration.slopes),
        "copy_weights": list(one.calibration.copy_weights),
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
    if fitted.copy_weights:
        weights = " ".join(f"{weight:+.2f}" for weight in fitted.copy_weights)
        screen.print(f"between a copy of earlier text and a draft: {weights}")

"""dspine-mlx bench: the net gain on this machine."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dspine_mlx.cli.options import PAIR, TargetOption
from dspine_mlx.cli.output import check_new, new_file
from dspine_mlx.errors import InputError

LOAD, MEASURE, OUTPUT = "Load", "Measurement", "Output"


def bench(
    model: TargetOption = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Drafter: a folder or Hub id, or 'auto'. Without one that fits the target, only "
            "mlx-lm's own modes are measured.",
            rich_help_panel=PAIR,
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            "--prompts",
            help="humaneval, gsm-templates, gsm8k, mt-bench, or a file: .jsonl, or one prompt "
            "per line. Your own traffic tells most.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Prompts to use.", rich_help_panel=LOAD)] = 10,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", help="Tokens per text.", rich_help_panel=LOAD)
    ] = 128,
    depths: Annotated[
        str,
        typer.Option(
            help="Tokens of filler before each prompt, separated by commas, such as 0,4096.",
            rich_help_panel=LOAD,
        ),
    ] = "0",
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Measure the server instead: so many requests at once to `dspine-mlx serve` on "
            "this machine, HTTP included; several numbers with commas, such as 1,2,4,8,16. Tokens "
            "per second of all requests together, time to the first text, and the slowest request, "
            "of mlx-lm's batches (plain) against drafting for all of them (auto, fixed:N).",
            rich_help_panel=LOAD,
        ),
    ] = None,
    temp: Annotated[
        float, typer.Option(help="Temperature; 0 is greedy.", rich_help_panel=LOAD, min=0)
    ] = 0.0,
    compare: Annotated[
        str,
        typer.Option(
            help="Modes to compare, separated by commas: plain (always measured), auto, fixed:N "
            "(N drafted tokens offered per round), mlx-lm-draft:MODEL (mlx-lm's own speculative "
            "decoding).",
            rich_help_panel=MEASURE,
        ),
    ] = "plain,fixed:4,auto",
    repeat: Annotated[
        int, typer.Option(help="Runs of each text and mode.", rich_help_panel=MEASURE)
    ] = 3,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Also write the results to this new file.", rich_help_panel=OUTPUT
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also draw the speed-ups into this new PNG; with --concurrency the tokens per "
            "second by the number of requests (needs matplotlib).",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Measure speed against mlx-lm's own decoding, all modes in turn in one run.

    Prints medians over all texts and runs: tokens per second since the prompt was read, and of the
    whole call; speed-up over plain decoding of the same text in the same turn (and its range), of
    texts of 32 tokens or more; tokens per round; how many texts are plain decoding's, and the first
    token that is not (and by how many nats the target prefers its own there); time to the first
    token; peak memory; how many times as fast auto is on the same text in the same turn; then where
    a round's time goes. On a Mac, run as root, also energy.
    Ctrl-C prints what has been measured so far.
    """
    from dspine_mlx.cli.bench_runs import concurrent, load_pair, one_by_one
    from dspine_mlx.cli.drafter import chosen
    from dspine_mlx.cli.drawing import check_plot, draw
    from dspine_mlx.measure.compare import verify_length
    from dspine_mlx.measure.prompts import load_suite

    check_new(json_file)
    check_new(plot)
    if plot is not None:
        check_plot()
    for flag, number in (("--limit", limit), ("--repeat", repeat), ("--max-tokens", max_tokens)):
        if number < 1:
            raise InputError(f"{flag} is {number}; it must be at least 1")
    requests = [] if concurrency is None else whole_numbers("--concurrency", concurrency)
    if 0 in requests:
        raise InputError(f"--concurrency is {concurrency}; each number must be at least 1")
    if requests and depths != "0":
        raise InputError("--concurrency measures the server, without --depths")
    if suite is None:
        raise InputError("there are no prompts; give --suite with a name or a file")
    modes = [mode.strip() for mode in compare.split(",") if mode.strip()]
    for mode in modes:
        verify_length(mode)
    positions = whole_numbers("--depths", depths)
    messages = load_suite(suite, limit, lambda line: typer.echo(line, err=True))
    settings = {"prompts": len(messages), "max_tokens": max_tokens, "temp": temp, "repeat": repeat}
    draft_model = chosen(model, draft_model)
    if requests:
        results = list(concurrent(requests, (model, draft_model), modes, messages, settings))
    else:
        pair, modes = load_pair(model, draft_model, temp, modes)
        results = list(one_by_one(pair, modes, messages, positions, settings))
    if json_file is not None:
        with new_file(json_file) as part:
            part.write_text(json.dumps(document(settings, results), indent=1) + "\n")
    if plot is not None and results:
        draw(results, plot)
    if not any(result["ways"] for result in results):
        raise typer.Exit(1)


def document(settings: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """What --json writes."""
    from importlib.metadata import version

    from dspine_mlx.verify_length.store import device_name

    packages = {name: version(name) for name in ("dspine-mlx", "mlx", "mlx-lm")}
    return {
        "versions": packages,
        "device": device_name(),
        "settings": settings,
        "results": results,
    }


def whole_numbers(flag: str, value: str) -> list[int]:
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InputError(f"{flag} is {value!r}; it must be whole numbers separated by commas")
    return [int(part) for part in parts]

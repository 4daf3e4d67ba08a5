"""dspine-mlx bench: the net gain on this machine."""

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from dspine_mlx.cli.groups import Commands, grouped
from dspine_mlx.cli.options import DraftOption, KernelsOption, TargetOption, whole_numbers
from dspine_mlx.cli.output import check_new, check_plot, new_file
from dspine_mlx.cli.ranks import leads, on_every_rank
from dspine_mlx.errors import InputError

app = Commands()

LOAD, MEASURE, OUTPUT = "Load", "Measurement", "Output"
MOST_REQUESTS = 512  # at once: each has a thread here and one in the server
DEEPEST = 10**7  # tokens of filler; no model's context is longer
ROWS_ALONE = "--rows times products by themselves; only --model and --json go with it"
QUESTION = [  # for --live without --suite
    {
        "role": "user",
        "content": "Maria has 9 toys. Her sister has 3 fewer toys than she has. How many toys do "
        "they have together?",
    }
]


class Load(NamedTuple):
    """What is decoded, and how much of it at once."""

    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            "--prompts",
            help="humaneval, gsm-templates, gsm8k, mt-bench, or a file: .jsonl, or one prompt "
            "per line. Your own traffic tells most.",
            rich_help_panel=LOAD,
        ),
    ] = None
    limit: Annotated[int, typer.Option(help="Prompts to use.", rich_help_panel=LOAD)] = 10
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", help="Tokens per text.", rich_help_panel=LOAD)
    ] = 128
    depths: Annotated[
        str,
        typer.Option(
            help="Tokens of filler before each prompt, separated by commas, such as 0,4096.",
            rich_help_panel=LOAD,
        ),
    ] = "0"
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Measure the server instead: this many requests at once to `dspine-mlx serve` on "
            "this machine, HTTP included; several numbers with commas, such as 1,2,4,8,16. Tokens "
            "per second of all requests together, time to the first text, and the slowest request, "
            "of mlx-lm's batches (plain) against drafting for all of them (auto, fixed:N).",
            rich_help_panel=LOAD,
        ),
    ] = None
    temp: Annotated[
        float, typer.Option(help="Temperature; 0 is greedy.", rich_help_panel=LOAD, min=0)
    ] = 0.0

    @property
    def requests(self) -> list[int]:
        """Numbers of requests at once."""
        given = self.concurrency
        return [] if given is None else whole_numbers("--concurrency", given)

    def check(self, live: bool, plot: bool) -> None:
        """`InputError` for impossible numbers, and for flags that contradict each other."""
        check_count("--limit", self.limit)
        check_count("--max-tokens", self.max_tokens)
        if self.concurrency is not None and self.depths != "0":
            raise InputError("--concurrency measures the server, without --depths")
        if 0 in self.requests:
            raise InputError(f"--concurrency is {self.concurrency}; each must be at least 1")
        if max(self.requests, default=0) > MOST_REQUESTS:
            raise InputError(
                f"--concurrency is {self.concurrency}; each must be at most {MOST_REQUESTS}"
            )
        if live and (plot or self.depths != "0" or self.concurrency is not None):
            raise InputError("--live shows one text, without --concurrency, --depths and --plot")
        if self.suite is None and not live:
            raise InputError("there are no prompts; give --suite with a name or a file")


@app.command()
@on_every_rank
@grouped
def bench(
    load: Load,
    model: TargetOption = None,
    draft_model: DraftOption = None,
    kernels: KernelsOption = "auto",
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
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Watch plain decoding and drafting side by side on the first prompt, or on one "
            "that ships.",
            rich_help_panel=MEASURE,
        ),
    ] = False,
    rows: Annotated[
        bool,
        typer.Option(
            "--rows",
            help="Time products of 1 to 16 rows instead, by MLX's own and this package's kernels: "
            "a table to send. Goes with --model (without: typical shapes) and --json; about a "
            "minute.",
            rich_help_panel=MEASURE,
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also draw the speed-ups into this new PNG; with --concurrency the tokens per "
            "second by the number of requests (needs matplotlib).",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Measure speed against mlx-lm's own decoding, all modes in turn in one run. Without a drafter
    that fits the target, only mlx-lm's own modes are measured.

    Prints medians over all texts and runs: tokens per second since the prompt was read, and of the
    whole call; speed-up over plain decoding of the same text in the same turn (and its range), of
    texts of 32 tokens or more; tokens per round; how many texts are plain decoding's, and the first
    token that is not (and by how many nats the target prefers its own there); time to the first
    token; peak memory; how many times as fast auto is on the same text in the same turn; then where
    a round's time goes, what rows of a verify forward cost without and with --kernels, and how many
    drafted texts are plain decoding's: with --kernels exact all of them must be, or the exit status
    is 1. On a Mac, run as root, also energy.
    Ctrl-C prints what has been measured so far.
    """
    from dspine_mlx.measure.modes import AUTO, verify_length
    from dspine_mlx.measure.prompts import load_suite
    from dspine_mlx.models.needs import check_pair

    check_new(json_file)
    check_plot(plot)
    if rows:
        if load != Load() or draft_model is not None or live or plot is not None:
            raise InputError(ROWS_ALONE)
        check_pair(model, None)
        products(model, json_file)
        return
    load.check(live, plot is not None)
    check_count("--repeat", repeat)
    positions = whole_numbers("--depths", load.depths)
    if max(positions) > DEEPEST:
        raise InputError(f"--depths is {load.depths}; each must be at most {DEEPEST}")
    modes = [mode.strip() for mode in compare.split(",") if mode.strip()]
    for mode in modes:
        verify_length(mode)
    alone = rows or live or load.concurrency is not None or any("mlx-lm" in m for m in modes)
    if alone and leads.get() is not None:
        raise InputError("several machines are measured with plain, auto and fixed:N only")
    check_pair(model, draft_model)  # before large imports, so that it is said at once
    if kernels != "auto":  # whose check is among the large imports
        from dspine_mlx.arguments import check_kernels

        check_kernels(kernels)
    messages = [QUESTION]
    if load.suite is not None:
        messages = load_suite(load.suite, load.limit, lambda line: typer.echo(line, err=True))

    from dspine_mlx.cli.bench_runs import concurrent, load_pair, one_by_one, watch
    from dspine_mlx.cli.bench_steps import verify_steps
    from dspine_mlx.cli.bench_tables import draw, draw_loads
    from dspine_mlx.cli.pair import chosen

    settings = {
        "prompts": len(messages),
        "max_tokens": load.max_tokens,
        "temp": load.temp,
        "repeat": repeat,
        "kernels": kernels,
    }
    found: dict[str, Any] = {}
    names = model, chosen(model, draft_model)
    if load.requests:
        results = list(concurrent(load.requests, names, modes, messages, settings))
        if plot is not None and results:
            draw_loads(results, plot, *names)
    else:
        pair, modes = load_pair(*names, load.temp, [AUTO] if live else modes, kernels)
        if live:
            results = [watch(pair, messages[0], load.max_tokens)]
        else:
            results = list(one_by_one(pair, modes, messages, positions, settings))
            found = verify_steps(pair, results) if leads.get() is None else {}
        if plot is not None and results:
            draw(results, plot, pair.drafter)
    write(json_file, document(settings, results) | found)
    if found.get("promise_broken") or not any(result["ways"] for result in results):
        raise typer.Exit(1)


def products(model: str | None, json_file: Path | None) -> None:
    """--rows."""
    from dspine_mlx.cli.bench_rows import rows_of_products

    write(json_file, document({"rows": True}, rows_of_products(model)))


def write(json_file: Path | None, content: dict[str, Any]) -> None:
    if json_file is not None:
        with new_file(json_file) as part:
            part.write_text(json.dumps(content, indent=1) + "\n")


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


def check_count(flag: str, number: int) -> None:
    if number < 1:
        raise InputError(f"{flag} is {number}; it must be at least 1")
    if number >= 10**9:
        raise InputError(f"{flag} is {number}; it must have at most nine digits")

"""dspine-mlx bench: the net gain on this machine."""

import json
from itertools import chain, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspine_mlx.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from dspine_mlx.bench import Comparison, Pair


def bench(
    model: Annotated[
        str | None, typer.Option(help="Target; without it, the pair that ships with the package.")
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="Drafter.")] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            "--prompts",
            help="humaneval, gsm-templates, gsm8k, mt-bench, or a file: .jsonl, or a prompt a "
            "line. Your own traffic tells most.",
        ),
    ] = None,
    compare: Annotated[
        str,
        typer.Option(help="Ways to compare, by commas: plain, auto, fixed:N, mlx-lm-draft:MODEL."),
    ] = "plain,fixed:4,auto",
    limit: Annotated[int, typer.Option(help="Prompts to use.")] = 10,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", help="Tokens a text.")] = 128,
    depths: Annotated[
        str, typer.Option(help="Tokens of filler before each prompt, by commas.")
    ] = "0",
    temp: Annotated[float, typer.Option(help="Temperature.")] = 0.0,
    repeat: Annotated[int, typer.Option(help="Runs of each text and way.")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results here, as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the results here, as PNG (needs matplotlib).")
    ] = None,
) -> None:
    """Measure speed against mlx-lm's own decoding, interleaved in one run."""
    from dspine_mlx import bench as runner
    from dspine_mlx.load import load
    from dspine_mlx.sampling import Sampler
    from dspine_mlx.suites import load_suite

    for path in filter(None, (json_file, plot)):
        if path.exists():
            raise InputError(f"{path} exists; name a new file")
    if limit < 1 or repeat < 1:
        raise InputError(f"--limit {limit} and --repeat {repeat} must be at least 1")
    if suite is None:
        raise InputError("there are no prompts; give --suite with a name or a file")
    messages = load_suite(suite, limit, lambda line: typer.echo(line, err=True))
    target, tokenizer, drafter = load(model, draft_model)
    if drafter is None:
        raise InputError("there is no drafter to measure; give --draft-model")
    pair = runner.Pair(target, tokenizer, drafter, Sampler(temp=temp))
    prompts = [tokenizer.apply_chat_template(m, add_generation_prompt=True) for m in messages]
    ways = [way.strip() for way in compare.split(",") if way.strip()]
    results: list[dict[str, Any]] = []
    for depth in whole_numbers("--depths", depths):
        filled = [[*islice(cycle(chain(*prompts)), depth), *prompt] for prompt in prompts]
        steps = runner.compare(pair, ways, filled, max_tokens=max_tokens, repeat=repeat)
        comparison, finished = run_all(steps, f"depth {depth}", len(prompts))
        if comparison is not None:
            results.append({"depth": depth, "ways": show(comparison, depth, pair, filled)})
        if not finished:
            typer.echo("Interrupted; these are the results so far.", err=True)
            break
    write(results, json_file, plot)


def run_all(
    steps: "Iterator[Comparison]", what: str, total: int
) -> "tuple[Comparison | None, bool]":
    """The comparison of all prompts, or of those before Ctrl-C, and whether that was all."""
    from rich.console import Console
    from rich.progress import track

    comparison = None
    try:
        for comparison in track(  # noqa: B007  # the last one has it all
            steps, what, total, console=Console(stderr=True), transient=True
        ):
            pass
    except KeyboardInterrupt:
        return comparison, False
    return comparison, True


def show(
    comparison: "Comparison", depth: int, pair: "Pair", prompts: list[list[int]]
) -> list[dict[str, Any]]:
    """Print tables and forks; the summaries."""
    from rich.console import Console

    from dspine_mlx.bench import PLAIN, fork_margin

    console = Console(highlight=False)
    summaries = [comparison.summary(way) for way in comparison.ways]
    console.print(f"\n{depth} tokens of context before the prompt")
    console.print(table(summaries))
    console.print(bars(summaries))
    for way in comparison.ways[1:]:
        for index, position in islice(comparison.forks(way), 3):
            plain, other = (comparison.runs[w][index][0].tokens for w in (PLAIN, way))
            margin = fork_margin(pair, prompts[index], plain, position, other[position])
            console.print(
                f"{way}: prompt {index + 1} leaves plain decoding's text at token {position + 1}, "
                f"where the target prefers its own by {margin:.3g} nats"
            )
    return summaries


def whole_numbers(flag: str, value: str) -> list[int]:
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InputError(f"{flag} is {value!r}; it must be whole numbers separated by commas")
    return [int(part) for part in parts]


def table(summaries: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

    result = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "tokens/s", "speed-up", "range", "a round", "same text", "first", "memory"):
        result.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for s in summaries:
        low, high = s["speedup_range"] or (0, 0)
        result.add_row(
            s["way"],
            f"{s['tokens_per_second']:.1f}",
            f"{s['speedup'] or 0:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{s['acceptance_length']:.2f}",
            f"{s['identical']}/{s['texts']}",
            f"{s['first_token_seconds'] * 1e3:.0f} ms",
            f"{s['peak_memory_gb']:.2f} GB",
        )
    return result


def bars(summaries: list[dict[str, Any]]) -> "Table":
    """Speed-ups as a bar chart."""
    from rich.table import Table

    result = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    top = max(s["speedup"] or 0 for s in summaries)
    for s in summaries:
        speedup = s["speedup"] or 0
        result.add_row(s["way"], "█" * round(40 * speedup / top) if top else "", f"{speedup:.2f}")
    return result


def write(results: list[dict[str, Any]], json_file: Path | None, plot: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")
    if plot is not None:
        try:
            import matplotlib
        except ImportError as error:
            raise InputError("--plot needs matplotlib; install it with pip") from error
        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4))
        names = [s["way"] for s in results[0]["ways"]] if results else []
        for i, result in enumerate(results):
            places = [x + 0.8 * i / len(results) for x in range(len(names))]
            speeds = [s["speedup"] or 0 for s in result["ways"]]
            axes.bar(places, speeds, 0.8 / len(results), label=f"{result['depth']} tokens before")
        axes.set_xticks(range(len(names)), names)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylabel("speed-up over plain decoding")
        axes.legend()
        figure.savefig(plot, dpi=150, bbox_inches="tight")

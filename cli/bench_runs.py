"""Runs of dspine-mlx bench, one text at a time or many at once."""

from collections.abc import Iterator
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, TypeVar

import typer

from dspine_mlx.checkpoints.files import read_config
from dspine_mlx.cli.bench_live import live
from dspine_mlx.cli.bench_tables import show_batches, show_depth
from dspine_mlx.cli.pair import load_here, loading, measure_costs
from dspine_mlx.cli.ranks import leads
from dspine_mlx.cli.screen import tracked
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO, load, load_drafter, resolve
from dspine_mlx.measure import energy
from dspine_mlx.measure.compare import (
    AUTO,
    PLAIN,
    Comparison,
    Models,
    Run,
    add_margins,
    compare,
    make_run,
    out_of_memory,
    summaries,
    untimed,
    verify_length,
)
from dspine_mlx.measure.phases import split
from dspine_mlx.measure.prompts import Messages, encode
from dspine_mlx.measure.server_load import Request, check_mode, compare_modes, serving
from dspine_mlx.models.choose import hint
from dspine_mlx.models.needs import LOOKUP
from dspine_mlx.round.sampler import Sampler

Step = TypeVar("Step")
INTERRUPTED = "Interrupted; these are the results so far."
UNMEASURED = "Interrupted before the first text was measured."


def load_pair(
    model: str | None,
    draft_model: str | None,
    temp: float,
    modes: list[str],
    kernels: str = "auto",
) -> tuple[Models, list[str]]:
    """Load the pair, and the modes it can run; a drafter that does not fit is reported and
    skipped."""
    reason = f"there is no --draft-model; {hint(model)}" if model else "there is no --draft-model"
    with loading(model, draft_model) as say:
        if model is None or draft_model is None or leads.get() is not None:
            target, tokenizer, drafter = load_here(model, draft_model, kernels=kernels, told=say)
        else:
            if draft_model != LOOKUP:  # fail on a wrong name; a misfit is only reported
                read_config(resolve(draft_model))
            target, tokenizer, drafter = load(model)
            try:
                drafter = load_drafter(draft_model, target, kernels=kernels, told=say)
            except InputError as error:
                reason = str(error)
    if drafter is not None and drafter.plain:
        modes = [PLAIN]
    elif drafter is not None and AUTO in modes:
        measure_costs(drafter)
    if drafter is None:
        modes = [mode for mode in modes if verify_length(mode) is None]
        typer.echo(
            f"Nothing is drafted, only mlx-lm's own decoding is measured: {reason}", err=True
        )
    return Models(target, tokenizer, drafter, Sampler(temp=temp)), modes


def one_by_one(
    pair: Models,
    modes: list[str],
    messages: list[Messages],
    depths: list[int],
    settings: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Measure one text at a time. Yields the results of each depth, until Ctrl-C or out of
    memory."""
    prompts = [encode(pair.tokenizer, conversation) for conversation in messages]
    tokens, repeat = settings["max_tokens"], settings["repeat"]
    for depth in depths:
        filled = [[*islice(cycle(chain(*prompts)), depth), *prompt] for prompt in prompts]
        steps = compare(pair, modes, filled, max_tokens=tokens, repeat=repeat)
        try:
            comparison, finished = run_all(steps, f"depth {depth}", len(prompts))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            typer.echo(f"Plain decoding at depth {depth} is out of memory: {error}", err=True)
            return
        if comparison is not None:
            result = analyse(comparison, pair, filled, tokens if finished else 0)
            show_depth({"depth": depth} | result)
            yield {"depth": depth} | result
        if not finished:
            typer.echo(INTERRUPTED if comparison else UNMEASURED, err=True)
            return


def watch(pair: Models, messages: Messages, max_tokens: int) -> dict[str, Any]:
    """--live, on one prompt."""
    if pair.drafter is None:
        raise InputError("--live compares drafting with plain decoding; give --draft-model")
    return live(pair, encode(pair.tokenizer, messages), max_tokens)


def run_all(steps: Iterator[Step], what: str, total: int) -> tuple[Step | None, bool]:
    """Run to the end or to Ctrl-C: the last step, and whether it was the end."""
    last = None
    try:
        for last in tracked(steps, what, total):  # noqa: B007  # the last one has it all
            pass
    except KeyboardInterrupt:
        return last, False
    return last, True


def analyse(
    comparison: Comparison, pair: Models, prompts: list[list[int]], max_tokens: int
) -> dict[str, Any]:
    """Summarise a comparison, and add further passes: margins at divergences, where a round's time
    goes, energy. max_tokens 0: the user wants to stop, so these are left out."""
    rows = summaries(comparison, greedy=pair.sampler.temp == 0)
    result: dict[str, Any] = {"ways": rows, "dropped": comparison.dropped, "splits": []}
    result["interrupted"] = not max_tokens
    if max_tokens:
        try:
            add_margins(rows, comparison, pair, prompts)
            result["splits"] = splits(comparison, pair, prompts[0], max_tokens)
            add_energy(rows, pair, prompts, max_tokens)
        except KeyboardInterrupt:
            result["interrupted"] = True
            typer.echo("Interrupted; the rest of this depth's passes is left out.", err=True)
    return result


def splits(
    comparison: Comparison, pair: Models, prompt: list[int], max_tokens: int
) -> list[dict[str, Any]]:
    """Split a round of every mode that drafted, at the length it offered most often."""
    if pair.drafter is None or not pair.drafter.config.num_proposals:
        return []
    rows = []
    for mode in comparison.modes:
        offered = comparison.verify_lengths(mode)
        del offered[0]
        if offered:
            one = split(pair, prompt, offered.most_common(1)[0][0], min(max_tokens, 64))
            row = {"way": mode, "length": one.length, "rounds": one.rounds}
            rows.append(row | {"seconds": one.phases, "normal_seconds": one.normal})
    return rows


def add_energy(
    rows: list[dict[str, Any]], pair: Models, prompts: list[list[int]], max_tokens: int
) -> None:
    if not energy.on_mac():
        return
    if not energy.is_root():
        typer.echo(
            "Energy is not measured: powermetrics is for root; run this with sudo.", err=True
        )
        return
    for row in rows:
        run = partial(count, make_run(row["way"], pair), max_tokens)
        joules = energy.joules_per_token(run, prompts)
        if joules is not None:
            row["joules_per_token"] = joules


def count(run: Run, max_tokens: int, prompt: list[int]) -> int:
    return sum(1 for _ in run(prompt, max_tokens, untimed))


def concurrent(
    counts: list[int],
    names: tuple[str | None, str | None],
    modes: list[str],
    messages: list[Messages],
    settings: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Measure requests at once, through one server; a result for each number of them."""
    for mode in modes:
        check_mode(mode)
    model, draft_model = names
    if model is None and draft_model is None:
        model, draft_model = str(DEMO / "target"), str(DEMO / "drafter")
    if model is None:
        raise InputError(f"the drafter {draft_model} needs its target; give --model")
    for name in filter(None, (model, draft_model)):
        if name != LOOKUP:
            read_config(resolve(name))  # fail here on a wrong name, not in the server
    if draft_model is None:
        typer.echo("Nothing is drafted: there is no --draft-model", err=True)
        modes = [PLAIN]
    with serving(model, draft_model, max(counts), settings["kernels"]) as port:
        asked = Request(port, settings["max_tokens"], settings["temp"])
        for requests in counts:
            steps = compare_modes(asked, modes, messages, requests, settings["repeat"])
            measured, finished = run_all(steps, f"{requests} at once", settings["repeat"])
            if measured is not None:
                rows = [measured.summary(mode) for mode in measured.modes]
                result = {"requests": requests, "ways": rows, "dropped": measured.dropped}
                show_batches(result)
                yield result
            if not finished:
                typer.echo(INTERRUPTED if measured else UNMEASURED, err=True)
                return

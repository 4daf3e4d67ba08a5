"""What dspine-mlx bench does, one text at a time or many at once."""

from collections.abc import Iterator
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, TypeVar

import typer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.progress import track

from dspine_mlx.checkpoints.files import read_config
from dspine_mlx.cli.bench_tables import show_crowd, show_depth
from dspine_mlx.cli.screen import console
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO, load, load_drafter, resolve
from dspine_mlx.measure import energy
from dspine_mlx.measure.compare import (
    PLAIN,
    Comparison,
    Pair,
    Run,
    add_margins,
    compare,
    make_way,
    out_of_memory,
    summaries,
    untimed,
    verify_length,
)
from dspine_mlx.measure.phases import split
from dspine_mlx.measure.prompts import Messages
from dspine_mlx.measure.server_load import Request, check_way, compare_modes, serving
from dspine_mlx.models.choose import hint
from dspine_mlx.round.sampler import Sampler

Step = TypeVar("Step")


def load_pair(
    model: str | None, draft_model: str | None, temp: float, ways: list[str]
) -> tuple[Pair, list[str]]:
    """The pair, and the ways it can be decoded in; a drafter that does not fit is only said."""
    reason = f"there is no --draft-model; {hint(model)}" if model else "there is no --draft-model"
    if model is None or draft_model is None:
        target, tokenizer, drafter = load(model, draft_model)
    else:
        read_config(resolve(draft_model))  # a wrong name is an error, a wrong drafter is not
        target, tokenizer, drafter = load(model)
        try:
            drafter = load_drafter(draft_model, target)
        except InputError as error:
            reason = str(error)
    if drafter is None:
        ways = [way for way in ways if verify_length(way) is None]
        typer.echo(
            f"Nothing is drafted, only mlx-lm's own decoding is measured: {reason}", err=True
        )
    return Pair(target, tokenizer, drafter, Sampler(temp=temp)), ways


def alone(
    pair: Pair,
    ways: list[str],
    messages: list[Messages],
    depths: list[int],
    settings: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """One text at a time: the results of each depth, until Ctrl-C or the memory's end."""
    prompts = [encoded(pair.tokenizer, conversation) for conversation in messages]
    tokens, repeat = settings["max_tokens"], settings["repeat"]
    for depth in depths:
        filled = [[*islice(cycle(chain(*prompts)), depth), *prompt] for prompt in prompts]
        steps = compare(pair, ways, filled, max_tokens=tokens, repeat=repeat)
        try:
            comparison, finished = run_all(steps, f"depth {depth}", len(prompts))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            typer.echo(f"Plain decoding at depth {depth} is out of memory: {error}", err=True)
            return
        if comparison is not None:
            result = examined(comparison, pair, filled, tokens if finished else 0)
            show_depth({"depth": depth} | result)
            yield {"depth": depth} | result
        if not finished:
            typer.echo("Interrupted; these are the results so far.", err=True)
            return


def encoded(tokenizer: TokenizerWrapper, messages: Messages) -> list[int]:
    if tokenizer.has_chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tokenizer.encode("\n".join(message["content"] for message in messages))


def run_all(steps: Iterator[Step], what: str, total: int) -> tuple[Step | None, bool]:
    """The last step, or the last one before Ctrl-C, and whether that was all."""
    last, screen = None, console(stderr=True)
    try:
        for last in track(  # noqa: B007  # the last one has it all
            steps, what, total, console=screen, transient=True, disable=not screen.is_terminal
        ):
            pass
    except KeyboardInterrupt:
        return last, False
    return last, True


def examined(
    comparison: Comparison, pair: Pair, prompts: list[list[int]], max_tokens: int
) -> dict[str, Any]:
    """What was measured, and what passes of their own add: margins at forks, where a round's time
    goes, energy. max_tokens 0: the user wants to stop, so without these."""
    rows = summaries(comparison, greedy=pair.sampler.temp == 0)
    result: dict[str, Any] = {"ways": rows, "dropped": comparison.dropped, "splits": []}
    if max_tokens:
        try:
            add_margins(rows, comparison, pair, prompts)
            result["splits"] = splits(comparison, pair, prompts[0], max_tokens)
            add_energy(rows, pair, prompts, max_tokens)
        except KeyboardInterrupt:
            typer.echo("Interrupted; the rest of this depth's passes is left out.", err=True)
    return result


def splits(
    comparison: Comparison, pair: Pair, prompt: list[int], max_tokens: int
) -> list[dict[str, Any]]:
    """A split for every way that drafted, at the length it offered most often."""
    rows = []
    for way in comparison.ways:
        offered = comparison.verify_lengths(way)
        del offered[0]
        if offered:
            one = split(pair, prompt, offered.most_common(1)[0][0], min(max_tokens, 64))
            row = {"way": way, "length": one.length, "rounds": one.rounds}
            rows.append(row | {"seconds": one.phases, "normal_seconds": one.normal})
    return rows


def add_energy(
    rows: list[dict[str, Any]], pair: Pair, prompts: list[list[int]], max_tokens: int
) -> None:
    if not energy.on_mac():
        return
    if not energy.is_root():
        typer.echo(
            "Energy is not measured: powermetrics is for root; run this with sudo.", err=True
        )
        return
    for row in rows:
        run = partial(count, make_way(row["way"], pair), max_tokens)
        joules = energy.joules_a_token(run, prompts)
        if joules is not None:
            row["joules_per_token"] = joules


def count(run: Run, max_tokens: int, prompt: list[int]) -> int:
    return sum(1 for _ in run(prompt, max_tokens, untimed))


def at_once(
    requests: int,
    names: tuple[str | None, str | None],
    ways: list[str],
    messages: list[Messages],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Requests together, through the server."""
    for way in ways:
        check_way(way)
    model, draft_model = names
    if model is None and draft_model is None:
        model, draft_model = str(DEMO / "target"), str(DEMO / "drafter")
    if model is None:
        raise InputError(f"the drafter {draft_model} needs its target; give --model")
    for name in filter(None, (model, draft_model)):
        read_config(resolve(name))  # a wrong name is told here, not by the server
    if draft_model is None:
        typer.echo("Nothing is drafted: there is no --draft-model", err=True)
        ways = [PLAIN]
    with serving(model, draft_model, requests) as port:
        asked = Request(port, settings["max_tokens"], settings["temp"])
        steps = compare_modes(asked, ways, messages, requests, settings["repeat"])
        measured, finished = run_all(steps, f"{requests} at once", settings["repeat"])
    result: dict[str, Any] = {"requests": requests, "ways": [], "dropped": {}}
    if measured is not None:
        result["ways"] = [measured.summary(way) for way in measured.ways]
        result["dropped"] = measured.dropped
        show_crowd(result)
    if not finished:
        typer.echo("Interrupted; these are the results so far.", err=True)
    return result

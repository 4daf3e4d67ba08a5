"""dspine-mlx train: drafters for a target, from data to weights."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from dspine_mlx.cli.groups import Commands
from dspine_mlx.cli.options import whole_numbers
from dspine_mlx.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

    from dspine_mlx.train.config import LossConfig
    from dspine_mlx.train.run import Job, Run

app = Commands(help="Train a drafter for a target, in MLX.", no_args_is_help=True)


class Dtype(str, Enum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Layout(str, Enum):
    mlx = "mlx"
    hf = "hf"


class Drafter(NamedTuple):
    """Settings for writing OUTPUT/drafter."""

    layout: Layout
    dtype: Dtype


Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at the first line of data that can't be used.")
]
TARGET, DATA = "Target: an MLX model folder or Hub id.", "JSONL of chats or texts."


@app.command("run")
def run(
    output: Annotated[Path, typer.Argument(help="Folder of the run: settings, log, checkpoint.")],
    model: Annotated[str | None, typer.Option(help=TARGET)] = None,
    data: Annotated[str | None, typer.Option(help=f"{DATA} See 'train regenerate'.")] = None,
    held_out: Annotated[
        str | None, typer.Option(help="JSONL to evaluate on. Without it: the end of the data.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="Method, such as dspine; a wrong one lists all.")
    ] = "dspine",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.NAME=VALUE",
            help="A setting of train, loss or drafter, such as train.steps=4000; repeatable.",
        ),
    ] = None,
    target_layers: Annotated[
        str | None, typer.Option(help="Start the draft layers as these target layers: 3,4,5.")
    ] = None,
    warm_start: Annotated[
        str | None, typer.Option(help="Start from this drafter, such as a DFlash checkpoint.")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="Compute the target's features once, into this folder.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUTPUT.")] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw OUTPUT/curves.png at the end.")
    ] = False,
    export: Annotated[
        Layout, typer.Option(help="Names in OUTPUT/drafter: mlx, or hf (SpecForge's layout).")
    ] = Layout.mlx,
    dtype: Annotated[
        Dtype, typer.Option(help="Of the weights in OUTPUT/drafter.")
    ] = Dtype.bfloat16,
    bidirectional: Annotated[
        bool, typer.Option("--bidirectional", help="Slots see later slots; for comparison only.")
    ] = False,
    strict: Strict = False,
) -> None:
    """Train a drafter on texts of its target. Ctrl-C saves; --resume continues bit for bit. If a
    finished run's OUTPUT/drafter was moved away, --resume writes it again."""
    from dspine_mlx.models.needs import check_needs

    if not resume:
        check_needs(model, warm_start)  # before large imports, so that it is said at once
    from dspine_mlx.train.run import Run, new_run

    if resume:
        todo = Run.read(output)
    elif model is None or data is None:
        raise InputError("a new run needs --model and --data; an old one goes on with --resume")
    elif output.exists():
        raise InputError(f"{output} exists already; add --resume, or name a new folder")
    else:
        todo = new_run(
            method,
            model,
            data,
            settings or [],
            published=export is Layout.hf,
            held_out=held_out,
            target_layers=parse_layers(target_layers),
            warm_start=warm_start,
            cache=cache,
            bidirectional=bidirectional,
            strict=strict,
        )
    work(todo, output, resume, Drafter(export, dtype), plot)


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    return tuple(whole_numbers("--target-layers", text))


def work(todo: "Run", output: Path, resume: bool, drafter: Drafter, plot: bool) -> None:
    """Build the run, train it, and leave OUTPUT/drafter."""
    from dspine_mlx.cli import plots
    from dspine_mlx.cli.output import check_matplotlib
    from dspine_mlx.cli.screen import progress_bar
    from dspine_mlx.train.export import check_layout
    from dspine_mlx.train.loop import read_log

    check_layout(todo.method, todo.drafter, drafter.layout is Layout.hf)
    curves = output / "curves.png"
    if plot:
        check_matplotlib()
    with progress_bar() as bar, interruptible() as interrupted:
        job = prepare(todo, output, bar)
        if not resume:
            todo.save(output)
        kept = job.trainer.finished and (output / "drafter").exists()
        finished = train(job, output, bar, interrupted, writer(job, todo.loss, output, drafter))
    if plot:
        curves.unlink(missing_ok=True)  # of an earlier part of this run
        plots.training(list(read_log(output / "log.jsonl")), curves)
    if not finished:
        typer.echo(
            f"Saved at step {job.trainer.step}. Go on with: dspine-mlx train run {output} --resume"
        )
        raise typer.Exit(130)
    where = f"The drafter is in {output / 'drafter'}"
    typer.echo(
        f"{where} since earlier; move it away to have it written again." if kept else f"{where}."
    )


def prepare(todo: "Run", output: Path, bar: "Progress") -> "Job":
    """Load the run's data, target, drafter and state; report lines of data that are left out."""
    from dspine_mlx.train.run import build

    task = bar.add_task("loading", total=None)

    def loading(what: str, done: int, total: int) -> None:
        bar.update(task, description=what, completed=done, total=total)

    job = build(todo, output, loading)
    bar.remove_task(task)
    for message in job.skipped:
        typer.echo(message, err=True)
    return job


def writer(job: "Job", loss: "LossConfig", output: Path, drafter: Drafter) -> Callable[[], None]:
    """Make the function that keeps the present weights as the best and writes OUTPUT/drafter."""
    import mlx.core as mx

    from dspine_mlx.train.export import export

    dtypes = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}

    def write() -> None:
        job.trainer.save_best(output)
        export(
            job.trainer.drafter,
            output / "drafter",
            loss,
            hf=drafter.layout is Layout.hf,
            dtype=dtypes[drafter.dtype],
            replace=True,
        )

    return write


def train(
    job: "Job", output: Path, bar: "Progress", interrupted: Event, write: Callable[[], None]
) -> bool:
    """Train to the end or to Ctrl-C; returns whether the end was reached. If a finished run's
    drafter was deleted, it is rewritten from the best checkpoint."""
    from dspine_mlx.train import loop

    trainer = job.trainer
    task = bar.add_task("training", total=trainer.config.steps, completed=trainer.step)

    def report(record: loop.Record) -> None:
        text = "loss {loss:.3f}  acceptance {greedy:.2f} greedy, {sampled:.2f} sampled"
        bar.update(task, description=text.format(**record), completed=trainer.step)

    finished = loop.train(
        trainer, job.held_out, output, export=write, report=report, stop=interrupted.is_set
    )
    if finished and not (output / "drafter").exists():
        trainer.restore_best(output)
        write()
    return finished


@contextmanager
def interruptible() -> "Iterator[Event]":
    """An event that the first Ctrl-C sets; a second one interrupts as usual."""
    event, before = Event(), signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


@app.command("regenerate")
def regenerate(
    data: Annotated[
        Path,
        typer.Argument(
            help="JSONL of chats, or prompts as bench and calibrate take them: .jsonl, or a prompt "
            "per line."
        ),
    ],
    output: Annotated[Path, typer.Argument(help="JSONL to append to; a stopped run goes on.")],
    model: Annotated[str, typer.Option(help=TARGET)],
    draft_model: Annotated[
        str | None,
        typer.Option(help="An earlier drafter for this target: the same texts, sooner."),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Repeat it to use several in turn. Default: 0 and 1."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Answers written at the same time.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    strict: Strict = False,
) -> None:
    """Rewrite the answers of DATA with the target itself, in batches. A drafter must learn
    these."""
    from dspine_mlx.models.needs import check_needs

    check_needs(model)  # before large imports, so that it is said at once

    import mlx.core as mx

    from dspine_mlx.arguments import check_seed, check_whole
    from dspine_mlx.cli.screen import progress_bar
    from dspine_mlx.load import load_drafter, resolve
    from dspine_mlx.target.open import open_target
    from dspine_mlx.train.data import Problems, read_prompts
    from dspine_mlx.train.regenerate import regenerate as rewrite

    check_seed(seed)
    check_whole("--max-tokens", max_tokens, 1)
    check_whole("--batch-size", batch_size, 1)
    problems = Problems(data, strict)
    chats = [chat for chat in read_prompts(problems) if len(chat.messages) > 1]
    for message in problems.lines:
        typer.echo(message, err=True)
    if not chats:
        raise InputError(f"{data} has no prompt that can be answered")
    target, tokenizer = open_target(resolve(model), model)
    drafter = None if draft_model is None else load_drafter(draft_model, target)
    mx.random.seed(seed)
    with progress_bar() as bar:
        task = bar.add_task("answers", total=len(chats))
        rewrite(
            target,
            tokenizer,
            chats,
            output,
            drafter=drafter,
            temperatures=tuple(temperature or (0.0, 1.0)),
            max_tokens=max_tokens,
            batch_size=batch_size,
            progress=lambda done, total: bar.update(task, completed=done),
        )
    typer.echo(f"answers to {len(chats)} prompts are in {output}")


@app.command("eval")
def evaluate(
    data: Annotated[Path, typer.Argument(help=f"{DATA} Held-out ones.")],
    model: Annotated[str | None, typer.Option(help=f"{TARGET} Without it: the demo pair.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Drafter: a folder or Hub id.")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts to decode, from the top of DATA.")] = 40,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Measure acceptance on held-out prompts: in real decoding, per slot, and beside prompt
    lookup."""
    from dspine_mlx.models.needs import check_needs

    check_needs(model, draft_model)  # before large imports, so that it is said at once

    from dspine_mlx.arguments import check_seed, check_whole
    from dspine_mlx.cli.screen import progress_bar
    from dspine_mlx.train.evaluate import measure

    check_seed(seed)
    check_whole("--prompts", prompts, 1)
    check_whole("--max-tokens", max_tokens, 1)
    with progress_bar() as bar:
        task = bar.add_task("prompts", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        report = measure(model, draft_model, data, prompts, max_tokens, seed, progress)
    if as_json:
        typer.echo(json.dumps(report))
        return
    for name in ("greedy", "sampled"):
        part = report[name]
        low, high = part["interval"]
        typer.echo(
            f"{name}: {part['acceptance_length']:.2f} tokens per round ({low:.2f} to {high:.2f}), "
            f"prompt lookup {part['prompt_lookup']:.2f}"
        )
        typer.echo("  by slot: " + " ".join(f"{rate:.2f}" for rate in part["slots"]))

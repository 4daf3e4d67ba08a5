"""dspine-mlx convert: a published drafter checkpoint to an MLX folder."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspine_mlx.cli.groups import Commands
from dspine_mlx.cli.options import whole_numbers
from dspine_mlx.errors import InputError

if TYPE_CHECKING:
    from dspine_mlx.convert.plan import Plan

app = Commands()

STORE, SOURCE, CHECK = "Storage", "Source", "Checks"


@app.command()
def convert(
    hf_path: Annotated[
        str, typer.Option("--hf-path", "--model", help="Checkpoint: a folder or a Hub id.")
    ],
    mlx_path: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")] = Path(
        "mlx_drafter"
    ),
    quantize: Annotated[
        bool,
        typer.Option("--quantize", "-q", help="Pack the large matrices.", rich_help_panel=STORE),
    ] = False,
    q_group_size: Annotated[
        int | None,
        typer.Option(
            help="Number of weights that share a scale; default: the mode's.", rich_help_panel=STORE
        ),
    ] = None,
    q_bits: Annotated[
        int | None,
        typer.Option(help="Bits per weight; default: the mode's.", rich_help_panel=STORE),
    ] = None,
    q_mode: Annotated[
        str, typer.Option(help="affine, mxfp4, nvfp4 or mxfp8.", rich_help_panel=STORE)
    ] = "affine",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float16, bfloat16 or float32 for what is not packed; default: as it comes.",
            rich_help_panel=STORE,
        ),
    ] = None,
    codes_bits: Annotated[
        str | None,
        typer.Option(
            help="8, 4 or none for DSpine's codes; default: 8 with -q, else none.",
            rich_help_panel=STORE,
        ),
    ] = None,
    codes_from_head: Annotated[
        bool,
        typer.Option(
            "--codes-from-head",
            help="Store a projection in place of the codes, which are then rebuilt from the "
            "target's unquantised LM head when loading.",
            rich_help_panel=STORE,
        ),
    ] = False,
    quant_predicate: Annotated[
        str | None, typer.Option(help="Refused: a recipe for whole models.", hidden=True)
    ] = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", "-d", help="Refused: see --help.", hidden=True)
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Refused: no code is run.", hidden=True)
    ] = False,
    upload_repo: Annotated[
        str | None,
        typer.Option(help="Also upload the result to this Hub repository.", rich_help_panel=STORE),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Revision on the Hub.", rich_help_panel=SOURCE)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Target model: checks shapes, leaves out an embedding and head equal to its own, "
            "and gives the codes where the checkpoint has none.",
            rich_help_panel=SOURCE,
        ),
    ] = None,
    codes: Annotated[
        Path | None,
        typer.Option(
            help="File with DSpine's codes, if the checkpoint has none.", rich_help_panel=SOURCE
        ),
    ] = None,
    dequantize_head: Annotated[
        bool,
        typer.Option(
            "--dequantize-head",
            help="Compute codes even from a quantised target's head.",
            rich_help_panel=SOURCE,
        ),
    ] = False,
    rename: Annotated[
        Path | None,
        typer.Option(help="JSON table of tensor names, for unknown names.", rich_help_panel=SOURCE),
    ] = None,
    target_layer_ids: Annotated[
        str | None,
        typer.Option(
            help="Target layers the drafter reads, such as 1,9,17; only if config.json has none.",
            rich_help_panel=SOURCE,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan, write nothing.", rich_help_panel=CHECK),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare a round of the result with a NumPy evaluation of the source.",
            rich_help_panel=CHECK,
        ),
    ] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Run a known text through --target and the result, to catch misread checkpoints.",
            rich_help_panel=CHECK,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object only.", rich_help_panel=CHECK)
    ] = False,
) -> None:
    """Convert a published drafter checkpoint to an MLX folder."""
    refuse(quant_predicate, dequantize, trust_remote_code)
    layers = None
    if target_layer_ids is not None:
        layers = whole_numbers("--target-layer-ids", target_layer_ids)
    if probe and target is None:
        raise InputError("--probe runs the target: name it with --target")
    if verify and codes_from_head:
        raise InputError("--verify needs the codes, --codes-from-head stores none; use --probe")
    from dspine_mlx.models.needs import check_needs

    check_needs(hf_path, target)  # before large imports, so that it is said at once

    from dspine_mlx.convert.conversion import convert as run
    from dspine_mlx.convert.conversion import upload

    with Bar(hidden=as_json or dry_run) as bar:
        plan = run(
            hf_path,
            mlx_path,
            quantize,
            q_group_size,
            q_bits,
            q_mode,
            dtype,
            revision=revision,
            target=target,
            codes=codes,
            codes_bits=codes_bits,
            codes_from_head=codes_from_head,
            dequantize_head=dequantize_head,
            rename=rename,
            target_layer_ids=layers,
            dry_run=dry_run,
            progress=bar.update,
        )
    result = summary(plan, mlx_path, dry_run)
    if not as_json:
        show(plan, mlx_path, dry_run)
    good = True
    if verify and not dry_run:
        good &= run_verify(plan, mlx_path, result)
    if probe and target is not None and not dry_run:
        good &= run_probe(mlx_path, target, result)
    if upload_repo and good and not dry_run:
        upload(mlx_path, upload_repo)
    if as_json:
        typer.echo(json.dumps(result))
    if not good:
        raise typer.Exit(1)


def refuse(quant_predicate: str | None, dequantize: bool, trust_remote_code: bool) -> None:
    """Refuse flags of mlx_lm.convert that make no sense for a drafter."""
    if quant_predicate is not None:
        raise InputError(
            "--quant-predicate mixes the bits of a whole model's layers; a drafter's large "
            "matrices are packed alike, with -q and --q-bits"
        )
    if dequantize:
        raise InputError(
            "--dequantize can't bring a drafter's exact weights back; convert the published "
            "checkpoint without -q"
        )
    if trust_remote_code:
        raise InputError("--trust-remote-code is not needed: a drafter's folder has no code to run")


class Bar:
    """A progress bar of bytes on standard error."""

    def __init__(self, hidden: bool):
        from rich.progress import Progress

        from dspine_mlx.cli.screen import console

        screen = console(stderr=True)
        self.progress = Progress(console=screen, disable=hidden or not screen.is_terminal)
        self.task = self.progress.add_task("Converting", total=None)

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def update(self, done: int, total: int) -> None:
        self.progress.update(self.task, completed=done, total=total)


def summary(plan: "Plan", out: Path, dry_run: bool) -> dict[str, Any]:
    return {
        "mlx_path": None if dry_run else str(out),
        "method": plan.checkpoint.method.name,
        "layout": plan.checkpoint.layout.name,
        "tensors": [
            {
                "name": item.path,
                "from": list(item.sources),
                "shape": list(item.shape),
                "dtype": kind(item.dtype),
                "stored": kind(item.stored) if item.packing is None else item.packing,
                "bytes": item.nbytes,
            }
            for item in plan.items
        ],
        "bytes": plan.nbytes,
        "notes": list(plan.notes),
    }


def kind(dtype: object) -> str:
    return str(dtype).rpartition(".")[2]


def show(plan: "Plan", out: Path, dry_run: bool) -> None:
    if dry_run:
        from dspine_mlx.cli.screen import console, print_table

        print_table(console(), *plan_rows(plan))
    for note in plan.notes:
        typer.echo(f"Note: {note}")
    done = "Would write" if dry_run else "Wrote"
    typer.echo(
        f"{done} {out}: {plan.checkpoint.layout.name}, {len(plan.items)} tensors, "
        f"{plan.nbytes / 1e6:,.1f} MB"
    )


def plan_rows(plan: "Plan") -> tuple[list[str], list[list[str]]]:
    """The plan in columns: parameter, shape, dtypes, bytes, source tensors."""
    rows = []
    for item in plan.items:
        sources = "same" if item.sources == (item.path,) else " + ".join(item.sources)
        stored = kind(item.stored)
        if item.packing:
            stored = f"{item.packing['mode']} {item.packing['bits']} bits"
        shape = " x ".join(map(str, item.shape))
        rows.append([item.path, shape, kind(item.dtype), stored, f"{item.nbytes:,}", sources])
    return ["parameter", "shape", "dtype", "stored", "bytes", "from"], rows


def run_verify(plan: "Plan", out: Path, result: dict[str, Any]) -> bool:
    from dspine_mlx.convert.verify import verify

    method = plan.checkpoint.method
    if method.reference is None:
        result["verify"] = None
        typer.echo(f"Verify: not verified, {method.title} has no round in float64", err=True)
        return True
    found = verify(plan.checkpoint, out)
    result["verify"] = found._asdict() | {"passed": found.passed}
    why = "rounding only" if found.exact else "what packing and casting cost"
    typer.echo(
        f"Verify: one round differs from the source's by at most {found.difference:.2g}, of scores "
        f"up to {found.scale:.3g} ({why if found.passed else 'too much: the result is wrong'})",
        err=True,
    )
    return found.passed


def run_probe(out: Path, target: str, result: dict[str, Any]) -> bool:
    from dspine_mlx.convert.probe import probe, settle

    found = probe(out, target)
    result["probe"] = {
        "acceptance_length": found.acceptance_length,
        "rounds": found.rounds,
        "misread": found.misread,
        "readings": [reading._asdict() for reading in found.readings],
    }
    for reading in found.readings if len(found.readings) > 1 else ():
        typer.echo(
            f"Probe, {reading.name}: {reading.acceptance_length:.2f} tokens per round, "
            f"{reading.speed:.1f} per second",
            err=True,
        )
    if found.chosen is not None and found.chosen.changes and not found.misread:
        settle(out, found.chosen)
        typer.echo(f"Kept: {found.chosen.name}", err=True)
    verdict = (
        "; next to nothing is accepted: the checkpoint is read wrongly or was trained for another "
        "target"
        if found.misread
        else ""
    )
    typer.echo(
        f"Probe: {found.acceptance_length:.2f} tokens per round, of {found.rounds}{verdict}",
        err=True,
    )
    return not found.misread

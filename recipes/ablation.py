"""The ablation table: methods and DSpine's parts on the same target, data, budget and backbone.

    python -m recipes.ablation runs/ablation --model runs/demo/target --target-layers 3,4,5 \\
        --data runs/demo/train.jsonl --held-out runs/demo/held-out.jsonl

There is one run per variant and seed, all reading one cache of the target's features. A finished
run is a line of results.jsonl; a stopped one is resumed. The table holds the finished runs.
Acceptance lengths are from real decoding on the held-out prompts, with the weights of the last
step, and with 95 % intervals from a bootstrap over prompts (all seeds of a variant together).
"""

import json
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import numpy as np
import typer
from mlx.nn import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.cli.train import parse_layers
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.proposal import SlotwiseProposal
from dspine_mlx.train.config import TrainConfig
from dspine_mlx.train.data import Problems, prompt_tokens, read_chats
from dspine_mlx.train.evaluate import Decoded, acceptance, decode, lookup_length
from dspine_mlx.train.loop import Source, read_log, train
from dspine_mlx.train.objectives import objective_named
from dspine_mlx.train.run import Run, build
from dspine_mlx.train.settings import changed, parse_settings

MIX = {
    "reference": "distribution",
    "ce_start": 1.0,
    "ce_hold": 0.15,
    "ce_end": 0.7,
    "ce_weight": 0.2,
}
BUDGET = {"steps": 1000, "batch_size": 4, "num_anchors": 24, "learning_rate": 2e-3}
EVERY = {"save_every": 100, "evaluate_every": 100}
SHAPE = {"num_hidden_layers": 3, "target_layer_ids": [1, 3, 5], "block_size": 8}
CURVE = 40  # held-out sequences for the curve of teacher-forced acceptance
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


@dataclass(frozen=True)
class Variant:
    """A method, with changes to its loss and shape; all variants propose equally many tokens."""

    method: str = "dspine"
    loss: dict[str, Any] = field(default_factory=dict)
    first_slot: int = 1
    bidirectional: bool = False
    drafter: dict[str, Any] = field(default_factory=dict)


ALIGN = {"alignment_weight": 0.1}
PUBLISHED = {"reference": "token", "ce_start": None, "ce_weight": 0.1}  # DFlash: CE only
HALF = {"ce_weight": 0.5}
LENGTH = {"length_weight": 0.8, "length_start": 0.6}
VARIANTS = {
    "DFlash": Variant("dflash", {"ce_weight": 1.0}),
    "DSpark": Variant("dspark", first_slot=0),
    "DSpine": Variant(loss=ALIGN),
    "DSpine, no refinement": Variant(loss=ALIGN | {"refinement": False}),
    "DSpine, no injection, no refinement": Variant(
        loss=ALIGN | {"refinement": False, "injection": False}
    ),
    "DSpine, no alignment": Variant(loss={"alignment_weight": 0.0}),
    "DSpine, token-CE alignment": Variant(loss=ALIGN | {"alignment": "token"}),
    "DSpine, alignment 0.5": Variant(),
    "DSpine, no curriculum": Variant(loss=ALIGN | {"replacement_probability": 0.0}),
    "DSpine, bidirectional": Variant(loss=ALIGN, bidirectional=True),
    "DSpark, first proposal from a mask": Variant("dspark"),
    "DFlash, losses as published": Variant("dflash", PUBLISHED | {"ce_weight": 1.0}),
    "DFlash, losses: CE down to .5": Variant("dflash", HALF),
    "DFlash, losses: CE down to .2": Variant("dflash"),
    "DSpark, losses as published": Variant("dspark", PUBLISHED, first_slot=0),
    "DSpark, losses: CE down to .5": Variant("dspark", HALF, first_slot=0),
    "DSpine, losses as published": Variant(loss=PUBLISHED | ALIGN),
    "DSpine, losses: CE down to .5": Variant(loss=HALF | ALIGN),
    "DSpine, expected length": Variant(loss=ALIGN | LENGTH),
    "DSpine, expected length, greedy": Variant(loss=ALIGN | LENGTH | {"length_greedy": 1.0}),
    "DSpine, two slots back": Variant(loss=ALIGN, drafter={"injection_reach": 2}),
    "DFlash2": Variant("dflash2"),
    "DFlash2, no slot before": Variant("dflash2", drafter={"conv_kernel_size": 1}),
    "DFlash2, losses: CE alone": Variant("dflash2", {"ce_weight": 1.0}),
    "Domino": Variant("domino"),
    "Domino, losses: CE alone": Variant("domino", {"ce_weight": 1.0}),
}
TABLE = [*list(VARIANTS)[:7], "DFlash2", "Domino"]
MIXES = [n for m in TABLE[:3] for n in VARIANTS if n == m or n.startswith(f"{m}, losses")]
BEYOND = ["DSpine", *(n for n in VARIANTS if "two slots" in n or "length" in n)]
BEYOND += ["DFlash2", "DFlash2, no slot before", "Domino"]
HEADS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark": {"enable_confidence_head": True, "confidence_head_with_markov": True},
    "dspine": {},
    "dflash2": {},
    "domino": {},
}


class Unrefined(Drafter):
    """A DSpine whose slots all pick from their base logits, as in DFlash."""

    def propose(self, anchor: int | mx.array, features: mx.array, cache: list) -> SlotwiseProposal:
        anchor = mx.array(anchor).reshape(())
        states, _, _ = self.network.injected_backbone(anchor, features, cache, self.target)
        return self.network.slotwise(self.target.head(states))


def main(
    folder: Annotated[Path, typer.Argument(help="Where the runs and the table go.")],
    model: Annotated[str, typer.Option(help="Target.")],
    data: Annotated[str, typer.Option(help="Its own answers, from 'train regenerate'.")],
    held_out: Annotated[str, typer.Option(help="The same, of other prompts.")],
    target_layers: Annotated[
        str | None, typer.Option(help="All drafters start as these target layers: 3,4,5.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="train.NAME=VALUE or drafter.NAME=VALUE, for all runs."),
    ] = None,
    rank: Annotated[int, typer.Option(help="Transfer rank; Markov rank and messages: half.")] = 128,
    seeds: Annotated[int, typer.Option(help="Runs a variant.")] = 3,
    only: Annotated[str, typer.Option(help="Variants, separated by ';'.")] = ";".join(TABLE),
    prompts: Annotated[int, typer.Option(help="Held-out prompts to decode.")] = 85,
) -> None:
    sections, names = parse_settings(settings or []), only.split(";")
    if sections["loss"]:
        raise typer.BadParameter("losses belong to the variants; set train. or drafter. only")
    if unknown := set(names) - VARIANTS.keys():
        raise typer.BadParameter(f"there is no variant {unknown.pop()!r}: {'; '.join(VARIANTS)}")
    base = Run(
        model,
        data,
        changed(TrainConfig(), BUDGET | EVERY | sections["train"]),
        objective_named("dspine").loss,
        held_out=held_out,
        target_layers=parse_layers(target_layers),
        drafter=SHAPE | sections["drafter"],
        cache=str(folder / "features"),
    )
    for seed in range(seeds):
        for name in names:
            if not any(r["name"] == name and r["seed"] == seed for r in results(folder)):
                run = configure(base, VARIANTS[name], rank)
                run = replace(run, train=replace(run.train, seed=seed))
                one_run(run, name, folder, prompts)
            (folder / "table.md").write_text(table(folder, names), encoding="utf-8")


def configure(base: Run, variant: Variant, rank: int) -> Run:
    """Configure the base run as this variant: its method's published constants, and the common
    mix."""
    sizes = {
        "dflash": {},
        "dspark": {"markov_rank": rank // 2},
        "dspine": {"transfer_rank": rank, "message_size": rank // 2},
        "dflash2": {"selector_rank": rank // 2},
        "domino": {"gru_hidden_dim": 2 * rank, "emb_dim": rank // 2},
    }
    own = {
        **variant.drafter,
        "first_slot": variant.first_slot,
        "block_size": base.drafter["block_size"] - 1 + variant.first_slot,
    }
    return replace(
        base,
        method=variant.method,
        loss=changed(objective_named(variant.method).loss, MIX | variant.loss),
        drafter=base.drafter | HEADS[variant.method] | sizes[variant.method] | own,
        bidirectional=variant.bidirectional,
    )


def one_run(run: Run, name: str, folder: Path, prompts: int) -> None:
    """Train and evaluate; the result is a line of folder/results.jsonl."""
    home = folder / f"{name} {run.train.seed}"
    resumed = home.exists()
    if resumed:
        run = Run.read(home)
    job = build(run, home, lambda what, done, total: None)
    if not resumed:
        run.save(home)
    start = time.process_time()
    curve = Source(job.held_out.sequences[:CURVE], job.held_out.observe)
    train(job.trainer, curve, home, export=lambda: None, report=partial(progress, home.name))
    seconds = None if resumed else time.process_time() - start  # earlier parts are not known
    record = {"name": name, "seed": run.train.seed, "processor_seconds": seconds}
    log = [r for r in read_log(home / "log.jsonl") if "held_out_greedy" in r]
    record["curve"] = [[r["step"], r["held_out_greedy"], r["held_out_sampled"]] for r in log]
    drafter = job.trainer.drafter
    drafter.network.eval()
    if not run.loss.refinement:
        drafter = Unrefined(drafter.network, drafter.target, drafter.verifier)
    chats = list(read_chats(Problems(Path(str(run.held_out)))))[:prompts]
    record |= judge(
        drafter, job.tokenizer, [prompt_tokens(c.messages[:-1], job.tokenizer) for c in chats]
    )
    with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def judge(
    drafter: Drafter, tokenizer: TokenizerWrapper, prompts: list[list[int]]
) -> dict[str, Any]:
    """Evaluate every prompt: [drafts accepted, rounds], greedy and sampled, and prompt lookup's."""
    model: Module = drafter.target.model
    counts: dict[str, Any] = {}
    for name, temperature in TEMPERATURES.items():
        mx.random.seed(0)
        texts = decode(model, tokenizer, drafter, prompts, temperature)
        counts[name] = [[t.accepted, t.rounds] for t in texts]
        counts[f"{name}_lookup"] = lookup_length(texts, drafter.config.num_proposals)
    return counts


def progress(name: str, record: dict[str, float]) -> None:
    if record["step"] % 100 == 0:
        print(name, {n: round(v, 3) for n, v in record.items()}, flush=True)


def results(folder: Path) -> list[dict[str, Any]]:
    path = folder / "results.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def table(folder: Path, names: list[str]) -> str:
    """Make the table of variants in Markdown, from the results so far."""
    lines = [
        "| | seeds | greedy | T = 1 | greedy, against DSpine | T = 1, against DSpine | "
        "prompt lookup: greedy, T = 1 | CPU minutes per run |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    records = results(folder)
    for name in names:
        rows = [r for r in records if r["name"] == name]
        if not rows:
            continue
        cells = []
        for kind in TEMPERATURES:
            texts = [Decoded([], [], *pair) for row in rows for pair in row[kind]]
            cells.append("{:.2f} ({:.2f} to {:.2f})".format(*acceptance(texts)))
        dspine = [r for r in records if r["name"] == "DSpine"]
        cells += [against(rows, dspine, kind) for kind in TEMPERATURES]
        lookup = ", ".join(f"{rows[0][f'{kind}_lookup']:.2f}" for kind in TEMPERATURES)
        seconds = [r["processor_seconds"] for r in rows if r["processor_seconds"] is not None]
        minutes = f"{np.mean(seconds) / 60:.1f}" if seconds else "not measured"
        row = [name, str(len(rows)), *cells, lookup, minutes]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def against(rows: list[dict[str, Any]], others: list[dict[str, Any]], kind: str) -> str:
    """Compare the acceptance length with the others', over common seeds, with a 95 % interval from
    a bootstrap over the same prompts for both; kind: of TEMPERATURES."""
    seeds = sorted({r["seed"] for r in rows} & {r["seed"] for r in others})
    if not seeds or rows[0]["name"] == others[0]["name"]:
        return ""
    counts = np.array(  # [2, seeds, prompts, accepted and rounds]
        [[r[kind] for s in seeds for r in part if r["seed"] == s] for part in (rows, others)]
    )
    prompts = counts.shape[2]
    picks = np.random.default_rng(0).integers(0, prompts, (2000, prompts))
    sums = counts[:, :, np.concatenate([[np.arange(prompts)], picks])].sum(axis=(1, 3))
    lengths = 1 + sums[..., 0] / sums[..., 1]
    change = 100 * (lengths[0] / lengths[1] - 1)
    low, high = np.quantile(change[1:], (0.025, 0.975))
    return f"{change[0]:+.1f} % ({low:+.1f} to {high:+.1f})"


if __name__ == "__main__":
    typer.run(main)

"""The ablation table: methods and DSpine's parts on the same target, data, budget and backbone.

    python -m recipes.ablation runs/ablation --model runs/demo/target \\
        --data runs/demo/train.jsonl --held-out runs/demo/held-out.jsonl

One run a variant and seed, all reading one cache of the target's features. Runs that are there are
resumed or skipped, so it may be stopped at any time; the table is made of what is finished.
Acceptance lengths are the real loop's on the held-out prompts, with 95 % intervals from a bootstrap
over prompts (of all seeds of a variant together).
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import typer
from mlx.nn import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.dflash import DFlash, Proposal
from dspine_mlx.dspine import DSpine
from dspine_mlx.train.config import LOSSES, TrainConfig
from dspine_mlx.train.data import Problems, prompt_tokens, read_chats
from dspine_mlx.train.evaluate import Decoded, acceptance, decode, lookup_length
from dspine_mlx.train.loop import train
from dspine_mlx.train.run import Run, build
from dspine_mlx.train.settings import changed

MIX = {"reference": "law", "ce_start": 1.0, "ce_hold": 0.15, "ce_end": 0.7}
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


@dataclass(frozen=True)
class Variant:
    method: str = "dspine"
    loss: dict[str, Any] = field(default_factory=dict)
    bidirectional: bool = False


VARIANTS = {
    "DFlash": Variant("dflash", {"ce_weight": 1.0, "ce_start": 1.0}),
    "DSpark": Variant("dspark"),
    "DSpine": Variant(),
    "DSpine, no refinement": Variant(loss={"refinement": False}),
    "DSpine, no injection, no refinement": Variant(loss={"refinement": False, "injection": False}),
    "DSpine, no alignment": Variant(loss={"alignment_weight": 0.0}),
    "DSpine, token-CE alignment": Variant(loss={"alignment": "token"}),
    "DSpine, no curriculum": Variant(loss={"replacement_probability": 0.0}),
    "DSpine, bidirectional": Variant(bidirectional=True),
}


class Unrefined(DSpine):
    """Every slot picks from its base logits, as in DFlash."""

    def propose(self, anchor: int | mx.array, features: mx.array, cache: list) -> Proposal:
        states, _, _ = self.injected_backbone(mx.array(anchor).reshape(()), features, cache)
        candidates, scores = self.candidates(states)
        M, K = scores.shape
        return Proposal(candidates, scores[0], mx.broadcast_to(scores[1:, None], (M - 1, K, K)))


def main(
    folder: Annotated[Path, typer.Argument(help="Where the runs and the table go.")],
    model: Annotated[str, typer.Option(help="Target.")],
    data: Annotated[str, typer.Option(help="Its own answers, from 'train regenerate'.")],
    held_out: Annotated[str, typer.Option(help="The same, of other prompts.")],
    steps: Annotated[int, typer.Option(help="Optimiser steps a run.")] = 2400,
    layers: Annotated[int, typer.Option(help="Draft layers.")] = 3,
    taps: Annotated[str, typer.Option(help="Target layers to read.")] = "1,3,5",
    seeds: Annotated[int, typer.Option(help="Runs a variant.")] = 3,
    only: Annotated[str, typer.Option(help="Variants, separated by ';'. Default: all.")] = "",
    prompts: Annotated[int, typer.Option(help="Held-out prompts to decode.")] = 85,
) -> None:
    names = only.split(";") if only else list(VARIANTS)
    drafter = {
        "num_hidden_layers": layers,
        "block_size": 16,
        "target_layer_ids": [int(tap) for tap in taps.split(",")],
    }
    settings = TrainConfig(
        steps=steps, batch_size=4, num_anchors=24, learning_rate=2e-3, save_every=100
    )
    base = Run(model, data, settings, LOSSES["dspine"], held_out=held_out, drafter=drafter)
    base = replace(base, cache=str(folder / "features"))
    for seed in range(seeds):
        for name in names:
            one_run(base, VARIANTS[name], seed, folder / f"{name} {seed}", prompts)
            write_table(folder, names, seeds)


def configure(base: Run, variant: Variant, seed: int) -> Run:
    """The base run as this variant; the published constants of its method, and the common mix."""
    own = {"dspine": {"transfer_rank": 128, "message_size": 64}, "dflash": {}, "dspark": HEADS}
    loss = changed(LOSSES[variant.method], MIX | {"ce_weight": 0.2} | variant.loss)
    return replace(
        base,
        method=variant.method,
        loss=loss,
        train=replace(base.train, seed=seed),
        drafter=base.drafter | own[variant.method],
        bidirectional=variant.bidirectional,
    )


# The same slots as the others propose, so the anchor's own slot stays unused.
HEADS = {
    "markov_rank": 64,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "first_slot": 1,
}


def one_run(base: Run, variant: Variant, seed: int, folder: Path, prompts: int) -> None:
    """Train and judge, unless that is done already; the result is folder/result.json."""
    result = folder / "result.json"
    if result.exists():
        return
    run = configure(base, variant, seed)
    if folder.exists():
        run = Run.read(folder)
    job = build(run, folder, lambda what, done, total: None)
    if not folder.exists():
        run.save(folder)
    train(job.trainer, job.held_out, folder, export=lambda: None, report=progress(folder.name))
    drafter = job.trainer.drafter
    drafter.eval()
    if not run.loss.refinement:
        drafter.__class__ = Unrefined
    chats = list(read_chats(Problems(Path(str(run.held_out)))))[:prompts]
    texts = judge(drafter, job.tokenizer, [prompt_tokens(c, job.tokenizer) for c in chats])
    part = folder / ".result.part"
    part.write_text(json.dumps({n: [asdict(t) for t in texts[n]] for n in texts}))
    part.rename(result)


def judge(
    drafter: DFlash, tokenizer: TokenizerWrapper, prompts: list[list[int]]
) -> dict[str, list[Decoded]]:
    model: Module = drafter.target.model
    texts = {}
    for name, temperature in TEMPERATURES.items():
        mx.random.seed(0)
        texts[name] = decode(model, tokenizer, drafter, prompts, temperature)
    return texts


def progress(name: str) -> Callable[[dict[str, float]], None]:
    def report(record: dict[str, float]) -> None:
        if record["step"] % 100 == 0:
            print(name, {n: round(v, 3) for n, v in record.items()}, flush=True)

    return report


def write_table(folder: Path, names: list[str], seeds: int) -> None:
    """folder/table.md from the results that are there."""
    lines = [
        "| | seeds | greedy | T = 1 | prompt lookup, greedy |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in names:
        files = [folder / f"{name} {seed}" / "result.json" for seed in range(seeds)]
        results = [json.loads(file.read_text()) for file in files if file.exists()]
        if not results:
            continue
        cells = []
        for kind in TEMPERATURES:
            texts = [Decoded(**text) for result in results for text in result[kind]]
            cells.append("{:.2f} ({:.2f} to {:.2f})".format(*acceptance(texts)))
        greedy = [Decoded(**text) for text in results[0]["greedy"]]
        row = [name, str(len(results)), *cells, f"{lookup_length(greedy, 15):.2f}"]
        lines.append(f"| {' | '.join(row)} |")
    (folder / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

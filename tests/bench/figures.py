"""The speeds in README's figures and docs/notes/training-results.md, measured again.

    pip install --no-deps reasoning-gym
    python -m tests.bench.figures demo
    python -m tests.bench.figures smollm2 runs/smollm2 "runs/ablation-smollm2/DSpine 0/drafter"
    python -m tests.bench.do_no_harm --drafter random --dtype float32 --tokens 512 --sweeps 5

They need a machine without other work. On Linux preload a fast BLAS:
LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3 OPENBLAS_NUM_THREADS=2

Commands are printed before they run, and results at the end as rows of a Markdown table. `smollm2`
takes the folders that training-results.md makes. The last command gives README's last row.
"""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import mlx.core as mx
import typer

from dspine_mlx.load import DEMO
from recipes.demo import HELD_OUT_SEED
from recipes.word_problems import questions

app = typer.Typer(help=__doc__)
Row = dict[str, Any]
HEAD = (
    "| pair | texts | mode | times mlx-lm's speed (range) | auto over it | tokens/s | identical |"
)


def command(*arguments: str | Path) -> None:
    words = ["dspine-mlx", *map(str, arguments)]
    print(f"$ {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "dspine_mlx.cli", *words[1:]], check=True)


def bench(folder: Path, model: Path, draft_model: Path, *options: str | Path) -> list[Row]:
    """The rows of `dspine-mlx bench`, by mode."""
    out = folder / f"{len(list(folder.iterdir()))}.json"
    pair = ("--model", model, "--draft-model", draft_model)
    command("bench", *pair, *options, "--json", out)
    rows: list[Row] = json.loads(out.read_text())["results"][0]["ways"]
    return rows


def line(pair: str, row: Row) -> str:
    low, high = row["speedup_range"] or (0, 0)
    auto = "" if row["auto_speedup"] is None else f"{row['auto_speedup']:.2f}"
    return (
        f"| {pair} | {row['texts_in_ratios']} | {row['way']} | {row['speedup'] or 0:.2f} "
        f"({low:.2f} to {high:.2f}) | {auto} | {row['tokens_per_second']:.0f} | "
        f"{row['identical']} of {row['texts']} |"
    )


def show(tables: dict[str, list[Row]]) -> None:
    print(f"\n{HEAD}\n|{' --- |' * 7}")
    for pair, rows in tables.items():
        for row in rows:
            print(line(pair, row))


def in_float32(source: Path, folder: Path) -> Path:
    """A copy with float32 weights: CPUs have no fast half precision."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    weights: dict[str, mx.array] = mx.load(str(path))
    floats = {k: v.astype(mx.float32) for k, v in weights.items() if v.dtype == mx.float16}
    mx.save_safetensors(str(path), weights | floats, {"format": "mlx"})
    return folder


@app.command()
def demo(
    texts: Annotated[int, typer.Option(help="Held-out word problems.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens per text.")] = 128,
    repeat: Annotated[int, typer.Option(help="Runs of each text and mode.")] = 3,
) -> None:
    """The pair that ships, in float32, on word problems that it was not trained on."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        prompts = folder / "held-out.jsonl"
        asked = questions(texts, HELD_OUT_SEED)
        prompts.write_text("".join(json.dumps({"question": q}) + "\n" for q in asked))
        pair = [in_float32(DEMO / part, folder / part) for part in ("target", "drafter")]
        sizes = ("--limit", str(texts), "-m", str(tokens), "--repeat", str(repeat))
        options = ("--suite", prompts, "--compare", "auto,fixed:4", *sizes)
        show({"the pair that ships": bench(folder, *pair, *options)})


@app.command()
def smollm2(
    data: Annotated[Path, typer.Argument(help="What recipes.smollm2 and regenerate have made.")],
    drafter: Annotated[Path, typer.Argument(help="The trained DSpine drafter.")],
) -> None:
    """SmolLM2-135M: as trained, and after a calibration, which stays in ~/.cache/dspine-mlx."""
    held_out = ("--suite", data / "held-out.questions.jsonl")
    target, wide = data / "target", "fixed:5,fixed:7,fixed:9,fixed:11,auto"
    calibration = ("--limit", "30", "--max-tokens", "96", "--temps", "0")
    twenty = (*held_out, "--limit", "20", "-m", "128", "--compare", "auto", "--repeat", "1")
    sixteen = (*held_out, "--limit", "16", "-m", "96", "--compare", wide, "--repeat", "3")
    with TemporaryDirectory() as name:
        folder = Path(name)
        tables = {"SmolLM2, uncalibrated": bench(folder, target, drafter, *twenty)}
        pair = ("--model", target, "--draft-model", drafter)
        command("calibrate", *pair, "--prompts", data / "train.questions.jsonl", *calibration)
        tables["SmolLM2, 20 texts"] = bench(folder, target, drafter, *twenty)
        tables["SmolLM2, 16 texts"] = bench(folder, target, drafter, *sixteen)
    show(tables)


if __name__ == "__main__":
    app()

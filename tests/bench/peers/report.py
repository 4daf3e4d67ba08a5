"""Records of `compare` as one Markdown table, and as JSON.

    python -m tests.bench.peers.report runs/peers/demo.jsonl [--json FILE]

Speeds are medians over prompts and rounds, of whole texts with their prompts; the ratio is to
mlx_lm.stream_generate on the same prompt in the same round, and so is that of this package to
another one with the same drafter and length. CPU time counts what runs in parallel twice, but other
load does not change it. A text is the same if its tokens are plain decoding's.
Where one is not, the divergence is the number of tokens before, and the margin how far the target
prefers its own token there, in nats: what rounding decides is near 0.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from dspine_mlx.measure.compare import divergence

PLAIN, OURS = "mlx-lm", "dspine-mlx"
Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def runs(records: list[Record], mode: str) -> dict[tuple[int, int], Record]:
    """What a mode did, by prompt and round."""
    found = [r for r in records if r.get("way") == mode and "tokens" in r]
    return {(r["prompt"], r["round"]): r for r in found}


def ours(records: list[Record], mode: str) -> float | None:
    """How many times as fast this package is with the same drafter and length: the median over
    texts of the same prompt and round."""
    package, _, how = mode.partition(", ")
    own, other = runs(records, f"{OURS}, {how}"), runs(records, mode)
    if package == OURS or not own or not other:
        return None
    speeds = {
        key: len(r["tokens"]) / r["seconds"] * other[key]["seconds"] / len(other[key]["tokens"])
        for key, r in own.items()
        if key in other
    }
    return median(speeds.values())


def divergences(records: list[Record], mode: str) -> Iterator[tuple[int, int]]:
    """(prompt, tokens before it) of every text of the first round that is not plain's."""
    plain = runs(records, PLAIN)
    for (prompt, round_), run in sorted(runs(records, mode).items()):
        same = plain[prompt, round_]["tokens"]
        if round_ == 0 and run["tokens"] != same:
            yield prompt, divergence(run["tokens"], same)


def summary(records: list[Record], mode: str) -> Record:
    """A row: what is known of the package, and medians; or why there are none."""
    facts = {k: v for r in records if r.get("way") == mode and "version" in r for k, v in r.items()}
    row = {"way": mode, "version": facts.get("version"), "code_lines": facts.get("code_lines")}
    errors = [r["error"] for r in records if r.get("way") == mode and "error" in r]
    if errors:
        return row | {"error": errors[-1]}
    plain, own = runs(records, PLAIN), runs(records, mode)
    if not own:
        return row | {"error": "not measured yet"}
    speeds = {key: len(r["tokens"]) / r["seconds"] for key, r in own.items()}
    base = {key: len(plain[key]["tokens"]) / plain[key]["seconds"] for key in own}
    ratios = sorted(speeds[key] / base[key] for key in own)
    cpu = [
        (plain[key]["cpu_seconds"] / r["cpu_seconds"])
        * (len(r["tokens"]) / len(plain[key]["tokens"]))
        for key, r in own.items()
    ]
    margins = {(r["way"], r["prompt"]): r["margin"] for r in records if "margin" in r}
    return row | {
        "tokens_per_second": median(speeds.values()),
        "speedup": median(ratios),
        "speedup_range": [ratios[0], ratios[-1]],
        "ours": ours(records, mode),
        "cpu_speedup": median(cpu),
        "tokens_per_round": sum(len(r["tokens"]) for r in own.values())
        / sum(r["rounds"] for r in own.values()),
        "texts": len(own),
        "identical": sum(r["tokens"] == plain[key]["tokens"] for key, r in own.items()),
        "forks": [
            {"prompt": prompt, "after": after, "margin": margins.get((mode, prompt))}
            for prompt, after in divergences(records, mode)
        ],
        "peak_memory_gb": max(r["memory"] for r in own.values()),
    }


def markdown(rows: list[Record]) -> str:
    names = ("", "version", "tokens/s", "x plain", "x plain, CPU time", OURS, "a round")
    more = ("same text", "first fork (margin)", "peak GB", "code lines")
    lines = [(*names, *more), ("---", *["---:"] * 10)]
    for row in rows:
        known = (row["way"], row["version"] or "", str(row["code_lines"] or ""))
        if "error" in row:
            lines.append((*known[:2], *[""] * 6, row["error"][:120], "", known[2]))
            continue
        lines.append(
            (
                *known[:2],
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup']:.2f}",
                f"{row['cpu_speedup']:.2f}",
                "" if row["ours"] is None else f"{row['ours']:.2f}",
                f"{row['tokens_per_round']:.2f}",
                f"{row['identical']}/{row['texts']}",
                divergence_text(row["forks"]),
                f"{row['peak_memory_gb']:.3f}",
                known[2],
            )
        )
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines
    )


def divergence_text(found: list[Record]) -> str:
    """The earliest divergence."""
    if not found:
        return ""
    first = min(found, key=lambda f: f["after"])
    margin = "" if first["margin"] is None else f" ({first['margin']:.2g})"
    return f"after {first['after']}{margin}"


def main(
    files: Annotated[list[Path], typer.Argument(help="Records of `compare`.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the rows here.")
    ] = None,
) -> None:
    tables = []
    for file in files:
        records = read_records(file)
        rows = [summary(records, mode) for mode in records[0]["ways"]]
        print(f"\n{file.stem}: {json.dumps(records[0])}\n\n{markdown(rows)}")
        tables.append({"name": file.stem, "settings": records[0], "rows": rows})
    if json_file is not None:
        if json_file.exists():
            raise typer.BadParameter(f"{json_file} exists; name a new file")
        json_file.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

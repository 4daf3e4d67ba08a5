"""Speed over plain decoding on predicted curves: a table of docs/notes/kernels.md.

    MLX_DISABLE_COMPILE=1 python -m tests.bench.predicted_speeds

Each cell has the policy, calibrated on other texts, then the best fixed length in hindsight.
"""

from collections.abc import Iterator

from tests.bench.simulate import HERE, Trace, compare, curve_of, load_trace, made_up
from tests.bench.verify_rows import predicted

DEPTH = 512  # tokens of context


def texts() -> list[list[Trace]]:
    """Recorded, and made up."""
    recorded = load_trace(HERE / "demo_trace.npz")
    return [recorded, [made_up(400, 7, 1.2, seed) for seed in range(5)]]


def cell(traces: list[Trace], entry: dict) -> str:
    speed = compare(traces, curve_of(entry, traces[0].slots), calibrated=True, start=DEPTH)
    auto = speed.pop("auto")
    best = max(speed, key=speed.__getitem__)
    return f"{auto:.2f} ({speed[best]:.2f} at {best})"


def rows(names: str = "") -> Iterator[str]:
    """Of the chips and bits whose name begins so."""
    entries = {entry["name"]: entry for entry in predicted()}
    chips = [name.removesuffix(", stock") for name in entries if name.endswith(", stock")]
    known = texts()
    for name in (chip for chip in chips if chip.startswith(names)):
        cells = [
            cell(traces, entries[f"{name}, {kind}"])
            for traces in known
            for kind in ("stock", "kernels")
        ]
        yield f"| {' | '.join([name, *cells])} |"


def main() -> None:
    print("| | recorded: MLX's rows | with kernels | made up: MLX's rows | with kernels |")
    print("|---|---|---|---|---|")
    for row in rows():
        print(row, flush=True)


if __name__ == "__main__":
    main()

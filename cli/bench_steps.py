"""Bench's last part: what rows of a verify forward cost, and how many texts are equal."""

import math
from dataclasses import asdict
from typing import Any

from dspine_mlx.cli.screen import console, print_table
from dspine_mlx.measure.compare import PLAIN, Models, verify_length
from dspine_mlx.measure.verify_steps import VerifySteps, time_verify_steps


def verify_steps(pair: Models, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Measure what rows of a verify forward cost, and count the texts that are plain decoding's.
    Not for a user who wants to stop."""
    if pair.drafter is None or not results or results[-1]["interrupted"]:
        return {}
    kernels = pair.drafter.target.verify_kernels
    try:
        steps = time_verify_steps(pair.drafter)
    except KeyboardInterrupt:
        return {}
    equal = equal_texts(results)
    exact = math.isfinite(kernels.width_limit)
    broken = exact and equal is not None and equal[0] < equal[1]
    show(steps, kernels.promise(), equal, broken)
    return {
        "verify_steps": asdict(steps),
        "verify_kernels": kernels.report(),
        "promise": kernels.promise(),
        "equal_texts": equal,
        "promise_broken": broken,
    }


def equal_texts(results: list[dict[str, Any]]) -> list[int] | None:
    """How many of our drafted texts are plain decoding's, of how many; None: they were sampled."""
    ours = [
        row
        for result in results
        for row in result["ways"]
        if row["way"] != PLAIN and verify_length(row["way"]) is not None
    ]
    if any(row["identical"] is None for row in ours):
        return None
    return [sum(row["identical"] for row in ours), sum(row["texts"] for row in ours)]


def show(steps: VerifySteps, promise: str, equal: list[int] | None, broken: bool) -> None:
    """T(rows)/T(1) without and with kernels, and what they do to texts. broken: a promise of
    equal texts."""
    screen, one = console(), steps.stock[1]
    screen.print(
        f"\nRows of a verify forward after {steps.positions} positions, in multiples of one row "
        f"({1e3 * one:.1f} ms)"
    )
    lines = {"MLX's products": steps.stock}
    if steps.kernels:
        lines["with kernels"] = steps.kernels
    rows = [
        [label, *(f"{t[w] / one:.2f}" if w in t else "-" for w in steps.stock)]
        for label, t in lines.items()
    ]
    print_table(screen, ["", *map(str, steps.stock)], rows)
    screen.print(promise)
    if equal is not None:
        screen.print(f"{equal[0]} of {equal[1]} drafted texts are plain decoding's.")
    if broken:
        screen.print("That breaks the promise of --kernels exact: please send dspine-mlx report.")

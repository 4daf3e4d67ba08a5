"""Races of kernels and checks of targets in the cache folder, in words: for doctor and report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dspine_mlx.cache_folder import reading
from dspine_mlx.errors import InputError
from dspine_mlx.target import checked_widths
from dspine_mlx.target.products import STOCK, name
from dspine_mlx.target.race import MODES, Race, Verdict
from dspine_mlx.target.verdicts import Verdicts, as_dict, entry, kernels_key, sorted_items
from dspine_mlx.verify_length import store
from dspine_mlx.verify_length.on_file import UNREADABLE, days_old, files

SHOWN = (2, 4, 8, 16)  # rows
SLOW = 2.0  # single rows: a round with so dear a verify forward must bring twice the tokens
DIFFERENCES = {  # of a key, in words
    "device": "it was raced on {}",
    "architecture": "it was raced on {}",
    "macos": "it was raced under macOS {}",
    "mlx": "it was raced with MLX {}",
    "kernels": "it was raced with other kernels",
}


@dataclass(frozen=True)
class RacesOnFile:
    """The verdicts of a file. problem: why they are not used, in words."""

    name: str
    days: float  # since it was written
    mode: str
    problem: str
    verdicts: Verdicts

    def as_dict(self) -> dict[str, Any]:
        entries = [as_dict(*key, verdict) for key, verdict in sorted_items(self.verdicts)]
        facts = {"name": self.name, "days": self.days, "mode": self.mode, "problem": self.problem}
        return facts | {"verdicts": entries}


def races_on_file() -> Iterator[RacesOnFile]:
    for path in files("kernels"):
        days = days_old(path)
        try:
            with reading(path) as data:
                verdicts = dict(map(entry, data["verdicts"]))
                key, mode = dict(data["key"]), str(data["key"]["mode"])
        except InputError:
            yield RacesOnFile(path.name, days, "", UNREADABLE, {})
            continue
        yield RacesOnFile(path.name, days, mode, foreign(key, mode), verdicts)


def foreign(key: dict[str, Any], mode: str) -> str:
    """Why verdicts under this key are not used here, or ""."""
    if mode not in MODES:
        return UNREADABLE
    here = kernels_key(Race(mode))
    for field, words in DIFFERENCES.items():
        if key.get(field) != here[field]:
            return words.format(key.get(field))
    return ""


def shapes_in_words(verdicts: Verdicts) -> Iterator[tuple[str, str]]:
    """What a race found for each shape, and what remains slow there, or ""."""
    for shape in dict.fromkeys(shape for (shape, _), _ in sorted_items(verdicts)):
        found = sorted((rows, v) for (of, rows), v in verdicts.items() if of == shape)
        shown = [(rows, v) for rows, v in found if rows in SHOWN] or found[:1]
        parts = "; ".join(f"{rows} rows {in_words(verdict)}" for rows, verdict in shown)
        yield f"{shape}: {parts}", still_slow(found)


def in_words(verdict: Verdict) -> str:
    """Costs in single rows where one row was timed, or in milliseconds."""
    product = "MLX's" if verdict.product == STOCK else name(verdict.product)
    if not verdict.seconds:
        return f"{product} ({verdict.why})"
    unit = f"{1e3 * verdict.seconds:.3g} ms"
    others = f"{1e3 * verdict.stock:.3g}"
    if verdict.one_row:
        unit, others = (f"{s / verdict.one_row:.2f}" for s in (verdict.seconds, verdict.stock))
    return f"{product} {unit}" + ("" if verdict.product == STOCK else f" (MLX's {others})")


def still_slow(found: Sequence[tuple[int, Verdict]]) -> str:
    """From how many rows on a product costs more than twice one row, and why no kernel helps."""
    for rows, verdict in found:
        if verdict.one_row and verdict.seconds > SLOW * verdict.one_row:
            cost = f"{rows} rows cost {verdict.seconds / verdict.one_row:.1f} single rows"
            if verdict.product != STOCK:
                return f"still slow: {cost} with the best kernel"
            reasons = "; ".join(verdict.rejected)
            return f"still slow: {cost}; {verdict.why}" + (f"; left out: {reasons}" * bool(reasons))
    return ""


def checks_on_file() -> Iterator[dict[str, Any]]:
    """Results of exact mode's check: their target's digest, the widths, and where some differ."""
    for key, widths in checked_widths.entries(store.cache_folder()):
        yield {
            "target": str(key.get("target")),
            "mlx": str(key.get("mlx")),
            "device": str(key.get("device")),
            "widths": sorted(widths),
            "unequal": {str(w): where for w, where in sorted(widths.items()) if where},
        }


def check_in_words(check: dict[str, Any]) -> str:
    widths, unequal = check["widths"], check["unequal"]
    equal = f"target {check['target']} checked with MLX {check['mlx']} on {check['device']}: "
    equal += f"{len(widths) - len(unequal)} of {len(widths)} widths have plain decoding's bits"
    first = next(iter(unequal), None)
    return equal if first is None else f"{equal}; {first} rows: {unequal[first]}"

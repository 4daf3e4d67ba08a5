"""Does a drafter understand its target? Acceptance on a text that any model continues the same."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dspine_mlx.convert.write import write_json
from dspine_mlx.drafters import method_of
from dspine_mlx.errors import InputError
from dspine_mlx.generate import stream_generate
from dspine_mlx.load import load
from dspine_mlx.round.statistics import GenerationResponse

TEXT = (
    "Here are the numbers from one to one hundred, in order: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"
)
MISREAD = 1.2  # tokens per round; a drafter with wrong taps, slots or rotations stays below


ENOUGH = 0.98  # of the best reading's tokens per round


class Reading(NamedTuple):
    """One reading of a checkpoint; changes {} is as it was converted."""

    name: str
    changes: dict[str, Any]  # of its config
    acceptance_length: float  # tokens per round, the target's own included
    speed: float  # tokens per second


class Probe(NamedTuple):
    acceptance_length: float  # tokens per round, of the chosen reading
    rounds: int
    text: str
    chosen: Reading | None = None  # the fastest of those with enough tokens per round
    readings: tuple[Reading, ...] = ()

    @property
    def misread(self) -> bool:
        return self.acceptance_length < MISREAD


def probe(drafter: str | Path, target: str | Path, max_tokens: int = 96) -> Probe:
    """Continue a known text greedily with target and drafter, always drafting whole blocks.

    Each reading that the drafter's method offers has two runs; the first one is a warm-up.
    """
    model, tokenizer, loaded = load(target, drafter)
    assert loaded is not None
    network, config = loaded.network, loaded.config
    changes: dict[str, dict[str, Any]] = {"as converted": {}}
    changes |= method_of(network).readings(config, loaded.verifier)
    found: dict[str, tuple[Reading, GenerationResponse, str]] = {}
    for name in [*changes, *changes]:
        network.config = replace(config, **changes[name])
        options: dict[str, Any] = {"max_tokens": max_tokens, "verify_length": config.num_proposals}
        responses = list(stream_generate(model, tokenizer, TEXT, loaded, **options))
        last = responses[-1]
        if not last.rounds:
            raise InputError(f"{target} ended the probe's text at once, so nothing was drafted")
        reading = Reading(name, changes[name], last.acceptance_length, last.generation_tps)
        found[name] = reading, last, "".join(r.text for r in responses)
    network.config = config
    best = max(reading.acceptance_length for reading, _, _ in found.values())
    enough = [x for x in found.values() if x[0].acceptance_length >= ENOUGH * best]
    chosen, last, text = max(enough, key=lambda x: x[0].speed)
    readings = tuple(reading for reading, _, _ in found.values())
    return Probe(chosen.acceptance_length, last.rounds, text, chosen, readings)


def settle(folder: Path, reading: Reading) -> None:
    """Store a reading as the one to load a converted folder with."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | reading.changes
    part = path.with_name(".config.json.part")
    write_json(part, config)
    os.replace(part, path)

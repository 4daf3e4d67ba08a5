"""Does a drafter understand its target? Acceptance on a text that any model continues the same."""

from pathlib import Path
from typing import NamedTuple

from dspine_mlx.errors import InputError
from dspine_mlx.generate import stream_generate
from dspine_mlx.load import load

TEXT = (
    "Here are the numbers from one to one hundred, in order: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"
)
MISREAD = 1.2  # tokens a round; a drafter whose taps, slots or rotations are wrong stays below


class Probe(NamedTuple):
    acceptance_length: float  # tokens a round, the target's own included
    rounds: int
    text: str

    @property
    def misread(self) -> bool:
        return self.acceptance_length < MISREAD


def probe(drafter: str | Path, target: str | Path, max_tokens: int = 96) -> Probe:
    """Continue a known text greedily with target and drafter, always drafting whole blocks."""
    model, tokenizer, loaded = load(target, drafter)
    assert loaded is not None
    responses = list(
        stream_generate(
            model,
            tokenizer,
            TEXT,
            loaded,
            max_tokens=max_tokens,
            verify_length=loaded.config.num_proposals,
        )
    )
    last = responses[-1]
    if not last.rounds:
        raise InputError(f"{target} ended the probe's text at once, so nothing was drafted")
    return Probe(last.acceptance_length, last.rounds, "".join(r.text for r in responses))

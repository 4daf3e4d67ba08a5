"""A pair's schedule: what its policies know from text to text, and which policy a text gets."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mlx_lm.sample_utils import Sampler as SamplerFunction

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.round.policy import Fixed, Policy
from dspine_mlx.verify_length.auto import Auto
from dspine_mlx.verify_length.calibration import (
    Calibration,
    fit_temperatures,
    load_calibrations,
    mode_of,
    uncalibrated,
)
from dspine_mlx.verify_length.costs import Costs, costs_of
from dspine_mlx.verify_length.rules import sampled_verify_length, verify_length

__all__ = [
    "Auto",
    "Fixed",
    "Policy",
    "sampled_verify_length",
    "fit_temperatures",
    "policy_for",
    "verify_length",
]


@dataclass
class Schedule:
    """What outlives one text: a pair's costs, calibrations, and a policy for each serving mode."""

    costs: Costs
    calibrations: dict[str, Calibration]
    explain: Callable[[str], None] | None = None
    policies: dict[str, Auto] = field(default_factory=dict)

    def policy(self, drafter: Drafter, sampler: SamplerFunction) -> Auto:
        mode = mode_of(sampler)
        if mode not in self.policies:
            calibration = self.calibrations.get(mode) or uncalibrated(drafter.config.num_proposals)
            self.policies[mode] = Auto(self.costs, calibration, self.explain)
        return self.policies[mode]


def prepare(
    drafter: Drafter,
    *,
    profile: bool = True,
    calibration: Path | None = None,
    explain: Callable[[str], None] | None = None,
) -> Schedule:
    """Make a bound drafter's schedule now; otherwise the first generation does.

    profile: measure the costs if they are not cached (a few seconds), or start from a guess.
    calibration: a file that `dspine-mlx calibrate` wrote; None: the pair's own, if there is one.
    explain: is given a line for every round and probe.
    """
    calibrations = load_calibrations(drafter, calibration)
    schedule = Schedule(costs_of(drafter, profile), calibrations, explain)
    drafter.schedule = schedule
    return schedule


def check_length(verify_length: int | str | Policy) -> None:
    wrong = isinstance(verify_length, str) and verify_length != "auto"
    if wrong or (isinstance(verify_length, int | float) and verify_length not in range(1 << 30)):
        raise InputError(f"verify_length is {verify_length!r}; it must be 'auto' or 0 or above")


def policy_for(
    verify_length: int | str | Policy, drafter: Drafter, sampler: SamplerFunction
) -> Policy:
    if isinstance(verify_length, int):
        return Fixed(min(verify_length, drafter.config.num_proposals))
    if isinstance(verify_length, str):
        return (drafter.schedule or prepare(drafter)).policy(drafter, sampler)
    return verify_length

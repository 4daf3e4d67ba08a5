"""What a pair remembers between texts and processes, and which policy a text gets."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mlx_lm.sample_utils import Sampler as SamplerFunction

from dspine_mlx.batch.policy import BatchPolicy
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.round.lookup import COPIED, CopyChances
from dspine_mlx.round.policy import Fixed, Policy
from dspine_mlx.verify_length import profile as profiling
from dspine_mlx.verify_length import store
from dspine_mlx.verify_length.auto import Auto
from dspine_mlx.verify_length.budget import Budget
from dspine_mlx.verify_length.calibration import Calibration, mode_of, uncalibrated
from dspine_mlx.verify_length.costs import Costs, Curve
from dspine_mlx.verify_length.readings import use_reading

log = logging.getLogger(__name__)
MINUTE = 60.0  # seconds, at least, between two writes of what a process learnt


@dataclass
class Schedule:
    """What outlives one text: a pair's costs, calibrations, and a policy for each serving mode."""

    costs: Costs
    calibrations: dict[str, Calibration]
    explain: Callable[[str], None] | None = None
    budgets: dict[str, Budget] = field(default_factory=dict)  # by mode
    keep: Callable[[Curve, dict[str, Budget]], None] | None = None  # writes them to the file
    policies: dict[str, Auto] = field(default_factory=dict)
    batch: BatchPolicy | None = None  # of several texts at once
    kept_at: float = -MINUTE

    def policy(self, drafter: Drafter, sampler: SamplerFunction) -> Auto:
        mode = mode_of(sampler)
        if mode not in self.policies:
            calibration = self.calibrations.get(mode) or uncalibrated(drafter.config.num_proposals)
            budget = self.budgets.setdefault(mode, Budget())
            self.policies[mode] = Auto(
                self.costs, calibration, self.explain, budget=budget, text_over=self.text_over
            )
        return self.policies[mode]

    def text_over(self) -> None:
        """Write back what was learnt, unless something else disturbs this process."""
        now = time.monotonic()
        if self.keep and now - self.kept_at >= MINUTE and not self.costs.disturbed:
            self.kept_at = now
            self.keep(self.costs.learnt(), self.budgets)


def prepare(
    drafter: Drafter,
    *,
    profile: bool = True,
    calibration: Path | None = None,
    explain: Callable[[str], None] | None = None,
) -> Schedule:
    """Make a bound drafter's schedule now; otherwise the first generation does.

    profile: measure the costs if they are not on file (a few seconds), or start from a guess.
    calibration: a file that `dspine-mlx calibrate` wrote; None: the pair's own, if there is one.
    explain: called with a line for every round and probe.
    """
    calibrations = store.load_calibrations(drafter, calibration)
    if calibration is not None:
        use_reading(drafter, store.load_reading(drafter, calibration))
    curve, budgets = pair_costs(drafter) if profile else (profiling.guess(drafter), {})
    keep = partial(store.write_costs, drafter) if profile and not curve.contradiction() else None
    schedule = drafter.schedule = Schedule(Costs(curve), calibrations, explain, budgets, keep)
    return schedule


def pair_costs(drafter: Drafter) -> tuple[Curve, dict[str, Budget]]:
    """A pair's curve and budgets from the file, or measured now.

    Costs that contradict themselves are measured once more, and not kept if they still do.
    """
    curve, budgets, misfit = store.read_costs(drafter)
    drafter.misfit = misfit or drafter.misfit
    if curve is not None:
        return curve, budgets
    curve = profiling.measure(drafter)
    if curve.contradiction():
        curve = profiling.measure(drafter)
    if curve.contradiction():
        log.warning("the measured costs are not kept: %s", curve.contradiction())
    else:
        store.write_costs(drafter, curve, {})
    return curve, {}


def schedule_of(drafter: Drafter) -> Schedule:
    """A drafter's schedule, made now if it has none."""
    schedule = drafter.schedule
    return schedule if isinstance(schedule, Schedule) else prepare(drafter)


def policy_for(
    verify_length: int | str | Policy, drafter: Drafter, sampler: SamplerFunction
) -> Policy:
    slots = drafter.config.num_proposals
    if verify_length == 0 or drafter.plain or drafter.target.verify_kernels.width_limit < 2:
        return Fixed(0)
    if isinstance(verify_length, str):
        return schedule_of(drafter).policy(drafter, sampler)
    if not isinstance(verify_length, int):
        return verify_length
    if slots:
        return Fixed(min(verify_length, slots))
    return Fixed(min(verify_length, COPIED), parked=True, copies=CopyChances())

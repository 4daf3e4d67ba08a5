"""Which reading of a checkpoint serves a pair best: tokens per round on real texts, by what rounds
cost here. Other readings are other settings of the drafter that draft from the same weights."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dspine_mlx.drafters import method_of
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.verify_length.misfit import Misfit
from dspine_mlx.verify_length.profile import step_seconds

CLEAR = 1.02  # times the speed of the checkpoint as it is, from which another reading replaces it
AS_IT_IS = "as it is"
Accepted = Callable[[], np.ndarray]  # decodes texts: tokens [n] that n whole rounds accepted
Seconds = Callable[[Drafter, list[int]], dict[int | str, float]]  # of a draft, and by width


class Reading(NamedTuple):
    """One reading, offering whole blocks, and at the length that is fastest for it."""

    name: str
    changes: dict[str, Any]  # of the drafter's config; {}: none
    acceptance_length: float  # tokens per round of whole blocks, the target's own included
    length: int  # the fastest
    speed: float  # tokens per second of rounds of that length

    @classmethod
    def of(
        cls,
        name: str,
        changes: dict[str, Any],
        accepted: np.ndarray,
        seconds: dict[int | str, float],
    ) -> "Reading":
        """The speed of length l is that of 1 + min(accepted, l) tokens in draft + T(1 + l)
        seconds."""
        lengths = range(1, max(width for width in seconds if isinstance(width, int)))
        speeds = [
            float(1 + np.minimum(accepted, n).mean()) / (seconds["draft"] + seconds[1 + n])
            for n in lengths
        ]
        fastest = int(np.argmax(speeds))
        return cls(name, changes, float(1 + accepted.mean()), lengths[fastest], speeds[fastest])


def compare_readings(
    drafter: Drafter, accepted: Accepted, seconds: Seconds = step_seconds
) -> list[Reading]:
    """Measure the checkpoint as it is and every other reading that its method offers; none where it
    offers no other. The drafter stays as it is."""
    network, own = drafter.network, drafter.network.config
    others = method_of(network).readings(own, drafter.verifier)
    if not others:
        return []
    forwards = seconds(drafter, list(range(1, own.num_proposals + 2)))
    found, misfit, as_it_is = list[Reading](), drafter.misfit, dict[str, Any]()
    try:
        for name, changes in ({AS_IT_IS: as_it_is} | others).items():
            network.config, drafter.misfit = replace(own, **changes), Misfit()
            draft = seconds(drafter, [])["draft"]
            found.append(Reading.of(name, changes, accepted(), forwards | {"draft": draft}))
    finally:
        network.config, drafter.misfit = own, misfit
    return found


def fastest(found: list[Reading]) -> Reading:
    """The reading to use; the first one, as it is, unless another is clearly faster."""
    best = max(found, key=lambda reading: reading.speed)
    return best if best.speed > CLEAR * found[0].speed else found[0]


def use_reading(drafter: Drafter, changes: dict[str, Any]) -> None:
    """Draft with another reading; one that the drafter's method does not offer is ignored."""
    network = drafter.network
    if changes in method_of(network).readings(network.config, drafter.verifier).values():
        network.config = replace(network.config, **changes)

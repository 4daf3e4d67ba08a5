"""Which policy the texts of a batch get."""

from dspine_mlx.batch.policy import BatchPolicy, FixedLength
from dspine_mlx.batch.profile import batch_curves
from dspine_mlx.batch.scheduled import Scheduled
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.round.lookup import COPIED
from dspine_mlx.verify_length.schedule import schedule_of


def batch_policy(verify_length: int | str, drafter: Drafter) -> BatchPolicy:
    """The policy that `verify_length` names: a number of tokens, or "auto"."""
    if isinstance(verify_length, int):
        return FixedLength(min(verify_length, drafter.config.num_proposals))
    schedule = schedule_of(drafter)
    if schedule.batch is None:
        if not drafter.config.num_proposals:
            schedule.batch = Scheduled(schedule, COPIED, drafter=False)
            return schedule.batch
        curves, keep = batch_curves(drafter, schedule)
        slots, shortens = drafter.config.num_proposals, drafter.config.causal_block
        schedule.batch = Scheduled(schedule, slots, curves, shortens, keep)
    return schedule.batch

"""Plain decoding in a group: the text of `generate` without a drafter, one row per forward."""

from typing import ClassVar

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.lookup_only import LookupOnly
from dspine_mlx.target.model import Target


class NoDrafter(Drafter):
    """Drafts nothing, whatever the verify length says.

    mlx-lm's own loop runs on every rank and can't be left on one of them alone. Through this class
    plain texts have what drafted ones have: rank 0 decides, and may stop anywhere.
    """

    plain: ClassVar[bool] = True

    def __init__(self, target: Target):
        super().__init__(LookupOnly(), target, target)

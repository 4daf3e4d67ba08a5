"""Proposals for several texts, from one forward of the drafter."""

from collections.abc import Sequence
from typing import overload

import mlx.core as mx

from dspine_mlx.drafters.chain import AnyProposal
from dspine_mlx.drafters.proposal import Proposal, SlotwiseProposal


def flat(rows: mx.array) -> mx.array:
    """The slots of all texts [B, n, ...] in one row: [B n, ...]."""
    return rows.reshape(-1, *rows.shape[2:])


class Proposals(Sequence[AnyProposal]):
    """One proposal per text.

    joint: all of them in one, whose arrays have a leading text axis, so that one walk serves them;
    None: each is walked by itself.
    """

    def __init__(self, proposals: list[AnyProposal] | Proposal | SlotwiseProposal):
        self.joint = None if isinstance(proposals, list) else proposals
        self.own = proposals if isinstance(proposals, list) else proposals.texts()

    @overload
    def __getitem__(self, text: int) -> AnyProposal: ...

    @overload
    def __getitem__(self, text: slice) -> Sequence[AnyProposal]: ...

    def __getitem__(self, text: int | slice) -> AnyProposal | Sequence[AnyProposal]:
        return self.own[text]

    def __len__(self) -> int:
        return len(self.own)
